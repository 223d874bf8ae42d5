"""Parameters that DistributedDataParallel averages over its replicas.

Its reducer hangs on to the AccumulateGrad nodes of its parameters, in C++, and works on `.grad`. So
where such parameters take part, the engine must really accumulate: the context's gradients are put
into `.grad` for the time of the run, and what was there is put back after it.

There is no list of such modules, and none is made unless there is a process group. Then they are
looked for among all objects, once for each parameter that has not been seen before.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet, ref

import torch.distributed
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from .contexts import Context

_lock = threading.Lock()
_running = threading.Lock()  # a reducer is not made for two passes at once
_modules: WeakSet[DistributedDataParallel] = WeakSet()
_seen: dict[int, Callable[[], object]] = {}  # weak references to parameters, by id


def replicated(nodes: Iterable[Any]) -> list[Tensor]:
    """The parameters of all replicated modules that have some of these leaves."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return []
    leaves = [node.variable for node in nodes]
    parameters = {id(leaf) for leaf in leaves if isinstance(leaf, Parameter)}
    if any(_is_new(leaf) for leaf in leaves if isinstance(leaf, Parameter)):
        _search()
    found: list[Tensor] = []
    with _lock:
        modules = list(_modules)
    for module in modules:
        own = [p for p in module.parameters() if p.requires_grad]
        if parameters.intersection(map(id, own)):
            found += own
    return found


def _is_new(parameter: Parameter) -> bool:
    known = _seen.get(id(parameter))
    if known is not None and known() is parameter:
        return False
    _seen[id(parameter)] = _weak(parameter)
    return True


def _weak(parameter: Parameter) -> Callable[[], object]:
    number = id(parameter)
    return ref(parameter, lambda _: _seen.pop(number, None))


def _search() -> None:
    with _lock:
        for thing in gc.get_objects():
            if issubclass(type(thing), DistributedDataParallel):
                _modules.add(thing)


@contextmanager
def swapped_in(context: Context, leaves: Sequence[Tensor]) -> Iterator[None]:
    """Have the context's gradients in `.grad`, and take them out again."""
    leaves = list({id(leaf): leaf for leaf in leaves}.values())
    with _running:
        before = [leaf.grad for leaf in leaves]
        with context.lock:
            for leaf in leaves:
                leaf.grad = context.gradients.get(leaf)
        try:
            yield
        finally:
            with context.lock:
                for leaf, grad in zip(leaves, before, strict=True):
                    if leaf.grad is not None:
                        context.gradients[leaf] = leaf.grad
                    leaf.grad = grad
