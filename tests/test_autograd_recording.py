"""Contexts, the nodes where tensors leave and arrive, and the segments of a graph."""

import asyncio
import gc
import threading
import weakref

import pytest
import torch

from autograd_world import autograds, doubles
from gradwire.autograd.contexts import Context, Contexts, Memory, owner
from gradwire.autograd.graph import cut
from gradwire.autograd.nodes import Crossing, Recv, Send, make_recv
from gradwire.errors import GradwireError

PREFIX = "torch::distributed::autograd::"


def send(*tensors: torch.Tensor) -> Send:
    return Send(Crossing(1, 0, 7, len(tensors)), tensors)


def recv(*tensors: torch.Tensor) -> Recv:
    return make_recv(Crossing(1, 0, 7, len(tensors)), tensors)


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
    node = recv(one, two).node
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
    node = recv(tensor).node
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
        assert got_traced.grad_fn is arrived.node


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


# Segments


def test_sources_that_share_only_leaves_are_apart() -> None:
    leaf = torch.ones(3, requires_grad=True)
    root, sent = (leaf * 2).sum(), send(leaf * 3)
    segments = cut([root.grad_fn], [sent], 7)
    assert [(s.roots, s.sends) for s in segments] == [([0], []), ([], [sent])]
    assert [[node.variable is leaf for node in s.leaves] for s in segments] == [
        [True],
        [True],
    ]


def test_sources_that_share_a_node_are_together() -> None:
    leaf = torch.ones(3, requires_grad=True)
    shared = leaf * 2
    sent = send(shared * 3)
    (segment,) = cut([shared.sum().grad_fn], [sent], 7)
    assert (segment.roots, segment.sends) == ([0], [sent])


def test_roots_that_wait_for_nothing_are_one_segment() -> None:
    leaf = torch.ones(3, requires_grad=True)
    roots = [(leaf * k).sum() for k in range(3)]
    (segment,) = cut([root.grad_fn for root in roots], [], 7)
    assert segment.roots == [0, 1, 2]
    assert len(segment.leaves) == 1


def test_the_walk_ends_at_recvs() -> None:
    arrived, leaf = torch.ones(3), torch.ones(3, requires_grad=True)
    crossing = recv(arrived).crossing
    (segment,) = cut([(arrived * leaf).sum().grad_fn], [], 7)
    assert [recv.crossing for recv in segment.recvs] == [crossing]
    assert len(segment.leaves) == 1


def test_a_root_can_have_just_arrived() -> None:
    arrived = torch.ones(())
    node = recv(arrived).node
    (segment,) = cut([node], [], 7)
    assert segment.recvs == [node]


def test_a_tensor_of_another_context_is_refused() -> None:
    arrived = torch.ones(3)
    recv(arrived)
    with pytest.raises(RuntimeError, match=r"arrived in context 7 is part of .* 8"):
        cut([arrived.sum().grad_fn], [], 8)


def test_sends_that_may_be_waited_for_come_after_all_else() -> None:
    context = Context(7)
    leaf = torch.ones(3, requires_grad=True)
    shared = leaf * 2
    sends = [context.add_send(k, 1, [shared * k]) for k in range(500)]
    cut([shared.sum().grad_fn], sends, 7)
    numbers = [sent.node._sequence_nr() for sent in sends]
    assert numbers == list(range(1, 501))
    assert shared.grad_fn is not None
    assert shared.grad_fn._sequence_nr() > 500


def test_released_contexts_end_everywhere() -> None:
    with autograds(3) as world:
        with world[0].context() as context:
            (there,) = world.transfer(0, 1, context, [doubles(3)])
            world.transfer(1, 2, context, [there])
            assert world.contexts() == 3
        with pytest.raises(GradwireError):
            world[0].get_gradients(context)
        world.until(lambda: world.contexts() == 0)
