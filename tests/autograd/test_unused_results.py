"""What gets no gradient is not run: behind results that nobody uses, and tensors of messages."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import disable_saved_tensors_hooks

import gradwire as gw
from gradwire.api import current_worker
from tests.autograd.functions import doubles
from tests.autograd.weights import (
    apply_weight,
    close,
    same,
    weights,
    world_with_weights,
)
from tests.worlds import orders


class SquareRoot(torch.autograd.Function):
    """One whose derivative is infinite at 0; notes that it was run."""

    ran = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(root := x.sqrt())
        return root

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        SquareRoot.ran += 1
        return gradients[0] / (2 * ctx.saved_tensors[0])


def take_root(x: Tensor) -> Tensor:
    weights["shared"] = x * 1
    result: Tensor = SquareRoot.apply(weights["shared"])
    return result


def use_shared(x: Tensor) -> Tensor:
    return weights["shared"] * x


@orders
def test_what_lies_behind_a_result_that_is_not_used_is_not_run(
    seed: int | None,
) -> None:
    """That it is not used is known only when others have said so."""
    SquareRoot.ran = 0
    with world_with_weights(3, seed=seed), gw.context() as ctx:
        x = torch.zeros(3, dtype=torch.float64, requires_grad=True)
        a = gw.rpc_sync("worker1", take_root, (x,))
        gw.rpc_sync("worker2", apply_weight, (a,))
        b = gw.rpc_sync("worker1", use_shared, (torch.ones(3, dtype=torch.float64),))
        gw.backward(ctx, [b.sum()])
        close(gw.get_gradients(ctx), {x: torch.ones_like(x)})
    assert not SquareRoot.ran


@orders
def test_hooks_behind_a_result_that_is_not_used_are_not_called(
    seed: int | None,
) -> None:
    seen: list[Tensor] = []
    with world_with_weights(2, seed=seed), gw.context() as ctx:
        x = doubles(3)
        h = x * 1
        k = h * 3
        k.register_hook(seen.append)
        gw.rpc_sync("worker1", same, (k,))
        b = gw.rpc_sync("worker1", torch.mul, (h, 2))
        gw.backward(ctx, [(b + h).sum()])
        close(gw.get_gradients(ctx), {x: torch.full_like(x, 3.0)})
    assert not seen


# Of the tensors of a message, some


@pytest.fixture(autouse=True)
def fresh() -> None:
    SquareRoot.ran = 0


def first_of(a: Tensor, *_: Tensor) -> Tensor:
    return a * 3


def two_paths(x: Tensor, unused: Callable[[Tensor], Tensor], to: str = "") -> Tensor:
    """A path through a message and one past it, so that torch's engine has to wait for one."""
    a, b = x * 1, unused(x * 0)
    y = gw.rpc_sync(to, first_of, (a, b)) if to else a * 3
    return (y + a).sum()


def check_two_paths(unused: Callable[[Tensor], Tensor], seed: int | None) -> None:
    x = doubles(3)
    (expected,) = torch.autograd.grad(two_paths(x, same), [x])
    with world_with_weights(2, seed=seed), gw.context() as ctx:
        gw.backward(ctx, [two_paths(x, unused, "worker1")])
        close(gw.get_gradients(ctx), {x: expected})


@orders
def test_a_function_behind_an_unused_tensor_of_a_message_is_not_run(
    seed: int | None,
) -> None:
    check_two_paths(SquareRoot.apply, seed)
    assert not SquareRoot.ran


@orders
def test_a_hook_on_an_unused_tensor_of_a_message_is_not_called(
    seed: int | None,
) -> None:
    seen: list[Tensor] = []

    def hooked(x: Tensor) -> Tensor:
        made = x * 2
        made.register_hook(seen.append)
        return made

    check_two_paths(hooked, seed)
    assert not seen


@orders
def test_an_unused_tensor_of_a_message_may_be_changed_in_place(
    seed: int | None,
) -> None:
    def changed_later(x: Tensor) -> Tensor:
        made = x * 2
        later = made.square()  # keeps `made` for its backward
        made.mul_(2)
        return later

    check_two_paths(changed_later, seed)


def test_what_was_sent_may_be_changed_in_place() -> None:
    """Its place in the graph was that of before."""
    x = doubles(3)
    with world_with_weights(2), gw.context() as ctx:
        a, b = x * 1, x * 2
        y = gw.rpc_sync("worker1", first_of, (a, b))
        a.mul_(10)
        b.mul_(10)
        z = gw.rpc_sync("worker1", first_of, (a, b))
        gw.backward(ctx, [(y + z).sum()])
        close(gw.get_gradients(ctx), {x: torch.full_like(x, 33.0)})


def test_hooks_of_a_send_see_the_gradients_of_all_its_tensors() -> None:
    """Also if its node is not run, because of what lies behind one of them."""
    x, seen = doubles(3), list[Any]()

    def double(inputs: tuple[Tensor | None, ...], outputs: Any) -> Any:
        seen.append([gradient is None for gradient in inputs])
        return tuple([None if g is None else g * 2 for g in inputs])

    with world_with_weights(2), gw.context() as ctx:
        loss = two_paths(x, SquareRoot.apply, "worker1")
        context = current_worker().autograd.contexts.get(ctx)
        first = next(iter(context.sends.values()))
        first.node.register_prehook(lambda _: seen.append("before"))
        first.node.register_hook(double)
        gw.backward(ctx, [loss])
        close(gw.get_gradients(ctx), {x: torch.full_like(x, 7.0)})
    assert seen == ["before", [False, True]]
    assert not SquareRoot.ran


def test_second_passes_over_part_of_a_message_without_a_retained_graph() -> None:
    """As in torch, where nothing in the graph was kept for the backward."""
    x = doubles(3)
    with world_with_weights(2), gw.context() as ctx:
        a, b = x + 1, -x
        y, z = gw.rpc_sync("worker1", both, (a, b))
        gw.backward(ctx, [(y + z + a).sum()])
        gw.backward(ctx, [(y + a).sum()])
        close(gw.get_gradients(ctx), {x: torch.full_like(x, 1.0 + 2.0)})


def both(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return a + 1, b.neg().neg()


def test_sending_where_hooks_of_saved_tensors_are_disabled() -> None:
    x = doubles(3)
    (expected,) = torch.autograd.grad(two_paths(x, same), [x])
    with world_with_weights(2), gw.context() as ctx:
        with disable_saved_tensors_hooks("not here"):
            loss = two_paths(x, SquareRoot.apply, "worker1")
        gw.backward(ctx, [loss])
        close(gw.get_gradients(ctx), {x: expected})
    assert not SquareRoot.ran
