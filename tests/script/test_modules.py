"""Remote modules that scripts call."""

from typing import Any

import pytest
import torch
from torch import Tensor

import gradwire as gw
from gradwire.testing import World
from tests.script import functions as here
from tests.script.functions import script

ONES = torch.ones(2)


@torch.jit.interface
class Both(torch.nn.Module):
    def forward(self, x: Tensor, times: int = 2) -> Tensor:
        pass

    def forward_async(self, x: Tensor, times: int = 2) -> torch.futures.Future[Tensor]:
        pass


def made(to: str = "worker1") -> Any:
    return gw.RemoteModule(to, here.Scale, interface=here.Scales)


@pytest.mark.parametrize("to", ["worker0", "worker1"])
def test_a_scripted_handle_calls_the_module(world: World, to: str) -> None:
    handle = script(made(to))
    assert handle(ONES, 2).tolist() == [6, 6]
    assert handle.forward_async(ONES, 3).wait().tolist() == [9, 9]


def test_it_is_called_from_python_too(world: World) -> None:
    handle = made()
    assert handle(ONES, times=3).tolist() == [9, 9]
    assert handle.forward_async(ONES, 2).wait().tolist() == [6, 6]


def test_a_script_takes_one_by_its_interface(world: World) -> None:
    def call(module: Both, x: Tensor) -> Tensor:
        later = module.forward_async(x, 1)
        return module.forward(x, 2) + later.wait()

    assert script(call)(script(made()), ONES).tolist() == [9, 9]


class Around(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = made()
        self.bias = torch.nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, 2) + self.bias


def test_a_module_around_it_is_trained(world: World) -> None:
    model = script(Around())
    x = torch.ones(2, requires_grad=True)
    with gw.context() as ctx:
        gw.backward(ctx, [model(x).sum()])
        found = gw.get_gradients(ctx)
    assert found[x].tolist() == [6, 6]
    assert found[model.bias].tolist() == [1, 1]


def test_what_is_no_interface_is_refused(world: World) -> None:
    with pytest.raises(ValueError, match=r"decorated by @torch\.jit\.interface"):
        gw.RemoteModule("worker1", here.Scale, interface=here.Scale)
