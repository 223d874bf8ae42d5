"""A model on three workers, and the same one in one process."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import gradwire as gw

SIZES = (6, 8, 8, 4)


def layer(index: int) -> nn.Sequential:
    """A layer whose numbers depend on nothing but its index."""
    made = nn.Linear(SIZES[index], SIZES[index + 1], dtype=torch.float64)
    random = torch.Generator().manual_seed(index)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.uniform_(-0.5, 0.5, generator=random)
    return nn.Sequential(made, nn.Tanh())


def local_model() -> nn.Sequential:
    return nn.Sequential(*(layer(index) for index in range(3)))


def spread_model(*workers: str) -> nn.Sequential:
    """The same, with each layer on a worker; None is here."""
    return nn.Sequential(
        *(
            gw.RemoteModule(worker, layer, (index,)) if worker else layer(index)
            for index, worker in enumerate(workers)
        )
    )


def batches(count: int) -> Iterator[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(7)
    for _ in range(count):
        x = torch.rand(5, SIZES[0], generator=random, dtype=torch.float64)
        yield x, torch.rand(5, SIZES[-1], generator=random, dtype=torch.float64)


def loss_of(model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean()


def local_step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    loss_of(model, x, y).backward()
    optimizer.step()


def spread_step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    with gw.context() as ctx:
        gw.backward(ctx, [loss_of(model, x, y)])
        optimizer.step(ctx)


def assert_same(model: nn.Module, local: nn.Module) -> None:
    """Equal but for the rounding of float64."""
    there, here = model.state_dict(), local.state_dict()
    assert list(there) == list(here)
    for name, value in here.items():
        torch.testing.assert_close(there[name], value, rtol=1e-11, atol=1e-13)
