"""Tensors on devices, in calls, results, references and backward passes."""

import pytest
import torch
from torch import Tensor, nn

import gradwire as gw
from gradwire.testing import World
from tests.devices.pretended import Elsewhere

FIRST, SECOND = torch.device("lazy:1"), torch.device("lazy:2")


def on(device: torch.device, *values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32).to(device).requires_grad_()


def device_and_double(x: Tensor) -> tuple[str, Tensor]:
    return str(x.device), x * 2


def moved(x: Tensor, device: torch.device) -> Tensor:
    return x.to(device) * 3


def test_pretended_devices_are_apart() -> None:
    with pytest.raises(RuntimeError, match="all tensors on one device"):
        on(FIRST, 1.0) + on(SECOND, 1.0)
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.ones(1).to("lazy:4")


def test_they_arrive_on_the_device_of_that_name_and_come_back_to_it(
    world: World,
) -> None:
    device, doubled = gw.rpc_sync("worker1", device_and_double, (on(FIRST, 1, 2),))
    assert device == "lazy:1"
    assert type(doubled) is Elsewhere
    assert doubled.device == FIRST
    assert doubled.cpu().tolist() == [2, 4]


def test_references_are_fetched_to_the_device_of_that_name(world: World) -> None:
    rref = gw.remote("worker1", moved, (torch.ones(2), SECOND))
    assert rref.to_here().device == SECOND
    assert rref.rpc_sync().cpu().tolist() == [3, 3]


def test_gradients_are_on_the_device_of_the_leaf(world: World) -> None:
    x, y = on(FIRST, 1, 2), on(torch.device("cpu"), 3, 4)
    with gw.context() as ctx:
        first = gw.rpc_sync("worker1", moved, (x, SECOND))
        second = gw.rpc_sync("worker1", moved, (y, SECOND))
        assert first.device == second.device == SECOND
        gw.backward(ctx, [(first * second).sum().cpu()])
        found = gw.get_gradients(ctx)
    assert (found[x].device, found[y].device) == (FIRST, y.device)
    assert found[x].cpu().tolist() == [27, 36]
    assert found[y].tolist() == [9, 18]


def test_parameters_there_get_their_gradients_there(world: World) -> None:
    layer = gw.RemoteModule("worker1/lazy:2", nn.Linear, (2, 1))
    x = on(FIRST, 1, 2)
    with gw.context() as ctx:
        loss = layer(x).sum()
        assert loss.device == torch.device("cpu")
        gw.backward(ctx, [loss])
        assert gw.get_gradients(ctx)[x].device == FIRST
        there = gw.rpc_sync("worker1", devices_of_gradients, (ctx,))
    assert there == {"lazy:2"}


def devices_of_gradients(ctx: int) -> set[str]:
    return {str(gradient.device) for gradient in gw.get_gradients(ctx).values()}
