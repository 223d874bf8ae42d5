"""Distributed autograd through calls: its graph, and its contexts."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import gradwire as gw
from gradwire.api import current_worker
from gradwire.errors import GradwireError
from tests.autograd.functions import Raises, boom_with, doubles
from tests.autograd.weights import (
    Way,
    applied_along_locally,
    apply_along,
    apply_weight,
    by_async,
    by_remote,
    by_sync,
    check_gradients,
    close,
    current_id,
    known,
    same,
    weights,
    world_with_weights,
)
from tests.rpc.functions import Boom, boom, held, holding
from tests.worlds import LIMIT, wait_until, wait_until_no_contexts


@pytest.fixture(autouse=True)
def fresh() -> None:
    Raises.is_on = True


# The graph


def names(nodes: Sequence[tuple[Any, int]]) -> list[str]:
    return [node.name() for node, _ in nodes]


SEND = "torch::distributed::autograd::SendRpcBackward"
RECV = "torch::distributed::autograd::RecvRpcBackward"


@pytest.mark.parametrize(
    ("call", "to"),
    [(by_sync, 0), (by_async, 0), (by_sync, 1), (by_async, 1), (by_remote, 1)],
)
def test_the_graph_of_a_call(call: Way, to: int) -> None:
    with world_with_weights(2) as world, gw.context() as ctx:
        a, b = doubles(3), doubles(3)
        y = call(f"worker{to}", torch.add, (a, b))
        here, *there = known(world, ctx)
        recv = y.grad_fn
        assert recv.name() == RECV
        assert recv in here.recvs.values()
        sends = list(here.sends.values())
        assert sends[0].node.name() == SEND
        leaves = [node.variable for node, _ in sends[0].node.next_functions]
        assert list(map(id, leaves)) == [id(a), id(b)]
        (answer,) = there[0].sends.values() if there else sends[1:]
        assert answer.node.name() == SEND
        ((add, _),) = answer.node.next_functions
        assert add.name() == "AddBackward0"
        assert names(add.next_functions) == [RECV, RECV]
        assert add.next_functions[0][0] is add.next_functions[1][0]
        assert [index for _, index in add.next_functions] == [0, 1]


def add_at(to: str, a: Tensor, b: Tensor) -> Tensor:
    result: Tensor = gw.rpc_sync(to, torch.add, (a, b))
    return result


@pytest.mark.parametrize("to", [0, 2])
def test_the_graph_of_a_nested_call(to: int) -> None:
    with world_with_weights(3) as world, gw.context() as ctx:
        a, b = doubles(3), doubles(3)
        y = gw.rpc_sync("worker1", add_at, (f"worker{to}", a, b))
        assert y.grad_fn.name() == RECV
        middle = known(world, ctx)[1] if to else world[1].autograd.contexts.get(ctx)
        onward, answer = middle.sends.values()
        assert names(onward.node.next_functions) == [RECV, RECV]
        assert names(answer.node.next_functions) == [RECV]
        first, second = middle.recvs.values()
        assert onward.node.next_functions[0][0] is first
        assert answer.node.next_functions[0][0] is second
        last = world[to].autograd.contexts.get(ctx)
        assert len(last.sends) == (1 if to else 2)


def test_what_arrives_together_has_one_node() -> None:
    with world_with_weights(2), gw.context():
        x = doubles(3)
        outputs = gw.rpc_sync("worker1", torch.unbind, (x * 2,))
        assert len(outputs) == 3
        assert len({id(output.grad_fn) for output in outputs}) == 1
        assert [output.output_nr for output in outputs] == [0, 1, 2]


# Contexts


def test_ids_tell_who_began_a_context() -> None:
    with world_with_weights(2) as world:
        with gw.context() as first:
            pass
        with gw.context() as second:
            pass
        with world.as_worker(1), gw.context() as other:
            pass
        assert [number >> 48 for number in (first, second, other)] == [0, 0, 1]
        assert first != second


def count_known(ctx: int) -> int:
    return len(current_worker().autograd.contexts.get(ctx).known)


def call_count(to: str, ctx: int) -> int:
    return int(gw.rpc_sync(to, count_known, (ctx,)))


def test_workers_are_known_also_where_no_tensor_travels() -> None:
    with world_with_weights(4) as world, gw.context() as ctx:
        gw.rpc_sync("worker1", call_count, ("worker2", ctx))
        gw.rpc_async("worker0", count_known, (ctx,)).wait()
        contexts = [world[i].autograd.contexts.get(ctx) for i in range(3)]
        others = [context.known - {i} for i, context in enumerate(contexts)]
        assert others == [{1}, {0, 2}, {1}]
        with pytest.raises(GradwireError):
            world[3].autograd.contexts.get(ctx)


def test_contexts_are_released_everywhere_after_the_block() -> None:
    with world_with_weights(3) as world:
        with gw.context() as ctx:
            gw.rpc_sync("worker1", apply_along, (doubles(3), ["worker2"]))
            assert [len(w.autograd.contexts) for w in world.workers] == [1, 1, 1]
        wait_until_no_contexts(world)
        for worker in world.workers:
            with pytest.raises(GradwireError, match=f"context with id: {ctx}"):
                worker.autograd.get_gradients(ctx)


def test_contexts_are_released_everywhere_when_the_block_fails() -> None:
    with world_with_weights(3) as world:
        with pytest.raises(Boom), gw.context():
            boom_with(gw.rpc_sync("worker1", apply_along, (doubles(3), ["worker2"])))
        wait_until_no_contexts(world)
        with gw.context() as ctx:  # and there is no context any more
            assert current_id() == ctx


def test_contexts_reached_only_by_calls_that_failed_are_released() -> None:
    with world_with_weights(3) as world:
        with gw.context() as ctx:
            with pytest.raises(Boom):
                gw.rpc_sync("worker1", boom_with, (doubles(3),))
            with pytest.raises(Boom):
                gw.remote("worker2", boom).to_here()
            for i in (1, 2):
                assert ctx in [c.id for c in world[i].autograd.contexts]
        wait_until_no_contexts(world)


def test_a_context_released_while_its_call_runs() -> None:
    with world_with_weights(2) as world:
        with holding() as hold:
            with gw.context():
                future = gw.rpc_async("worker1", held, (doubles(3),))
                assert hold.entered.wait(LIMIT)
            wait_until(lambda: not len(world[1].autograd.contexts))
            hold.release.set()
            result = future.wait()
        assert result.grad_fn is None
        wait_until_no_contexts(world)


class EndsContexts:
    """Takes until there is no context any more to be pickled."""

    def __reduce__(self) -> Any:
        contexts = current_worker().autograd.contexts
        wait_until(lambda: not len(contexts))
        return same, (1,)


def call_late(x: Tensor) -> None:
    held()
    gw.rpc_sync("worker2", same, ((EndsContexts(), x),))


def test_a_call_that_leaves_when_its_context_is_over() -> None:
    with world_with_weights(3) as world, holding() as hold:
        with gw.context():
            future = gw.rpc_async("worker1", call_late, (doubles(3),))
            assert hold.entered.wait(LIMIT)
            hold.release.set()
        future.wait()
        assert [len(worker.autograd.contexts) for worker in world.workers] == [0] * 3


def open_context() -> int:
    with gw.context() as ctx:
        return ctx


def test_contexts_are_not_nested() -> None:
    text = "Already have an autograd context id for this thread"
    with world_with_weights(2):
        with gw.context():
            with pytest.raises(GradwireError, match=text), gw.context():
                pass
            with pytest.raises(GradwireError, match=text):
                gw.rpc_sync("worker1", open_context)
            gw.rpc_sync("worker1", same, (1,))
        assert gw.rpc_sync("worker1", open_context) >> 48 == 1


def test_unknown_contexts() -> None:
    with world_with_weights(2):
        with gw.context() as ctx:
            x = doubles(3)
            y = gw.rpc_sync("worker1", apply_weight, (x,)).sum()
            text = f"Could not find autograd context with id: {ctx + 1}"
            with pytest.raises(GradwireError, match=text):
                gw.get_gradients(ctx + 1)
            with pytest.raises(GradwireError, match=text):
                gw.backward(ctx + 1, [y])
            with pytest.raises(GradwireError, match=text):
                gw.grad(ctx + 1, [y], [x])
            with pytest.raises(GradwireError, match=text):
                gw.rpc_sync("worker1", gw.get_gradients, (ctx + 1,))
        text = f"Could not find autograd context with id: {ctx}"
        with pytest.raises(GradwireError, match=text):
            gw.backward(ctx, [y])
        with pytest.raises(GradwireError, match=text):
            gw.get_gradients(ctx)


def keep_last(x: Tensor) -> tuple[Tensor, Tensor]:
    """What came, and what came before."""
    last = weights.get("last", x)
    weights["last"] = x * 1
    return x * 2, last


def test_tensors_of_another_context_may_be_sent_if_nothing_uses_them() -> None:
    with world_with_weights(2) as world:
        for _ in range(2):
            with gw.context() as ctx:
                x = doubles(3)
                y, last = gw.rpc_sync("worker1", keep_last, (x,))
                gw.backward(ctx, [y.sum()], retain_graph=True)
                check_gradients(world, ctx, 2 * x.sum(), [[x], []])
                if ctx > 1:
                    with pytest.raises(GradwireError, match="arrived in context 1 is"):
                        gw.backward(ctx, [(y * last).sum()])


def test_tensors_of_one_context_are_refused_in_another() -> None:
    with world_with_weights(2):
        with gw.context():
            y = gw.rpc_sync("worker1", apply_weight, (doubles(3),))
        with gw.context() as ctx:
            with pytest.raises(RuntimeError, match="arrived in context"):
                gw.backward(ctx, [y.sum()])
            assert gw.get_gradients(ctx) == {}


def own_gradient(ctx: int) -> Tensor:
    return gw.get_gradients(ctx)[weights[current_worker().name]]


def test_each_worker_gets_its_gradients() -> None:
    with world_with_weights(3), gw.context() as ctx:
        x = doubles(3)
        y = gw.rpc_sync("worker1", apply_along, (x, ["worker2"]))
        gw.backward(ctx, [y.sum()])
        local = applied_along_locally(x, ["worker1", "worker2"]).sum()
        leaves = [weights["worker1"], weights["worker2"]]
        expected = torch.autograd.grad(local, leaves)
        for i in (1, 2):
            close(gw.rpc_sync(f"worker{i}", own_gradient, (ctx,)), expected[i - 1])
            found = gw.rpc_sync(f"worker{i}", gw.get_gradients, (ctx,))
            ((leaf, gradient),) = found.items()
            close((leaf.detach(), gradient), (leaves[i - 1].detach(), expected[i - 1]))
