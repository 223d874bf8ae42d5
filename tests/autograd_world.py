"""A world with distributed autograd, without the codec: tensors cross by hand.

`transfer` does what a message that carries tensors will do: record at the one end, copy, record at
the other.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from gradwire._autograd.recording import Recording
from gradwire._autograd.service import Autograd
from gradwire._wire.frames import Frame, Parcel
from gradwire._wire.messages import CALL
from gradwire.testing import World
from gradwire.worker import Worker

ENOUGH = 20.0
"""Seconds that nothing takes, unless it hangs."""


class Autograds:
    """The services of some workers."""

    world: World

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.services = [worker.autograd for worker in workers]

    def __getitem__(self, index: int) -> Autograd:
        return self.services[index]

    def __len__(self) -> int:
        return len(self.services)

    def transfer(
        self, src: int, dst: int, context_id: int, tensors: Sequence[Tensor]
    ) -> list[Tensor]:
        """The tensors as they arrive."""
        mark = self.leave(src, dst, context_id, tensors)
        copies = [tensor.detach().clone() for tensor in tensors]
        pairs = zip(tensors, copies, strict=True)
        recorded = [copy for tensor, copy in pairs if mark and tensor.requires_grad]
        frame = Frame(CALL, 0, 0, b"")
        frame.scope, frame.mark = context_id, mark
        self._recording(dst).arrived(frame, src, recorded)
        return copies

    def leave(
        self, src: int, dst: int, context_id: int, tensors: Sequence[Tensor]
    ) -> int:
        """Record that tensors leave; their mark."""
        context, parcel = self[src].contexts.arrived(context_id), Parcel(CALL, 0, b"")
        wanted = [tensor for tensor in tensors if tensor.requires_grad]
        self._recording(src).leaving(context, dst, parcel, wanted)
        return parcel.mark

    def _recording(self, index: int) -> Recording:
        return Recording(self[index])

    def close(self) -> None:
        for service in self.services:
            service.close()

    def passes(self) -> int:
        return sum(s.debug_info()["num_current_backward_passes"] for s in self.services)

    def until(self, condition: Callable[[], object]) -> None:
        """Look until it is so, for what no event tells."""
        deadline = time.monotonic() + ENOUGH
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def contexts(self) -> int:
        return sum(s.debug_info()["num_autograd_contexts"] for s in self.services)


class Said:
    """What the workers of a world say to each other in passes."""

    def __init__(self, world: Autograds) -> None:
        self.kinds: Counter[type] = Counter()
        for service in world.services:
            for name in ("ask", "request"):
                setattr(service, name, self._noting(getattr(service, name)))

    def _noting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def noting(to: int, message: Any, *others: Any) -> Any:
            self.kinds[type(message)] += 1
            return original(to, message, *others)

        return noting


@contextmanager
def autograds(size: int, **options: Any) -> Iterator[Autograds]:
    """A world with distributed autograd."""
    with World(size, **options) as world:
        services = Autograds(world.workers)
        services.world = world
        try:
            yield services
        finally:
            services.close()


def there_and_back(
    world: Autograds, context: int, tensor: Tensor, func: Callable[[Tensor], Tensor]
) -> Tensor:
    """What `func` makes of a tensor of worker 0 on worker 1."""
    (there,) = world.transfer(0, 1, context, [tensor])
    (back,) = world.transfer(1, 0, context, [func(there)])
    return back


class Gate:
    """A backward that waits until told to go on."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.open = threading.Event()

    def __call__(self, tensor: Tensor) -> Tensor:
        def hook(gradient: Tensor) -> None:
            self.entered.set()
            assert self.open.wait(ENOUGH)

        made = tensor * 1
        made.register_hook(hook)
        return made


class Raises(Function):
    """Raises in its backward, while switched on."""

    is_on = True
    error: Callable[[], Exception] = staticmethod(
        lambda: ValueError("this backward fails")
    )

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        if Raises.is_on:
            raise Raises.error()
        return gradients[0]


def doubles(*shape: int) -> Tensor:
    return torch.rand(*shape, dtype=torch.float64, requires_grad=True)


def weighted(tensors: Sequence[Tensor]) -> Tensor:
    """A sum in which each of them counts differently."""
    return torch.stack(
        [(5 * i + 1) * each.sum() for i, each in enumerate(tensors)]
    ).sum()


def gradients_of_weighted(
    values: Sequence[Tensor], order: Sequence[int], leaves: Sequence[Tensor]
) -> dict[Tensor, Tensor]:
    """The gradients of values in some order; each is that of one of the leaves."""
    known = [leaf for i, leaf in enumerate(leaves) if i in order]
    found = torch.autograd.grad(weighted([values[i] for i in order]), known)
    return dict(zip(known, found, strict=True))
