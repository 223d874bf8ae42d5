"""The local graph of one worker, cut into segments that can be run by themselves.

A pass has *sources* on a worker: the roots, where it was begun, and every send of the context. What
a source reaches are leaves, recvs and the nodes between. Sources that reach a common node that is
no leaf belong to one *segment*: what flows into that node must be summed before it is run, so the
segment is one call of the engine. Segments that share leaves only are independent.

Within a segment with several sources the engine runs sends whose gradients have not come yet, and
they wait (`engine.py`). It must enter them only when nothing else is ready, the newest first. The
engine takes the ready node with the highest sequence number, so sends are numbered by their order
of creation from 1 (`Send.enter_late`), and here every other node with so low a number is lifted out
of the way (`node_order.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import node_order
from .nodes import LEAF_NODE, RECV_NODE, SEND_NODE, Send

SMALL = 200
"""Nodes of a graph that takes no time to run."""
_LIFT = 1 << 40
_ALL = float("inf")

Edge = tuple[Any, int]
"""A node, and which of the tensors that it made."""

Recvs = dict[Any, set[int]]
"""The nodes of recvs, and which of their tensors are reached."""

Reach = tuple[set[Any], Recvs, list[int]]
"""Leaves, recvs, and other sources that reached something of it before."""


@dataclass(slots=True)
class Segment:
    """A piece of the graph."""

    roots: list[int]
    """Which of the roots; by position."""
    sends: list[Send]
    """In order of creation."""
    leaves: Collection[Any] = ()
    """The nodes behind the leaves that its sources reach."""
    recvs: Recvs = field(default_factory=dict)
    last: dict[int, Any] = field(default_factory=dict)
    """The recvs that are run after all else, or nearly so."""
    is_bare: bool = False
    """There is nothing between its one send and leaves."""
    foreign: list[Any] = field(default_factory=list)
    """The recvs of other contexts that are reached: no gradients may come there."""


@dataclass(slots=True)
class Walk:
    """What the sources of a pass reach."""

    owner: dict[Any, int] = field(default_factory=dict)
    """Nodes that are no leaves, and the first source that reached them."""
    links: list[tuple[int, int]] = field(default_factory=list)
    """Sources that reached the same node."""
    leaves: list[set[Any]] = field(default_factory=list)
    recvs: list[Recvs] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    """How many nodes each source was the first to reach."""
    foreign: list[list[Any]] = field(default_factory=list)
    """The recvs of other contexts."""


def cut(
    roots: Sequence[Edge],
    sends: Sequence[Send],
    context: int,
    joins: Callable[[Any], bool] = lambda leaf: False,
    keepers: Callable[[Any], Iterable[Any]] = lambda leaves: (),
) -> list[Segment]:
    """The segments of a graph: first those with roots.

    `joins`: whether the whole gradient of a leaf, given by its node, has to be known at once. The
    sources that reach it are then in one segment. `keepers`: those who want the gradients of some
    leaves all together. The sources that reach leaves of one are then in one segment, and so is
    all that shares a leaf with them.

    Roots that wait for no sends are in one segment, all that do are in another: several that wait
    would have to be run at the same time.
    """
    found = _walk([*roots, *[(send.node, 0) for send in sends]], context)
    count = len(roots)
    if count + len(sends) > 1:
        found.links += _links(found.leaves, joins, keepers)
    if found.links or count > 1:
        return _joined(roots, sends, found)
    segments = []
    if count:
        leaves, recvs = found.leaves[0], found.recvs[0]
        segments.append(Segment([0], [], leaves, recvs, foreign=found.foreign[0]))
    for i, send in enumerate(sends, count):
        is_bare = found.sizes[i] == 1
        leaves, recvs = found.leaves[i], found.recvs[i]
        segment = Segment([], [send], leaves, recvs, is_bare=is_bare)
        segment.foreign = found.foreign[i]
        segments.append(segment)
    _note_last(segments, range(len(segments)), found.owner)
    return segments


def _joined(roots: Sequence[Any], sends: Sequence[Send], found: Walk) -> list[Segment]:
    """The segments where several sources may belong to one."""
    count = len(roots)
    groups = _groups(count + len(sends), found.links)
    segments: dict[int, Segment] = {}
    for number, group in enumerate(groups):
        segment = segments.setdefault(group, Segment([], []))
        if number < count:
            segment.roots.append(number)
        else:
            segment.sends.append(sends[number - count])
    if sends:
        _lift(found.owner, groups, {g for g, s in segments.items() if _waits(s)}, sends)
    _reach(segments, groups, found)
    _note_last(segments, groups, found.owner)
    return _merged(list(segments.values()))


def _walk(sources: Iterable[Edge], context: int) -> Walk:
    found = Walk()
    for number, (source, index) in enumerate(sources):
        before = len(found.owner)
        leaves, recvs, links = walk(source, number, found.owner, index=index)
        foreign = [r for r in recvs if r.crossing.context != context]
        for recv in foreign:
            del recvs[recv]
        found.leaves.append(leaves)
        found.recvs.append(recvs)
        found.foreign.append(foreign)
        found.links += [(was, number) for was in links]
        found.sizes.append(len(found.owner) - before)
    return found


def _waits(segment: Segment) -> bool:
    return len(segment.sends) + bool(segment.roots) > 1


def walk(
    source: Any,
    number: int,
    owner: dict[Any, int],
    most: float = _ALL,
    *,
    index: int = 0,
) -> Reach:
    """What a source reaches that no other has reached before; `owner` gets those nodes.

    Recvs that others have reached, too, are found again. `index`: which of its tensors. It stops
    when there are more than `most`. Costs half a microsecond for each node, most of it for torch to
    show the node to Python, so it is one function.
    """
    leaf_node, recv_node = LEAF_NODE, RECV_NODE
    leaves: set[Any] = set()
    recvs: Recvs = {}
    links: list[int] = []
    stack: list[Any] = []
    edges: Any = ((source, index),)
    while True:
        for node, which in edges:
            if node in owner:
                if owner[node] != number:
                    links.append(owner[node])
                if type(node) is recv_node:
                    recvs.setdefault(node, set()).add(which)
                continue
            kind = type(node)
            if kind is leaf_node:
                leaves.add(node)
            elif node is not None:
                owner[node] = number
                if kind is recv_node:
                    recvs[node] = {which}
                else:
                    stack.append(node)
        if not stack or len(owner) > most:
            return leaves, recvs, links
        edges = stack.pop().next_functions


def _links(
    leaves: Sequence[set[Any]],
    joins: Callable[[Any], bool],
    keepers: Callable[[Any], Iterable[Any]],
) -> list[tuple[int, int]]:
    """Which sources are put together by the leaves they reach."""
    first: dict[Any, int] = {}
    shared: dict[Any, list[tuple[int, int]]] = {}
    kept: set[Any] = set()
    found = []
    for number, own in enumerate(leaves):
        for leaf in own:
            before = first.setdefault(leaf, number)
            if before != number:
                shared.setdefault(leaf, []).append((before, number))
        for keeper in keepers(own):
            found.append((first.setdefault(keeper, number), number))
            kept |= own
    grown = len(kept)
    while grown:  # and what shares a leaf with those, and so on
        grown = -len(kept)
        for own in leaves:
            if not kept.isdisjoint(own):
                kept |= own
        grown += len(kept)
    for leaf, links in shared.items():
        if leaf in kept or joins(leaf):
            found += links
    return found


def _groups(count: int, links: Iterable[tuple[int, int]]) -> list[int]:
    """For each source the first one of its group."""
    parents = list(range(count))

    def top(number: int) -> int:
        while parents[number] != number:
            parents[number] = parents[parents[number]]
            number = parents[number]
        return number

    for one, other in links:
        low, high = sorted((top(one), top(other)))
        parents[high] = low
    return [top(number) for number in range(count)]


def _lift(
    owner: dict[Any, int], groups: list[int], waiting: set[int], sends: Sequence[Send]
) -> None:
    if not waiting:
        return
    own = {send.node for send in sends}
    latest = max(send.place for send in sends)
    for node, source in owner.items():
        if groups[source] in waiting and node not in own:
            place = node_order.number(node)
            if place <= latest:
                node_order.set_number(node, place + _LIFT)


def _reach(segments: dict[int, Segment], groups: list[int], found: Walk) -> None:
    leaves: dict[int, set[Any]] = {}
    for number, group in enumerate(groups):
        merge(segments[group].recvs, found.recvs[number])
        segments[group].foreign += found.foreign[number]
        if group in leaves:
            leaves[group] |= found.leaves[number]
        else:
            leaves[group] = found.leaves[number]
    for group, reached in leaves.items():
        segments[group].leaves = reached


def merge(recvs: Recvs, more: Recvs) -> None:
    """Add what else is reached."""
    for node, indexes in more.items():
        recvs[node] = recvs[node] | indexes if node in recvs else indexes


def _note_last(
    segments: Mapping[int, Segment] | Sequence[Segment],
    groups: Sequence[int],
    owner: dict[Any, int],
) -> None:
    """Nodes run in the reverse order of their making, where that is up to the engine.

    In a small graph nothing takes long, so everything counts as last.
    """
    if len(owner) <= SMALL:
        for group in groups:
            segment = segments[group]
            if segment.recvs:
                segment.last = {node.crossing.id: node for node in segment.recvs}
        return
    if not any(segments[group].recvs for group in groups):
        return
    crossings = {RECV_NODE, SEND_NODE}
    numbers: dict[int, list[int]] = {group: [] for group in groups}
    for node, source in owner.items():
        if type(node) not in crossings:
            numbers[groups[source]].append(node_order.number(node))
    first = {group: min(found, default=_LIFT) for group, found in numbers.items()}
    for group, lowest in first.items():
        for node in segments[group].recvs:
            if node_order.number(node) < lowest:
                segments[group].last[node.crossing.id] = node


def _merged(segments: list[Segment]) -> list[Segment]:
    kept = [s for s in segments if not s.roots]
    for group in (
        [s for s in segments if s.roots and not s.sends],
        [s for s in segments if s.roots and s.sends],
    ):
        if group:
            first = group[0]
            for other in group[1:]:
                first.roots += other.roots
                first.sends += other.sends
                first.leaves = {*first.leaves, *other.leaves}
                merge(first.recvs, other.recvs)
                first.last |= other.last
                first.foreign += other.foreign
            kept.insert(0, first)
    return kept
