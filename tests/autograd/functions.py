"""Tensors, functions of theirs, and looks at the passes over them."""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from gradwire._autograd.messages import PassRequest, read_request
from tests.rpc.functions import boom
from tests.worlds import LIMIT, Autograds


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
            assert self.open.wait(LIMIT)

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


class MessageCounts:
    """How many messages of each type the workers of a world send in passes."""

    def __init__(self, world: Autograds) -> None:
        self.kinds: Counter[type] = Counter()
        self.steps: Counter[int] = Counter()
        """Of passes."""
        for service in world.services:
            for name in ("ask", "request"):
                setattr(service, name, self._noting(getattr(service, name)))

    def _noting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def noting(to: int, message: Any, *others: Any) -> Any:
            self.kinds[type(message)] += 1
            if type(message) is PassRequest:
                self.steps[read_request(message)[0].step] += 1
            return original(to, message, *others)

        return noting


def boom_with(x: Tensor) -> None:
    boom()
