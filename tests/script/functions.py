"""Scripted functions to call.

The functions stand here under their own names, so that other workers find them; those that make
calls are scripted by the tests, while scripting is on.
"""

import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

import gradwire as gw


def script(value: Any) -> Any:
    """`torch.jit.script`, without its word on being deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)  # which it is from torch 2.15
        return torch.jit.script(value)


class Pair(NamedTuple):
    first: Tensor
    second: int


@torch.jit.interface
class Scales(torch.nn.Module):
    def forward(self, x: Tensor, times: int = 2) -> Tensor:
        pass


class Scale(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((2,), 3.0))

    def forward(self, x: Tensor, times: int = 2) -> Tensor:
        return self.weight * x * times


@script
def add(x: Tensor, y: Tensor) -> Tensor:
    return x + y


@script
def mixed(
    x: Tensor, word: str, number: int = 2, more: str = "!"
) -> tuple[Tensor, str, int]:
    return x * number, word + more, number


@script
def fuse(x: Tensor, y: Tensor) -> Tensor:
    return torch.tanh(x * y + x)


@script
def nothing(x: Tensor) -> None:
    x.add_(1)


@script
def no_arguments() -> int:
    return 3


@script
def fails(x: Tensor) -> Tensor:
    raise ValueError("no good today")
    return x


@script
def returns_none_or_list(is_list: bool) -> list[Tensor] | None:
    return [torch.ones(1)] if is_list else None


@script
def returns_dict(word: str) -> dict[str, list[int]]:
    return {word: [1, 2]}


@script
def returns_pair(x: Tensor) -> Pair:
    return Pair(x, 1)


class Kept(NamedTuple):
    rref: gw.RRef[Tensor]
    pairs: list[Pair]


def returns_references(x: Tensor) -> dict[str, list[gw.RRef[Tensor]]]:
    return {"a": [gw.remote("worker0", add, (x, x))]}


def returns_kept(x: Tensor) -> tuple[Kept, gw.RRef[Tensor] | None]:
    kept = Kept(gw.remote("worker0", add, (x, x)), [Pair(x, 2)])
    return kept, None


@torch.jit.ignore
def name_of_worker() -> str:
    return gw.get_worker_info().name


@script
def whoami() -> str:
    return name_of_worker()


@script
def named(x: Tensor) -> str:
    return name_of_worker()


def in_python(x: Tensor) -> Tensor:
    return x
