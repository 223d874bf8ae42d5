"""Distributed autograd and calls of which nothing is recorded, or must not be."""

import threading

import pytest
import torch
from torch import Tensor, nn

import gradwire as gw
from tests.autograd.functions import doubles
from tests.autograd.weights import (
    Way,
    applied_locally,
    apply_weight,
    check_gradients,
    close,
    current_id,
    known,
    recorded,
    same,
    two_ways,
    ways,
    weights,
    world_with_weights,
)
from tests.rpc.functions import held, holding

LARGE = 40_000
"""Elements that do not fit into a message itself."""


@ways
def test_nothing_is_recorded_without_gradients_at_the_caller(call: Way) -> None:
    with world_with_weights(2) as world, gw.context() as ctx:
        x, p = doubles(3), nn.Parameter(torch.rand(3))
        with torch.no_grad():
            y = call("worker1", apply_weight, (x,))
            z = call("worker1", torch.stack, ([p, p],))
        assert not y.requires_grad
        assert not z.requires_grad
        assert recorded(world, ctx) == [(0, 0), (0, 0)]
        assert [context.known - {i} for i, context in enumerate(known(world, ctx))] == [
            {1},
            {0},
        ]


@torch.no_grad()
def weigh_quietly(x: Tensor) -> Tensor:
    return apply_weight(x)


@two_ways
def test_nothing_is_recorded_of_a_result_without_gradients(call: Way) -> None:
    with world_with_weights(2) as world, gw.context() as ctx:
        x = doubles(3)
        y = call("worker1", weigh_quietly, (x,))
        assert not y.requires_grad
        assert recorded(world, ctx) == [(1, 0), (0, 1)]
        gw.backward(ctx, [(y * x).sum()])
        local = (applied_locally(x, 1).detach() * x).sum()
        check_gradients(world, ctx, local, [[x], []])


@two_ways
def test_nothing_is_recorded_where_no_tensor_needs_a_gradient(call: Way) -> None:
    with world_with_weights(2) as world, gw.context() as ctx:
        y = call("worker1", torch.add, (torch.ones(3), torch.ones(3)))
        assert not y.requires_grad
        assert recorded(world, ctx) == [(0, 0), (0, 0)]


@pytest.mark.filterwarnings("ignore::gradwire.LostGradientWarning")
@two_ways
def test_nothing_is_recorded_outside_of_contexts(call: Way) -> None:
    with world_with_weights(2) as world:
        x = doubles(3)
        y = call("worker1", apply_weight, (x,))
        assert y.grad_fn is None
        assert [len(worker.autograd.contexts) for worker in world.workers] == [0, 0]
        with gw.context() as ctx:
            assert world[0].autograd.contexts.get(ctx).sends == {}


def test_calls_that_cannot_be_sent_leave_nothing() -> None:
    with world_with_weights(2) as world, gw.context() as ctx:
        x = doubles(3)
        with pytest.raises(TypeError):
            gw.rpc_sync("worker1", same, ((x, threading.Lock()),))
        with pytest.raises(ValueError, match="nobody"):
            gw.rpc_sync("nobody", same, (x,))
        assert world[0].autograd.contexts.get(ctx).sends == {}
        y = gw.rpc_sync("worker1", apply_weight, (x,))
        gw.backward(ctx, [y.sum()])
        check_gradients(
            world, ctx, applied_locally(x, 1).sum(), [[x], [weights["worker1"]]]
        )


def test_calls_of_others_are_not_of_this_context() -> None:
    with world_with_weights(2) as world, gw.context() as ctx, holding() as hold:
        future = gw.rpc_async("worker1", held)
        assert world[1].rpc_sync("worker0", current_id) == 0
        assert gw.rpc_sync("worker1", current_id) == ctx
        hold.release.set()
        future.wait()


def nested(layout: torch.layout) -> Tensor:
    members = [torch.rand(2, 3), torch.rand(4, 3)]
    return torch.nested.nested_tensor(members, layout=layout, requires_grad=True)


def make_nested(layout: torch.layout) -> Tensor:
    return nested(layout)


no_nested = pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors:UserWarning"
)
layouts = pytest.mark.parametrize("layout", [torch.jagged, torch.strided])


@no_nested
@layouts
def test_what_cannot_be_recorded_is_not_sent(layout: torch.layout) -> None:
    with world_with_weights(2) as world, gw.context() as ctx:
        with pytest.raises(
            TypeError, match="that requires grad cannot be sent in a con"
        ):
            gw.rpc_sync("worker1", same, ((gw.RRef(1), nested(layout)),))
        assert [len(c.sends) for c in known(world, ctx)] == [0]
        with pytest.raises(
            TypeError, match="that requires grad cannot be sent in a con"
        ):
            gw.rpc_sync("worker1", make_nested, (layout,))
        with torch.no_grad():
            assert gw.rpc_sync("worker1", same, (nested(layout),)).is_nested
        assert gw.rpc_sync("worker1", same, (nested(layout).detach(),)).is_nested
    # And the world ended: nobody waits for the reference to arrive.


def square_jagged(values: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    made = torch.nested.nested_tensor_from_jagged(values, offsets) ** 2
    return made.values(), made.offsets()


def test_the_parts_of_a_jagged_tensor_can_be_sent() -> None:
    with world_with_weights(2), gw.context() as ctx:
        x = doubles(6, 3)
        jagged = torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 2, 6]))
        parts = jagged.values(), jagged.offsets()
        values, offsets = gw.rpc_sync("worker1", square_jagged, parts)
        back = torch.nested.nested_tensor_from_jagged(values, offsets)
        gw.backward(ctx, [back.values().sum()])
        close(gw.get_gradients(ctx), {x: 2 * x.detach()})
