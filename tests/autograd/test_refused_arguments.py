"""Arguments that no pass can be run with: each is refused by name, at the caller, at once."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import gradwire as gw
from gradwire.testing import World
from tests.autograd.functions import doubles


@contextmanager
def scene() -> Iterator[tuple[int, Tensor, Tensor]]:
    """A context, a leaf, and what a call on another worker made of it."""
    with World(2) as world, world.as_worker(0):
        with gw.context() as ctx:
            x = doubles(3)
            yield ctx, x, gw.rpc_sync("worker1", torch.mul, args=(x, 2))
            assert gw.get_gradients(ctx) == {}
        assert world.workers[0].autograd.debug_info()["num_autograd_contexts"] == 0


def test_grad_takes_tensors_as_torch_does() -> None:
    with scene() as (ctx, x, y):
        weight = torch.arange(3.0, dtype=torch.float64)
        ways: list[tuple[Any, Any, Any]] = [
            (y, x, weight),
            ([y], (x,), [weight]),
            ((y * weight).sum(), x, None),
            ([(y * weight).sum()], [x], [None]),
        ]
        for outputs, inputs, gradients in ways:
            found = gw.grad(ctx, outputs, inputs, gradients, retain_graph=True)
            torch.testing.assert_close(found, (2 * weight,))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"outputs": None}, r"outputs=None: give a tensor or a list of tensors"),
        ({"inputs": ["a"]}, r"inputs=\['a'\]: give a tensor or a list of tensors"),
        ({"inputs": []}, "inputs is empty"),
        ({"outputs": ()}, "outputs is empty"),
        ({"grad_outputs": 1.0}, r"grad_outputs=1.0: give a list of tensors"),
        ({"grad_outputs": [1.0]}, r"grad_outputs\[0\]=1.0: give a tensor, or None"),
        ({"grad_outputs": []}, "0 grad_outputs for 1 outputs"),
        ({"grad_outputs": [None, None]}, "2 grad_outputs for 1 outputs"),
        ({"grad_outputs": torch.ones(2)}, r"shape \(2,\), outputs\[0\] has \(3,\)"),
        (
            {"grad_outputs": None},
            r"outputs\[0\], of shape \(3,\), is not a scalar: give",
        ),
        ({"inputs": torch.ones(4)}, r"inputs\[0\], of shape \(4,\), does not require"),
        ({"outputs": torch.ones(3)}, "does not have a valid gradient function"),
        ({"retain_graph": "yes"}, "retain_graph='yes': give True or False"),
        ({"create_graph": 2}, "create_graph=2: give True or False"),
        ({"context_id": "a"}, "'a' is not a context id"),
    ],
)
def test_what_grad_refuses(change: dict[str, Any], text: str) -> None:
    with scene() as (ctx, x, y):
        given = {"context_id": ctx, "outputs": y, "inputs": x}
        given["grad_outputs"] = torch.ones_like(y)
        with pytest.raises((TypeError, ValueError, gw.GradwireError), match=text):
            gw.grad(**{**given, **change})


def test_grad_says_which_input_is_not_used() -> None:
    with scene() as (ctx, x, y):
        loss, other = y.sum(), doubles(2)
        with pytest.raises(gw.GradwireError, match=r"inputs\[1\] is not used"):
            gw.grad(ctx, loss, [x, other], retain_graph=True)
        found = gw.grad(ctx, loss, [x, other], allow_unused=True)
        assert found[1] is None


@pytest.mark.parametrize("name", ["retain_graph", "create_graph", "accumulate"])
def test_flags_of_backward_are_yes_or_no(name: str) -> None:
    with scene() as (ctx, x, y):
        options: dict[str, Any] = {name: "yes"}
        with pytest.raises(TypeError, match=f"{name}='yes': give True or False"):
            gw.backward(ctx, [y.sum()], **options)
        assert x.grad is None


def test_no_is_also_none() -> None:
    with World(2) as world, world.as_worker(0), gw.context() as ctx:
        x = doubles(3)
        y = gw.rpc_sync("worker1", torch.mul, args=(x, 2))
        none: Any = None
        gw.backward(ctx, [y.sum()], none)
        torch.testing.assert_close(gw.get_gradients(ctx)[x], torch.full_like(x, 2.0))


@pytest.mark.parametrize("given", ["a", None, 1.0, True])
def test_gradients_of_what_is_no_context(given: Any) -> None:
    with scene(), pytest.raises(TypeError, match=f"{given!r} is not a context id"):
        gw.get_gradients(given)


def test_a_plain_backward_says_what_to_use() -> None:
    with scene() as (_, _, y), pytest.raises(RuntimeError, match=r"use backward\(cont"):
        y.sum().backward()


def test_contexts_that_nest_say_which_is_open() -> None:
    with scene() as (ctx, _, _):
        text = f"for this thread: {ctx}. Contexts do not nest"
        with pytest.raises(gw.GradwireError, match=text), gw.context():
            pass


class Silent(torch.autograd.Function):
    """Fails without a word."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise AssertionError


def be_silent(x: Tensor) -> Tensor:
    result: Tensor = Silent.apply(x)
    return result


def test_an_error_without_a_text_is_told_by_its_type() -> None:
    with scene() as (ctx, x, _):
        loss = gw.rpc_sync("worker1", be_silent, args=(x,)).sum()
        with pytest.raises(gw.GradwireError, match="Error on Node 1: AssertionError"):
            gw.backward(ctx, [loss])
