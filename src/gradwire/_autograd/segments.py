"""The local graph of one worker, cut into segments that can run independently.

A pass has *sources* on a worker: every message of the context that left it, and the roots, where it
began. From a source, the graph leads to leaves, recvs and the nodes in between. Sources that reach
a common node other than a leaf belong to one *segment*: the gradients that flow into that node must
be summed before it runs, so the segment is one call of the engine. Segments that share only leaves
are independent; unless something needs the whole gradient of a leaf at once, as hooks do, and
DistributedDataParallel.

Segments are computed while the program records, message by message, and once for all passes. A pass
uses them as they are, and adds that of its roots.

Within a segment with several sources the engine runs sends whose gradients have not arrived yet,
and they wait (`engine.py`). It must enter them only when nothing else is ready, the newest first.
The engine takes the ready node with the highest sequence number, so sends are numbered by their
order of creation from 1 (`Send.enter_late`), and every other node with such a low number is raised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from . import ddp, hooks, node_order
from .nodes import LEAF_NODE, RECV_NODE, Edge, Send, leaf_node
from .pass_state import ROOTS, Indexes

_LIFT = 1 << 40

Recvs = dict[Any, set[int]]
"""The nodes of recvs, and which of their tensors are reached."""


class Reach(NamedTuple):
    """What is behind some edges. In a partly known graph: up to where the known part begins."""

    nodes: set[Any]
    """But leaves."""
    leaves: set[Any]
    recvs: Recvs
    met: set[int]
    """The sends by which those nodes are known that were met."""


def walk(edges: Iterable[Edge], known: Mapping[Any, int]) -> Reach:
    """What is behind these edges. `known`: nodes behind sends.

    Costs half a microsecond for each node, most of it in torch's wrapping of the node for Python,
    so it is one function.
    """
    leaf_node, recv_node = LEAF_NODE, RECV_NODE
    nodes: set[Any] = set()
    leaves: set[Any] = set()
    recvs: Recvs = {}
    met: set[int] = set()
    stack: list[Any] = []
    while True:
        for node, which in edges:
            kind = type(node)
            if kind is leaf_node:
                leaves.add(node)
            elif kind is recv_node:
                recvs.setdefault(node, set()).add(which)
                if node in known:
                    met.add(known[node])
                else:
                    nodes.add(node)
            elif node is not None and node not in nodes:
                if node in known:
                    met.add(known[node])
                else:
                    nodes.add(node)
                    stack.append(node)
        if not stack:
            return Reach(nodes, leaves, recvs, met)
        edges = stack.pop().next_functions


class Segment:
    """A piece of the graph. It grows while the program records, and never shrinks."""

    __slots__ = ("has_roots", "is_bare", "leaves", "nodes", "recvs", "sends")

    def __init__(self, sends: list[Send], reach: Reach | None = None) -> None:
        """Without what it reaches, it consists of leaves that were sent as they are, each once."""
        self.sends = sends
        """In order of creation."""
        self.has_roots = False
        self.is_bare = reach is None
        """There is nothing between its one send and leaves."""
        self.nodes: set[Any] = reach.nodes if reach else set()
        self.leaves: set[Any] = reach.leaves if reach else set()
        """The nodes behind leaves; see `leaf_nodes`."""
        self.recvs: Recvs = reach.recvs if reach else {}

    def leaf_nodes(self) -> Iterable[Any]:
        """The nodes behind its leaves. Those of bare ones are created only when needed."""
        if self.is_bare:
            return [node for send in self.sends for node, _ in send.edges]
        return self.leaves

    def absorb(self, other: Segment) -> None:
        """Merge another one into it."""
        if self.is_bare:
            self.leaves, self.is_bare = {*self.leaf_nodes()}, False
        self.leaves.update(other.leaf_nodes())
        sends = [*self.sends, *other.sends]
        if self.sends and other.sends and self.sends[-1].place > other.sends[0].place:
            sends.sort(key=_place)
        self.sends = sends  # atomic: passes read it concurrently
        self.has_roots = self.has_roots or other.has_roots
        self.nodes |= other.nodes
        for node, indexes in other.recvs.items():
            self.recvs.setdefault(node, set()).update(indexes)


def _place(send: Send) -> int:
    return send.place


def _united(segments: Iterable[Segment]) -> Segment:
    """The union of all of these, which are unchanged."""
    whole = Segment([], Reach(set(), set(), {}, set()))
    for segment in segments:
        whole.absorb(segment)
    return whole


class Segments:
    """The segments of one context on one worker. Adding, and making a plan, require its lock."""

    def __init__(self) -> None:
        self.count = 0
        """How many messages have left."""
        self.of_send: dict[int, Segment] = {}
        self._known: dict[Any, int] = {}  # nodes, and a send by which each is known
        # Leaves, by id, and the sends that reach each; and those of them that several do.
        self._leaves: dict[int, list[int]] = {}
        self._shared: dict[int, Tensor] = {}

    def add(self, send: Send) -> None:
        """Add one more message, the newest."""
        self.count += 1
        number = send.crossing.id
        leaves = send.leaves
        if leaves and (len(leaves) == 1 or len({*map(id, leaves)}) == len(leaves)):
            self.of_send[number] = Segment([send])
            self._note_leaves(number, leaves)
            return
        reach = walk(send.edges, self._known)
        segment = Segment([send], reach)
        self._known |= dict.fromkeys(reach.nodes, number)
        if reach.leaves:
            self._note_leaves(number, [node.variable for node in reach.leaves])
        self.of_send[number] = segment
        if reach.met:
            self._merge([segment, *(self.of_send[each] for each in reach.met)])

    def _merge(self, segments: list[Segment]) -> None:
        """Merge them into the largest: so a long program takes no longer for each message."""
        whole, *others = sorted({*segments}, key=lambda s: len(s.nodes), reverse=True)
        for other in others:
            whole.absorb(other)
            for send in other.sends:
                self.of_send[send.crossing.id] = whole

    def _note_leaves(self, number: int, leaves: Iterable[Tensor]) -> None:
        for leaf in leaves:
            sends = self._leaves.setdefault(id(leaf), [])
            sends.append(number)
            if len(sends) > 1:
                self._shared[id(leaf)] = leaf

    # For a pass

    def plan(self, roots: Sequence[Edge] = ()) -> Plan:
        """The plan for a pass. All its roots are in one segment."""
        own: dict[int, Segment] = {}
        if roots:
            reach = walk(roots, self._known)
            rooted = Segment([], reach)
            rooted.has_roots = True
            own = {ROOTS: rooted}
            if reach.met:
                met = {self.of_send[each] for each in reach.met}
                own = _by_source([_united([rooted, *met])])
        if hooks.were_made() or ddp.known():
            own |= self._joined(own.get(ROOTS))
        return Plan(self.of_send, self.count, own)

    def _joined(self, rooted: Segment | None) -> dict[int, Segment]:
        """Segments that are merged because of the leaves they reach, by source."""
        reaching = {number: [*sends] for number, sends in self._leaves.items()}
        shared = dict(self._shared)
        for node in rooted.leaves if rooted else ():
            leaf = node.variable
            sends = reaching.setdefault(id(leaf), [])
            if sends:
                shared[id(leaf)] = leaf
            sends.append(ROOTS)
        own = _by_source([rooted]) if rooted else {}
        groups: list[set[Segment]] = []
        for tie in _ties(reaching, shared):
            group = {own.get(number) or self.of_send[number] for number in tie}
            met = [other for other in groups if not other.isdisjoint(group)]
            groups = [other for other in groups if other not in met]
            groups.append(group.union(*met))
        return _by_source(_united(group) for group in groups if len(group) > 1)


def _by_source(segments: Iterable[Segment]) -> dict[int, Segment]:
    found: dict[int, Segment] = {}
    for segment in segments:
        found |= dict.fromkeys([send.crossing.id for send in segment.sends], segment)
        if segment.has_roots:
            found[ROOTS] = segment
    return found


def _ties(
    reaching: Mapping[int, Sequence[int]], shared: Mapping[int, Tensor]
) -> list[Sequence[int]]:
    """Sources that are merged because of the leaves that they reach, given by id.

    A leaf may need its whole gradient at once; or be one of several whose gradients are needed
    together, and then so is everything that shares a leaf with them.
    """
    ties = [reaching[number] for number, leaf in shared.items() if _is_hooked(leaf)]
    kept: set[int] = set()  # sources
    for replica in ddp.known():
        sources = {s for n in replica.parameters for s in reaching.get(n, ())}
        ties.append([*sources])
        kept |= sources
    grown = bool(kept)
    while grown:  # and what shares a leaf with those, and so on
        grown = False
        for number in shared:
            sources = {*reaching[number]}
            if not kept.isdisjoint(sources) and not sources <= kept:
                kept |= sources
                grown = True
    ties += [reaching[n] for n in shared if not kept.isdisjoint(reaching[n])]
    return ties


def _is_hooked(leaf: Tensor) -> bool:
    """Whether a leaf, or the node behind it, has hooks: these need its whole gradient."""
    if hooks.of_tensor(leaf) or hooks.of_grad(leaf):
        return True
    node = leaf_node(leaf)
    return node is not None and bool(hooks.before(node) or hooks.after(node))


class Plan:
    """The segments of a worker, as one pass sees them: without later messages."""

    __slots__ = ("_count", "_known", "_of_send", "_own")

    def __init__(
        self, of_send: Mapping[int, Segment], count: int, own: Mapping[int, Segment]
    ) -> None:
        """`own`: segments that are larger in this pass, by source; with that of its roots."""
        self._of_send = of_send
        self._count = count
        self._own = own
        self._known: dict[Segment, tuple[Sequence[Send], list[int]]] = {}
        """Of segments, sends and what sources they are: many ask for the same."""

    def segment(self, source: int) -> Segment | None:
        """The segment of a source; None if it is not part of this pass."""
        return self._own.get(source) or self._of_send.get(source)

    def sources(self, source: int) -> Sequence[int]:
        """See `pass_state.Plan`."""
        segment = self._own.get(source) or self._of_send.get(source)
        if segment is None:
            return ()
        sends = segment.sends
        if len(sends) + segment.has_roots == 1:  # the usual case
            return () if sends and sends[0].place > self._count else (source,)
        known, found = self._known.get(segment, (None, []))
        if known is not sends:
            found = [s.crossing.id for s in sends if s.place <= self._count]
            # A later message may have joined it to one that is larger in this pass.
            found = [number for number in found if self.segment(number) is segment]
            if segment.has_roots:
                found.insert(0, ROOTS)
            self._known[segment] = sends, found
        return found if source in found else ()

    def reach(
        self, sources: Mapping[int, Indexes], roots: Callable[[], list[Edge]]
    ) -> tuple[Sequence[Send], Reach | Segment]:
        """The messages among the sources of one segment, and what these slots of them reach.

        It may grow while it is looked at, as others record. `roots`: of the pass, if some are in.
        """
        first = next(iter(sources))
        segment = self._own.get(first) or self._of_send[first]
        sends: Sequence[Send] = segment.sends
        if not segment.is_bare and _is_whole(segment, sources):
            return sends, segment
        sends = [send for send in sends if send.crossing.id in sources]
        edges = roots() if ROOTS in sources else []
        for send in sends:
            behind = send.edges
            edges += [behind[index] for index in sources[send.crossing.id]]
        return sends, walk(edges, {})


def _is_whole(segment: Segment, sources: Mapping[int, Indexes]) -> bool:
    """Whether these are all slots of all sources of a segment."""
    sends = segment.sends
    if len(sources) != len(sends) + segment.has_roots:
        return False
    for send in sends:
        crossing = send.crossing
        if crossing.count != len(sources[crossing.id]):
            return False
    return True


def lift(nodes: Iterable[Any], latest: int) -> None:
    """Make the engine enter sends up to this number after these nodes."""
    for node in list(nodes):
        place = node_order.number(node)
        if place <= latest:
            node_order.set_number(node, place + _LIFT)
