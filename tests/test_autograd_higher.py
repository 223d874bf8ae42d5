"""Gradients that can be differentiated again, and the functional form, across workers."""

import pytest
import torch
from torch import Tensor

from autograd_world import Autograds, autograds, doubles
from calls_world import orders

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
