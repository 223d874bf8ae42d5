"""Tensors that go to a worker and come back as they are."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire._autograd.pass_state import Step
from gradwire.errors import GradwireError
from tests.autograd.functions import (
    MessageCounts,
    doubles,
    gradients_of_weighted,
    weighted,
)
from tests.worlds import Autograds, autograds

close = torch.testing.assert_close


def relay(
    world: Autograds, context: int, value: Tensor, times: int = 3
) -> tuple[Tensor, list[Tensor]]:
    """A value of worker 1 goes to worker 0 so many times, and back between; all that came there."""
    came = []
    for _ in range(times):
        if came:
            (value,) = world.transfer(0, 1, context, [value])
        (value,) = world.transfer(1, 0, context, [value])
        came.append(value)
    return value, came


def test_gradients_take_a_message_each_time_that_a_value_came_back() -> None:
    for times in (1, 2, 3, 5):
        with autograds(2) as world, world[0].context() as context:
            said = MessageCounts(world)
            x = doubles(3)
            value, _ = relay(world, context, torch.sin(x), times)
            world[0].backward(context, [value.sum()])
            close(world[1].get_gradients(context), {x: torch.cos(x.detach())})
            assert said.steps == {Step.RUN: times}


def test_several_tensors_of_a_message_come_back() -> None:
    with autograds(2) as world, world[0].context() as context:
        said = MessageCounts(world)
        x, y = doubles(3), doubles(3)
        came = world.transfer(1, 0, context, [x * 2, y * 3])
        back = world.transfer(0, 1, context, came)
        home = world.transfer(1, 0, context, back)
        world[0].backward(context, [(home[0] * home[1]).sum()])
        expected = {x: 6 * y.detach(), y: 6 * x.detach()}
        close(world[1].get_gradients(context), expected)
        assert said.steps == {Step.RUN: 2}


@pytest.mark.parametrize("order", [(1, 0), (0,), (0, 0), (0, 1, 0)])
def test_parts_of_a_message_come_back_in_any_order(order: tuple[int, ...]) -> None:
    with autograds(2) as world, world[0].context() as context:
        x, y = doubles(3), doubles(3)
        came = world.transfer(1, 0, context, [x * 2, y * 3])
        back = world.transfer(0, 1, context, [came[i] for i in order])
        home = world.transfer(1, 0, context, back)
        world[0].backward(context, [weighted(home)])
        expected = gradients_of_weighted([x * 2, y * 3], order, [x, y])
        close(world[1].get_gradients(context), expected)


def double(gradient: Tensor) -> Tensor:
    return gradient * 2


def double_all(gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(map(double, gradients))


WATCHED: dict[str, tuple[Callable[[Tensor], Any], int]] = {
    "hook": (lambda tensor: tensor.register_hook(double), 2),
    "hook of the node": (lambda t: t.grad_fn.register_prehook(double_all), 2),
    "retained": (lambda tensor: tensor.retain_grad(), 1),
    "changed": (lambda tensor: tensor.mul_(7), 1),
    "hook and changed": (lambda t: (t.register_hook(double), t.mul_(7)), 2),
}


@pytest.mark.parametrize("how", WATCHED)
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("is_gone", [False, True])
def test_what_someone_watches_on_the_way_is_run(
    how: str, which: int, is_gone: bool
) -> None:
    watch, factor = WATCHED[how]
    with autograds(2) as world, world[0].context() as context:
        x = doubles(3)
        value, came = relay(world, context, torch.sin(x))
        watch(came[which])
        watched = came[which]
        if is_gone:
            del came, watched
            gc.collect()
        world[0].backward(context, [value.sum()])
        expected = factor * torch.cos(x.detach())
        close(world[1].get_gradients(context), {x: expected})
        if how == "retained" and not is_gone:
            close(watched.grad, torch.ones_like(x))


def test_what_is_used_besides_on_the_way() -> None:
    with autograds(2) as world, world[0].context() as context:
        x = doubles(3)
        value, came = relay(world, context, torch.sin(x))
        world[0].backward(context, [(value * came[0]).sum()])
        (gx,) = torch.autograd.grad((torch.sin(x) ** 2).sum(), [x])
        close(world[1].get_gradients(context), {x: gx})


JOINED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda a, b: a + b,
    "sum of views": lambda a, b: a.view(-1) + b.view(-1),
    "one after the other": lambda a, b: torch.cat([a, b]),
}


@pytest.mark.parametrize("over", [0, 1])  # another worker, or itself
@pytest.mark.parametrize("how", JOINED)
@pytest.mark.parametrize("is_leaf", [False, True])
def test_what_came_back_has_gradients_of_its_own(
    over: int, how: str, is_leaf: bool
) -> None:
    join = JOINED[how]
    with autograds(2) as world, world[0].context() as context:
        x, y = doubles(2, 2), doubles(2, 2)
        back = []
        for each in (x, y):
            sent = each if is_leaf else each.clone()
            came = world.transfer(1, over, context, [sent])
            back += world.transfer(over, 1, context, came)
        (home,) = world.transfer(1, 0, context, [join(*back)])
        world[0].backward(context, [(home * home).sum()])
        found = world[1].get_gradients(context)
        local = (join(x, y) * join(x, y)).sum()
        expected = dict(zip((x, y), torch.autograd.grad(local, [x, y]), strict=True))
        close(found, expected)
        assert found[x].is_contiguous()
        found[x].mul_(7)
        close(found[y], expected[y])


def test_each_pass_goes_all_the_way() -> None:
    with autograds(2) as world, world[0].context() as context:
        said = MessageCounts(world)
        x = doubles(3)
        value, _ = relay(world, context, torch.sin(x))
        loss = value.sum()
        for count in range(1, 4):
            world[0].backward(context, [loss], retain_graph=True)
            expected = count * torch.cos(x.detach())
            close(world[1].get_gradients(context), {x: expected})
            assert said.steps == {Step.RUN: 3 * count}


def test_what_came_back_may_have_to_wait() -> None:
    with autograds(2) as world, world[0].context() as context:
        said = MessageCounts(world)
        x = doubles(3)
        h = torch.sin(x)
        (came,) = world.transfer(1, 0, context, [h * 2])
        (back,) = world.transfer(0, 1, context, [came])
        (other,) = world.transfer(1, 0, context, [h * 3])  # so they share a node
        (home,) = world.transfer(1, 0, context, [back])
        world[0].backward(context, [(home * other).sum()])
        (gx,) = torch.autograd.grad((6 * torch.sin(x) ** 2).sum(), [x])
        close(world[1].get_gradients(context), {x: gx})
        assert said.steps == {Step.RUN: 2}
        assert world.passes() == 0


@pytest.mark.parametrize("over", [0, 1])  # another worker, or itself
def test_what_had_to_wait_has_gradients_of_its_own(over: int) -> None:
    with autograds(2) as world, world[0].context() as context:
        leaves = [doubles(2, 2), doubles(2, 2)]
        back = []
        for leaf in leaves:
            h = leaf.view(-1)
            came = world.transfer(1, over, context, [h])
            world.transfer(1, 0, context, [h * 3])  # so they share a node
            back += world.transfer(over, 1, context, came)
        (home,) = world.transfer(1, 0, context, [back[0] + back[1]])
        world[0].backward(context, [(home * home).sum()])
        found = world[1].get_gradients(context)
        x, y = leaves
        expected = (2 * (x + y)).detach()
        close(found, {x: expected, y: expected})
        found[x].mul_(7)
        close(found[y], expected)


def test_an_error_on_the_way_is_told() -> None:
    with autograds(2) as world, world[0].context() as context:
        value, _ = relay(world, context, Unhappy.apply(doubles(3)))
        with pytest.raises(GradwireError, match="Error on Node 1: no gradients today"):
            world[0].backward(context, [value.sum()])
        assert world.passes() == 0


class Unhappy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise ValueError("no gradients today")
