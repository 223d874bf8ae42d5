"""Gradients that can be differentiated again, and the functional form, across workers."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

import gradwire as gw
from gradwire.testing import World
from tests.autograd.functions import doubles
from tests.worlds import Autograds, autograds, orders

close = torch.testing.assert_close


def remote(world: Autograds, context: int, x: Tensor, w: Tensor) -> Tensor:
    """Something of `x` here and `w` on worker 1."""
    h = x**3
    (there,) = world.transfer(0, 1, context, [h])
    (back,) = world.transfer(1, 0, context, [torch.sin(there * w) * there])
    return (back * x + h).sum()


def local(x: Tensor, w: Tensor) -> Tensor:
    h = x**3
    return (torch.sin(h * w) * h * x + h).sum()


@orders
def test_second_derivatives_by_two_passes(seed: int | None) -> None:
    with autograds(2, seed=seed) as world, world[0].context() as context:
        x, w = doubles(3), doubles(3)
        world[0].backward(context, [remote(world, context, x, w)], create_graph=True)
        gx = world[0].get_gradients(context)[x]
        gw = world[1].get_gradients(context)[w]
        want_x, want_w = torch.autograd.grad(local(x, w), [x, w], create_graph=True)
        close(gx, want_x)
        close(gw, want_w)
        world[0].backward(context, [(gx**2).sum()])
        more_x, more_w = torch.autograd.grad((want_x**2).sum(), [x, w])
        close(world[0].get_gradients(context)[x], want_x + more_x)
        close(world[1].get_gradients(context)[w], want_w + more_w)


@orders
def test_third_derivatives(seed: int | None) -> None:
    with autograds(2, seed=seed) as world, world[0].context() as context:
        x, w = doubles(2), doubles(2)
        value, want = remote(world, context, x, w), local(x, w)
        for _ in range(2):
            (gx,) = world[0].grad(context, [value], [x], create_graph=True)
            (want_gx,) = torch.autograd.grad(want, [x], create_graph=True)
            assert gx is not None
            close(gx, want_gx)
            value, want = (gx**2).sum(), (want_gx**2).sum()
        (gx,) = world[0].grad(context, [value], [x])
        close(gx, torch.autograd.grad(want, [x])[0])


def test_the_functional_form_leaves_no_gradients() -> None:
    with autograds(2) as world, world[0].context() as context:
        x, w = doubles(3), doubles(3)
        (gx,) = world[0].grad(context, [remote(world, context, x, w)], [x])
        close(gx, torch.autograd.grad(local(x, w), [x])[0])
        assert world[0].get_gradients(context) == {}
        assert world[1].get_gradients(context) == {}


def test_gradients_of_what_is_no_leaf_and_of_more_than_scalars() -> None:
    with autograds(2) as world, world[0].context() as context:
        x = doubles(3)
        h = x * 2
        (there,) = world.transfer(0, 1, context, [h])
        (back,) = world.transfer(1, 0, context, [there**2])
        weights = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
        gh, gx, gback = world[0].grad(context, [back], [h, x, back], [weights])
        close(gh, (2 * h * weights).detach())
        close(gx, (4 * h * weights).detach())
        close(gback, weights)


def test_inputs_that_are_not_used() -> None:
    with autograds(1) as world, world[0].context() as context:
        x, y = doubles(3), doubles(3)
        loss = (x * 2).sum()
        with pytest.raises(RuntimeError, match="not used"):
            world[0].grad(context, [loss], [y], retain_graph=True)
        assert world[0].grad(context, [loss], [y], allow_unused=True) == (None,)


def test_a_gradient_penalty_as_in_a_wgan() -> None:
    with autograds(2) as world, world[0].context() as context:
        critic = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
        ).double()
        sample = doubles(5, 4)
        (there,) = world.transfer(0, 1, context, [sample])
        (score,) = world.transfer(1, 0, context, [critic(there)])
        (slope,) = world[0].grad(context, [score.sum()], [sample], create_graph=True)
        assert slope is not None
        penalty = ((slope.norm(dim=1) - 1) ** 2).mean()
        world[0].backward(context, [penalty + score.mean()])

        score = critic(sample)
        (slope,) = torch.autograd.grad(score.sum(), [sample], create_graph=True)
        loss = ((slope.norm(dim=1) - 1) ** 2).mean() + score.mean()
        parameters = list(critic.parameters())
        expected = torch.autograd.grad(loss, parameters)
        found = world[1].get_gradients(context)
        for parameter, gradient in zip(parameters, expected, strict=True):
            close(found[parameter], gradient)


def test_a_step_of_maml_over_two_workers() -> None:
    """The inner step differentiates through worker 1, the outer one through the inner."""
    with autograds(2) as world, world[0].context() as context:
        weight, body = doubles(3), doubles(3)
        data = torch.rand(3, dtype=torch.float64)

        def loss(w: Tensor) -> Tensor:
            (there,) = world.transfer(0, 1, context, [w * data])
            (back,) = world.transfer(1, 0, context, [torch.tanh(there * body)])
            return ((back - 1) ** 2).sum()

        def plain(w: Tensor) -> Tensor:
            return ((torch.tanh(w * data * body) - 1) ** 2).sum()

        (inner,) = world[0].grad(context, [loss(weight)], [weight], create_graph=True)
        assert inner is not None
        world[0].backward(context, [loss(weight - 0.1 * inner)])
        (inner,) = torch.autograd.grad(plain(weight), [weight], create_graph=True)
        outer = plain(weight - 0.1 * inner)
        gw, gb = torch.autograd.grad(outer, [weight, body])
        close(world[0].get_gradients(context), {weight: gw})
        close(world[1].get_gradients(context), {body: gb})


def call_for_cosine(x: Tensor) -> Tensor:
    return torch.cos(x)


class SinByCalls(Function):
    """Has its derivative computed by yet another worker."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.sin(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        derivative: Tensor = gw.rpc_sync("worker2", call_for_cosine, (x,))
        return gradients[0] * derivative


def sin_by_calls(x: Tensor) -> Tensor:
    result: Tensor = SinByCalls.apply(x)
    return result


@pytest.mark.parametrize("at", [0, 1])
def test_second_derivatives_through_calls_that_a_backward_makes(at: int) -> None:
    with World(3) as world, world.as_worker(0), gw.context() as ctx:
        x = doubles(3)
        y = gw.rpc_sync(f"worker{at}", sin_by_calls, (x * 2,))
        (slope,) = gw.grad(ctx, (y * x).sum(), x, create_graph=True)
        assert slope is not None
        found = gw.grad(ctx, slope.sum(), x)
        (want,) = torch.autograd.grad(
            (torch.sin(x * 2) * x).sum(), [x], create_graph=True
        )
        close(found, torch.autograd.grad(want.sum(), [x]))


@pytest.mark.parametrize("accumulates", [False, True])
def test_a_history_is_kept_also_where_none_is_recorded(accumulates: bool) -> None:
    """The leaf is reached twice, and what comes is added up."""
    with autograds(2) as world, world[0].context() as context:
        x, w = doubles(3), doubles(3)
        loss = remote(world, context, x, w) + remote(world, context, x * 2, w)
        with torch.no_grad():
            if accumulates:
                world[0].backward(context, [loss], create_graph=True)
                slope = world[0].get_gradients(context)[x]
            else:
                (found,) = world[0].grad(context, loss, x, create_graph=True)
                assert found is not None
                slope = found
        want = local(x, w) + local(x * 2, w)
        (want_slope,) = torch.autograd.grad(want, [x], create_graph=True)
        close(slope, want_slope)
        close(
            world[0].grad(context, slope.sum(), x),
            torch.autograd.grad(want_slope.sum(), [x]),
        )


@pytest.mark.parametrize("swap", [False, True])
def test_sparse_and_dense_gradients_of_an_input_add_up(swap: bool) -> None:
    with autograds(2) as world, world[0].context() as context:
        w = doubles(5, 3)
        rows = torch.nn.functional.embedding(torch.tensor([1, 2]), w, sparse=True)
        terms = []
        for tensor in (rows, w * 2):
            (there,) = world.transfer(0, 1, context, [tensor])
            (back,) = world.transfer(1, 0, context, [torch.sin(there)])
            terms.append(back.sum())
        one, other = terms[::-1] if swap else terms
        (found,) = world[0].grad(context, one + other, w)
        want = torch.sin(w[1:3]).sum() + torch.sin(w * 2).sum()
        assert found is not None
        found = found.to_dense() if found.is_sparse else found
        close(found, *torch.autograd.grad(want, [w]))
