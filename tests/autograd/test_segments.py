"""The local graph of one worker, cut into segments."""

from collections.abc import Iterable, Sequence

import pytest
import torch
from torch import Tensor

from gradwire._autograd import segments as segments_module
from gradwire._autograd.contexts import Context
from gradwire._autograd.nodes import make_recv
from gradwire._autograd.pass_state import ROOTS
from gradwire._autograd.segments import Plan, lift
from tests.autograd.functions import doubles


class Graph:
    """What one worker records."""

    def __init__(self) -> None:
        self.context = Context(7)

    def send(self, number: int, *tensors: Tensor) -> None:
        self.context.add_send(number, 1, tensors)
        self.context.segments()

    def recv(self, number: int, *tensors: Tensor) -> Sequence[Tensor]:
        self.context.add_recv(number, 1, make_recv(tensors))
        return tensors

    def plan(self, *roots: Tensor) -> Plan:
        edges = [(root.grad_fn, root.output_nr) for root in roots]
        return self.context.segments().plan(edges)


def leaves(plan: Plan, source: int) -> set[int]:
    segment = plan.segment(source)
    assert segment is not None
    return {id(node.variable) for node in segment.leaf_nodes()}


def recvs(plan: Plan, source: int) -> dict[int, set[int]]:
    segment = plan.segment(source)
    assert segment is not None
    return {node.crossing.id: indexes for node, indexes in segment.recvs.items()}


def ids(*tensors: Tensor) -> set[int]:
    return set(map(id, tensors))


def test_sources_that_share_only_leaves_are_apart() -> None:
    graph, leaf = Graph(), doubles(3)
    graph.send(1, leaf * 3)
    graph.send(2, leaf)
    plan = graph.plan((leaf * 2).sum())
    assert [list(plan.sources(n)) for n in (ROOTS, 1, 2)] == [[ROOTS], [1], [2]]
    assert [leaves(plan, n) for n in (ROOTS, 1, 2)] == [ids(leaf)] * 3


def test_sources_that_share_a_node_are_together() -> None:
    graph, one, other = Graph(), doubles(3), doubles(3)
    shared = one * 2
    graph.send(1, shared * other)
    plan = graph.plan(shared.sum())
    assert list(plan.sources(ROOTS)) == list(plan.sources(1)) == [ROOTS, 1]
    assert leaves(plan, 1) == ids(one, other)
    assert list(graph.plan((one * 3).sum()).sources(1)) == [1]


def test_a_message_joins_what_was_apart() -> None:
    graph, leaf = Graph(), doubles(3)
    a, b = leaf * 2, leaf * 3
    graph.send(1, a)
    graph.send(2, b)
    assert list(graph.plan().sources(2)) == [2]
    graph.send(3, a * b)
    assert [list(graph.plan().sources(n)) for n in (1, 2, 3)] == [[1, 2, 3]] * 3


def test_messages_after_a_pass_began_are_no_part_of_it() -> None:
    graph, leaf = Graph(), doubles(3)
    shared = leaf * 2
    graph.send(1, shared)
    plan = graph.plan()
    graph.send(2, shared * 3)
    assert list(plan.sources(1)) == [1]
    assert list(plan.sources(2)) == []
    assert list(graph.plan().sources(2)) == [1, 2]


def test_roots_are_one_segment() -> None:
    graph, leaf = Graph(), doubles(3)
    a, b = leaf * 2, leaf * 3
    graph.send(1, a)
    graph.send(2, b)
    plan = graph.plan(a.sum(), b.sum(), (leaf * 4).sum())
    assert list(plan.sources(ROOTS)) == [ROOTS, 1, 2]
    assert leaves(plan, ROOTS) == ids(leaf)


def test_the_walk_ends_at_recvs() -> None:
    graph, leaf = Graph(), doubles(3)
    (first,) = graph.recv(11, torch.ones(3))
    graph.send(1, first * 2)
    one, two = graph.recv(12, torch.ones(3), torch.ones(3))
    plan = graph.plan((two * leaf).sum())
    assert recvs(plan, ROOTS) == {12: {1}}
    assert recvs(plan, 1) == {11: {0}}
    assert leaves(plan, ROOTS) == ids(leaf)
    assert recvs(graph.plan((one * two).sum()), ROOTS) == {12: {0, 1}}


def test_a_root_can_have_just_arrived() -> None:
    graph = Graph()
    (arrived,) = graph.recv(11, torch.ones(()))
    assert recvs(graph.plan(arrived), ROOTS) == {11: {0}}


def test_what_some_slots_of_sources_reach() -> None:
    graph, leaf, other = Graph(), doubles(3), doubles(3)
    (arrived,) = graph.recv(11, torch.ones(3))
    shared = leaf * 2
    graph.send(1, shared, arrived * other)
    graph.send(2, shared * 3)
    plan = graph.plan()
    _, part = plan.reach({1: (0,), 2: (0,)}, list)
    assert {id(node.variable) for node in part.leaves} == ids(leaf)
    assert not part.recvs
    _, whole = plan.reach({1: (0, 1), 2: (0,)}, list)
    assert {id(node.variable) for node in whole.leaves} == ids(leaf, other)
    assert [node.crossing.id for node in whole.recvs] == [11]


def test_leaves_that_were_sent_as_they_are_have_nothing_between() -> None:
    graph, one, other = Graph(), doubles(3), doubles(3)
    graph.send(1, one, other)
    graph.send(2, one, one)  # whose gradients are to be summed
    first, second = (graph.plan().segment(number) for number in (1, 2))
    assert first is not None
    assert second is not None
    assert (first.is_bare, second.is_bare) == (True, False)
    assert leaves(graph.plan(), 1) == ids(one, other)


@pytest.mark.parametrize("on_node", [False, True])
def test_a_leaf_with_hooks_wants_its_whole_gradient(on_node: bool) -> None:
    graph, leaf = Graph(), doubles(3)
    graph.send(1, leaf)
    graph.send(2, leaf * 2)
    graph.send(3, doubles(3))
    root = (leaf * 3).sum()
    if on_node:
        node = root.grad_fn.next_functions[0][0].next_functions[0][0]  # type: ignore[union-attr]
        handle = node.register_prehook(lambda gradients: None)
    else:
        handle = leaf.register_hook(lambda gradient: None)
    plan = graph.plan(root)
    assert list(plan.sources(2)) == [ROOTS, 1, 2]
    assert list(plan.sources(3)) == [3]
    handle.remove()
    assert list(graph.plan(root).sources(2)) == [2]


def test_leaves_with_hooks_join_what_shares_a_node_with_one_of_them() -> None:
    graph, one, other = Graph(), doubles(3), doubles(3)
    one.register_hook(lambda gradient: None)
    other.register_hook(lambda gradient: None)
    shared = one * 2
    graph.send(1, shared)
    graph.send(2, shared * other)
    graph.send(3, one * 3)
    graph.send(4, other * 3)
    plan = graph.plan()
    assert [list(plan.sources(n)) for n in (1, 2, 3, 4)] == [[1, 2, 3, 4]] * 4


def test_a_later_message_takes_nothing_from_the_segment_of_the_roots() -> None:
    graph, leaf = Graph(), doubles(3)
    a, b = leaf * 2, leaf * 3
    graph.send(1, a)
    graph.send(2, b)
    plan = graph.plan(a.sum())
    graph.send(3, a * b)
    assert list(plan.sources(ROOTS)) == list(plan.sources(1)) == [ROOTS, 1]
    assert list(plan.sources(2)) == [2]


def test_sends_that_may_be_waited_for_come_after_all_else() -> None:
    context, leaf = Context(7), doubles(3)
    shared = leaf * 2
    sends = [context.add_send(k, 1, [shared * k]) for k in range(1, 501)]
    segment = context.segments().plan([(shared.sum().grad_fn, 0)]).segment(ROOTS)
    assert segment is not None
    lift(segment.nodes, 500)
    assert _numbers(sent.node for sent in sends) == list(range(1, 501))
    assert min(_numbers(segment.nodes)) > 500


def _numbers(nodes: Iterable[object]) -> list[int]:
    return [segments_module.node_order.number(node) for node in nodes]


def test_a_long_program_costs_each_message_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Messages of one value join their segments without each looking at all."""
    walked = 0
    walk = segments_module.walk

    def counting(*args: object) -> segments_module.Reach:
        nonlocal walked
        reach = walk(*args)  # type: ignore[arg-type]
        walked += len(reach.nodes)
        return reach

    monkeypatch.setattr(segments_module, "walk", counting)
    graph, leaf = Graph(), doubles(3)
    shared = leaf * 2
    for number in range(1, 401):
        graph.send(number, shared * number)
    assert walked <= 2 * 400
