"""Contexts, the nodes where tensors leave and arrive, and the segments of a graph."""

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire._autograd.contexts import Context, Contexts, Memory, owner
from gradwire._autograd.nodes import Crossing, Send, make_recv
from gradwire.errors import GradwireError
from gradwire.testing import World
from tests.autograd.functions import doubles
from tests.worlds import autograds, wait_until

PREFIX = "torch::distributed::autograd::"


def send(*tensors: torch.Tensor) -> Send:
    return Send(Crossing(1, 0, 7, len(tensors)), tensors)


def recv(*tensors: torch.Tensor) -> Any:
    node = make_recv(tensors)
    node.crossing.become(1, 0, 7)
    return node


# Nodes


def test_a_send_is_a_node_over_exactly_its_tensors() -> None:
    one, two = torch.ones(3, requires_grad=True), torch.ones(2, requires_grad=True)
    sent = send(one, two * 2)
    node = sent.node
    assert node.name() == PREFIX + "SendRpcBackward"
    (leaf, _), (mul, _) = node.next_functions
    assert leaf.name() == "torch::autograd::AccumulateGrad"
    assert leaf.variable is one
    assert mul.name() == "MulBackward0"


def test_a_recv_is_the_history_of_all_its_tensors() -> None:
    one, two = torch.ones(3), torch.ones(2, dtype=torch.float64)
    node = recv(one, two)
    assert node.name() == PREFIX + "RecvRpcBackward"
    assert one.grad_fn is node
    assert two.grad_fn is node
    assert not one.is_leaf


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(3),
        torch.ones(3, requires_grad=True),
        torch.nn.Parameter(torch.ones(3)),
        torch.ones(6)[1:4],
        torch.ones(2, 3).t(),
        torch.sparse_coo_tensor([[0, 1]], [1.0, 2.0], (3,)),
        torch.ones(3, dtype=torch.complex64),
        torch.ones(3, dtype=torch.bfloat16),
        torch.ones(()),
    ],
    ids=lambda tensor: f"{type(tensor).__name__} {tensor.layout} {tensor.dtype}",
)
def test_a_recv_changes_its_tensors_in_place(tensor: torch.Tensor) -> None:
    where = None if tensor.is_sparse else tensor.data_ptr()
    node = recv(tensor)
    assert tensor.requires_grad
    assert tensor.grad_fn is node
    assert tensor.is_sparse or tensor.data_ptr() == where


def test_nodes_cannot_be_run_outside_a_pass() -> None:
    tensor = torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="only be run by a distributed backward"):
        send(tensor).node.apply(torch.ones(3))
    arrived = torch.ones(3)
    recv(arrived)
    with pytest.raises(RuntimeError, match="only be run by a distributed backward"):
        arrived.sum().backward()


def test_a_send_lets_its_graph_go_with_it() -> None:
    tensor = torch.ones(3, requires_grad=True)
    made = tensor * 2
    gone = weakref.ref(made)
    sent = send(made)
    del made
    gc.disable()
    try:
        del sent
        assert gone() is None
    finally:
        gc.enable()


# Sends of leaves, whose nodes are made late


def leaves(count: int) -> list[torch.Tensor]:
    return [torch.ones(3, requires_grad=True) for _ in range(count)]


def variables(sent: Send) -> list[torch.Tensor]:
    assert {node.name() for node, _ in sent.edges} == {
        "torch::autograd::AccumulateGrad"
    }
    assert sent.edges == sent.node.next_functions
    return [node.variable for node, _ in sent.edges]


def are_same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return list(map(id, some)) == list(map(id, others))


def test_the_node_of_a_send_of_leaves_is_made_once_when_asked_for() -> None:
    given = leaves(2)
    sent = send(*given)
    assert are_same(list(sent.leaves), given)
    assert sent.node.name() == PREFIX + "SendRpcBackward"
    assert sent.node.crossing is sent.crossing
    assert sent.node is sent.output.grad_fn
    assert are_same(variables(sent), given)
    assert sent.leaves == ()


def test_the_node_of_tensors_with_a_history_is_made_at_once() -> None:
    made = leaves(1)[0] * 2
    before = made.grad_fn
    sent = send(made)
    made.mul_(3)
    assert sent.leaves == ()
    assert sent.edges == ((before, 0),)


def test_a_late_node_is_the_same_when_its_leaf_was_changed_in_place() -> None:
    given = leaves(1)
    sent = send(*given)
    with torch.no_grad():
        given[0].mul_(2)
    given[0].data = torch.zeros(5)
    assert are_same(variables(sent), given)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_late_node_is_the_same_in_any_mode(mode: Callable[[], Any]) -> None:
    given = leaves(1)
    sent = send(*given)
    with mode():
        assert are_same(variables(sent), given)


def test_a_leaf_that_was_frozen_after_it_was_sent_stays_so() -> None:
    given = leaves(2)
    sent = send(*given)
    given[0].requires_grad_(False)
    assert are_same(variables(sent), given)
    assert [leaf.requires_grad for leaf in given] == [False, True]


def test_a_leaf_that_has_a_history_by_now_is_refused() -> None:
    given = leaves(1)
    sent = send(*given)
    given[0].requires_grad_(False).mul_(leaves(1)[0])
    with pytest.raises(RuntimeError, match="is no longer a leaf: after it was sent"):
        _ = sent.node


def test_anomaly_mode_notes_where_a_send_was_made() -> None:
    with torch.autograd.set_detect_anomaly(True):
        sent = send(*leaves(1))
    assert "test_anomaly_mode_notes" in "".join(sent.node.metadata["traceback_"])


def test_late_nodes_keep_the_places_of_their_sends() -> None:
    context = Context(7)
    (leaf,) = leaves(1)
    kinds = [leaf, leaf * 2, leaf, leaf * 3, leaf]
    sends = [context.add_send(k, 1, [tensor]) for k, tensor in enumerate(kinds)]
    numbers = [sent.node._sequence_nr() for sent in reversed(sends)]
    assert numbers == [5, 4, 3, 2, 1]


def test_threads_that_ask_at_once_get_the_same_node() -> None:
    for _ in range(20):
        sent, together = send(*leaves(1)), threading.Barrier(4)
        found: list[object] = []

        def ask(sent: Send = sent, together: threading.Barrier = together) -> None:
            together.wait()
            found.append(sent.node)  # noqa: B023 read when all have ended

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [sent.node] * 4


def test_a_hook_on_a_late_node_is_called_in_a_pass() -> None:
    with World(2) as world, world.as_worker(0), gw.context() as ctx:
        (x,) = leaves(1)
        y = gw.rpc_sync("worker1", torch.exp, args=(x,))
        (sent,) = world.workers[0].autograd.contexts.get(ctx).sends.values()
        assert sent.leaves
        assert not sent.crossing.is_hooked
        called = []
        sent.node.register_hook(lambda *_: called.append("after"))
        sent.node.register_prehook(lambda *_: called.append("before"))
        assert sent.crossing.is_hooked
        gw.backward(ctx, [y.sum()])
        assert called == ["before", "after"]
        torch.testing.assert_close(gw.get_gradients(ctx)[x], x.exp().detach())


def test_a_leaf_may_be_changed_between_its_sending_and_the_pass() -> None:
    with World(2) as world, world.as_worker(0), gw.context() as ctx:
        (x,) = leaves(1)
        y = gw.rpc_sync("worker1", torch.exp, args=(x,))
        with torch.no_grad():
            x.mul_(5)
        gw.backward(ctx, [y.sum()])
        torch.testing.assert_close(gw.get_gradients(ctx)[x], torch.ones(3).exp())


# Contexts


def test_ids_say_who_began_a_context() -> None:
    contexts = Contexts(5)
    first = contexts.new()
    assert owner(first.id) == 5
    assert first.id >> 48 == 5
    contexts.remove(first.id)
    assert contexts.new().id == first.id + 1


def test_a_thread_has_one_context_at_a_time() -> None:
    contexts = Contexts(0)
    context = contexts.new()
    with pytest.raises(RuntimeError, match="Already have an autograd context id for"):
        contexts.new()
    assert contexts.current() is context
    with contexts.entered(None):
        assert contexts.current() is None
    contexts.remove(context.id)
    assert contexts.current() is None


def test_an_unknown_context_is_an_error_that_names_it() -> None:
    with pytest.raises(
        RuntimeError, match="Could not find autograd context with id: 9"
    ):
        Contexts(0).get(9)


def test_other_threads_and_workers_have_their_own() -> None:
    contexts, others = Contexts(0), Contexts(1)
    contexts.new()
    assert others.current() is None
    found: list[Context | None] = []
    thread = threading.Thread(target=lambda: found.append(contexts.current()))
    thread.start()
    thread.join()
    assert found == [None]


def test_tasks_of_an_event_loop_have_their_own() -> None:
    contexts = Contexts(0)

    async def task() -> bool:
        context = contexts.new()
        await asyncio.sleep(0)
        return contexts.current() is context

    async def main() -> list[bool]:
        return await asyncio.gather(*(task() for _ in range(5)))

    assert asyncio.run(main()) == [True] * 5


def test_a_context_that_was_released_is_not_made_again_by_a_late_message() -> None:
    contexts = Contexts(0)
    first = contexts.arrived(1 << 48)
    assert contexts.arrived(1 << 48) is first
    contexts.remove(first.id)
    assert contexts.arrived(first.id).is_released
    assert len(contexts) == 0


def test_memory_forgets_the_oldest() -> None:
    memory = Memory()
    for number in range(5000):
        memory.add(number)
    assert 4999 in memory
    assert 0 not in memory
    assert len(memory) == 4096


# Recording


def test_only_what_requires_grad_is_recorded() -> None:
    with autograds(2) as world, world[0].context() as context:
        plain, traced = torch.ones(3), torch.ones(3, requires_grad=True)
        got_plain, got_traced = world.transfer(0, 1, context, [plain, traced])
        assert not got_plain.requires_grad
        assert got_traced.requires_grad
        (sent,) = world[0].contexts.get(context).sends.values()
        assert len(sent.node.next_functions) == 1
        (arrived,) = world[1].contexts.get(context).recvs.values()
        assert got_traced.grad_fn is arrived


def test_workers_know_each_other_where_nothing_requires_grad() -> None:
    with autograds(2) as world, world[0].context() as context:
        world.transfer(0, 1, context, [torch.ones(3)])
        assert not world[0].contexts.get(context).sends
        assert world[0].contexts.get(context).known == {1}
        assert world[1].contexts.get(context).known == {0}


def test_nothing_is_recorded_without_grad_mode() -> None:
    with autograds(2) as world, world[0].context() as context:
        with torch.no_grad():
            (got,) = world.transfer(0, 1, context, [doubles(3)])
        assert not got.requires_grad
        assert not world[0].contexts.get(context).sends


def test_released_contexts_end_everywhere() -> None:
    with autograds(3) as world:
        with world[0].context() as context:
            (there,) = world.transfer(0, 1, context, [doubles(3)])
            world.transfer(1, 2, context, [there])
            assert world.contexts() == 3
        with pytest.raises(GradwireError):
            world[0].get_gradients(context)
        wait_until(lambda: world.contexts() == 0)
