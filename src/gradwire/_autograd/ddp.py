"""Parameters that DistributedDataParallel averages over its replicas.

Its reducer hooks the AccumulateGrad nodes of its parameters, in C++, and works on `.grad`. So where
such parameters take part, the engine must really accumulate: during the run, `.grad` holds the
context's gradients, which are then moved back, and the previous `.grad` is restored. A reducer
waits for all parameters of its module, which several runs of a pass may reach, and then sets all of
them.

There is no registry of such modules. While there are workers, they are registered on creation.
Older ones are searched for among all objects when the first worker starts, if there is a process
group then: without one there can be none.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from ..errors import GradwireError
from ..locks import CheckedLock
from . import hooks

Known = Callable[[Tensor], "Tensor | None"]
Keep = Callable[[Tensor, Tensor], None]

_PATIENCE = 60.0  # seconds that a pass waits for another
_NAP = 0.05  # seconds between checks whether the pass has ended
_lock = CheckedLock()
_watchers = 0
_handle: Any = None


class Replica:
    """A module and its parameters. Its reducer does not support two passes at once."""

    def __init__(self, module: Module) -> None:
        found = [p for p in module.parameters() if p.requires_grad]
        self.parameters = {id(parameter): parameter for parameter in found}
        self.lock = threading.Lock()


_replicas: WeakKeyDictionary[DistributedDataParallel, Replica] = WeakKeyDictionary()
_were_seen: list[bool] = []
"""Not empty: there was such a module, ever. Quicker to look at."""


def known() -> list[Replica]:
    """All replicated modules."""
    if not _were_seen or not _replicas or not _is_group():
        return []
    with _lock:
        return list(_replicas.values())


def _is_group() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def replicated(nodes: Iterable[Any]) -> list[Replica]:
    """The replicated modules that have some of these leaves, which are given by their nodes."""
    replicas = known()
    if not replicas:
        return []
    leaves = {id(node.variable) for node in nodes}
    return [r for r in replicas if not leaves.isdisjoint(r.parameters)]


def watch() -> None:
    """Register such modules from now on, and find existing ones. Ends with `unwatch`."""
    global _watchers, _handle
    with _lock:
        _watchers += 1
        if _watchers > 1:
            return
        _handle = register_module_module_registration_hook(_gets_part)
        hooks.leave_out(_handle)
        if not _is_group():  # nor can there be any
            return
        for thing in gc.get_objects():
            if issubclass(type(thing), DistributedDataParallel):
                _note(thing, Replica(thing))


def unwatch() -> None:
    """The last to unwatch removes all hooks from torch."""
    global _watchers
    with _lock:
        _watchers -= 1
        if not _watchers:
            _handle.remove()


def _note(module: DistributedDataParallel, replica: Replica) -> None:
    _were_seen[:] = [True]
    _replicas[module] = replica


def _gets_part(module: Module, name: str, part: Module) -> None:
    """A replicated module is registered when it is created."""
    if isinstance(module, DistributedDataParallel):
        replica = Replica(part)
        with _lock:
            _note(module, replica)


@contextmanager
def _taken(replica: Replica, is_over: Callable[[], bool]) -> Iterator[None]:
    """Used by one pass at a time.

    Two passes may each hold a module that the other needs, on different workers: so the wait is
        limited.

    Raises:
        GradwireError: another pass holds it for too long, or the pass has ended.
    """
    deadline = time.monotonic() + _PATIENCE
    while not replica.lock.acquire(timeout=_NAP):
        if is_over():
            raise GradwireError("the pass is over")
        if time.monotonic() > deadline:
            raise GradwireError(
                "a module in DistributedDataParallel is still used by another backward pass "
                f"after {_PATIENCE:g} s: run such passes one after the other"
            )
    try:
        yield
    finally:
        replica.lock.release()


@contextmanager
def accumulating(
    replicas: Sequence[Replica],
    nodes: Iterable[Any],
    known: Known,
    keep: Keep,
    is_over: Callable[[], bool],
) -> Iterator[None]:
    """Let `.grad` of all leaves be `known(leaf)` meanwhile; `keep` gets what it is at the end."""
    own = [p for replica in replicas for p in replica.parameters.values()]
    leaves = {id(leaf): leaf for leaf in [*(n.variable for n in nodes), *own]}.values()
    with ExitStack() as locks:
        for replica in sorted(replicas, key=id):
            locks.enter_context(_taken(replica, is_over))
        before = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = known(leaf)
        found: list[Tensor | None] = []
        try:
            yield
            found = [leaf.grad for leaf in leaves]
        finally:
            for leaf, gradient in zip(leaves, before, strict=True):
                leaf.grad = gradient
        for leaf, gradient in zip(leaves, found, strict=True):
            if gradient is not None:
                keep(leaf, gradient)
