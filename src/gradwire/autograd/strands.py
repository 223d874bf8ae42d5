"""The graph of a context on one worker, where it is simple: what each send reaches by itself.

A *strand* is what one source reaches and no other does, but for leaves. It can be run as soon as
the gradients of its source are there; nothing else has to be known (`direct.py`). Unlike segments
(`graph.py`), strands are found once for all passes.

Large graphs count as not simple. They take long to run, so gradients should leave while the rest is
still running; and what a pass costs besides does not matter there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge

from . import engine, hooks, replicas
from .contexts import Context
from .gradients import Leaf, keep, look_at
from .graph import SMALL, walk
from .nodes import Crossing, Gradients, Send

Found = list[tuple[Crossing, Gradients]]
"""The gradients of recvs."""


class Strand:
    """What one source reaches: leaves and recvs, given by their nodes."""

    __slots__ = ("_ends", "_inputs", "_leaves", "contexts", "recvs")

    def __init__(
        self, ends: Sequence[Any], leaves: Collection[Any], recvs: Sequence[Any]
    ) -> None:
        self.recvs: list[Crossing] = []
        self.contexts: set[int] = set()
        """Those in which what it begins with arrived; one, if all is right."""
        self._ends = [GradientEdge(*end) for end in ends]  # where gradients go in
        self._leaves = leaves
        inputs = [GradientEdge(node, 0) for node in leaves] if leaves else []
        for node in recvs:
            crossing = node.crossing
            self.recvs.append(crossing)
            self.contexts.add(crossing.context)
            for index in range(crossing.count):
                inputs.append(GradientEdge(node, index))
        self._inputs = tuple(inputs)

    def run(
        self,
        context: Context,
        gradients: list[Tensor | None],
        flags: int,
        ahead: list[Leaf] | None = None,
    ) -> Found:
        """Run it, and keep the gradients of its leaves; those of its recvs. Empties the list.

        Raises:
            Exception: whatever a backward or a hook raises.
        """
        ends, given = [], []
        for end, gradient in zip(self._ends, gradients, strict=True):
            if gradient is not None:
                ends.append(end)
                given.append(gradient)
        gradient = None
        gradients.clear()
        return self.run_from(context, ends, given, flags) if ends else []

    def run_from(
        self,
        context: Context,
        ends: Sequence[GradientEdge | Tensor],
        gradients: list[Tensor],
        flags: int,
    ) -> Found:
        """As `run`, from these ends of it."""
        if not self._inputs:
            return []
        captured = engine.call(ends, gradients, self._inputs, flags)
        at = count = len(self._leaves)
        found = []
        for recv in self.recvs:
            found.append((recv, captured[at : at + recv.count]))
            at += recv.count
        if count:
            of_leaves = list(captured[:count])
            del captured  # what nobody else has need not be copied
            keep(context, look_at(self._leaves), of_leaves, flags)
        return found


class BareStrand(Strand):
    """Leaves that were sent as they are, each once: that needs no engine."""

    __slots__ = ("_send",)

    def __init__(self, send: Send) -> None:
        super().__init__((), (), ())
        self._send = send

    def look_ahead(self) -> list[Leaf]:
        """What can be seen to before the gradients come, for `run`."""
        return look_at([node for node, _ in self._send.edges])

    def run(
        self,
        context: Context,
        gradients: list[Tensor | None],
        flags: int,
        ahead: list[Leaf] | None = None,
    ) -> Found:
        leaves = self.look_ahead() if ahead is None else ahead
        if not [leaf for leaf in leaves if leaf.tensor._backward_hooks]:
            keep(context, leaves, gradients, flags)
            return []
        edges = self._send.edges
        strand = Strand(edges, {node for node, _ in edges}, ())
        return strand.run(context, gradients, flags)


class Strands:
    """Those of one context on one worker."""

    def __init__(self, context: int) -> None:
        self.sends: dict[int, Send] = {}
        """What they were found for."""
        self._owner: dict[Any, int] = {}
        self._strands: dict[int, Strand] = {}
        # Leaves, each with its node or a send of it; those that several sends reach.
        self._leaves: dict[int, Any] = {}
        self._shared: dict[int, Any] = {}
        self._contexts = {context}  # those in which something in it arrived
        self._has_replicas = False

    def add(self, send: Send) -> None:
        """Have one more."""
        number = send.crossing.id
        self.sends[number] = send
        self._has_replicas = bool(replicas.known())
        if send.leaves:
            leaves: dict[int, Any] = {id(leaf): send for leaf in send.leaves}
            if len(leaves) == len(send.leaves):
                self._strands[number] = BareStrand(send)
                self._note(leaves)
                return
        if len(self._owner) > SMALL:
            return
        nodes, recvs, links = walk(send.node, number, self._owner, SMALL)
        self._note(_leaves_of(nodes))
        for other in links:
            self._strands.pop(other, None)
        if not links:
            strand = Strand(send.edges, nodes, recvs)
            self._strands[number] = strand
            self._contexts |= strand.contexts

    def _note(self, leaves: dict[int, Any]) -> None:
        if leaves:
            known = self._leaves
            self._shared |= {n: leaf for n, leaf in leaves.items() if n in known}
            known |= leaves

    def are_simple(self) -> bool:
        """Whether they can be run one by one, as far as size and leaves are concerned."""
        if len(self._owner) > SMALL or len(self._contexts) > 1 or self._has_replicas:
            return False
        return not self._shared or not _is_any_joint(self._shared)

    def get(self, number: int) -> Strand | None:
        """The strand of a send; None: it is not that simple."""
        strand = self._strands.get(number)
        if hooks.on_crossings and strand is not None:
            crossings = (*strand.recvs, self.sends[number].crossing)
            return None if _have_hooks(crossings) else strand
        return strand

    def bare(self) -> Sequence[tuple[int, BareStrand]]:
        """Those that something can be seen to ahead of their gradients, by their sends."""
        strands = list(self._strands.items())  # in one step: others may add some
        return [(n, strand) for n, strand in strands if isinstance(strand, BareStrand)]

    def of_roots(self, roots: Sequence[Tensor]) -> Strand | None:
        """What roots reach, as one strand; None: it is not that simple."""
        owner: dict[Any, int] = {}
        nodes: set[Any] = set()
        recvs: list[Any] = []
        for root in roots:
            more, found, _ = walk(root.grad_fn, 0, owner, SMALL)
            nodes |= more
            recvs += found
        if len(owner) > SMALL or not owner.keys().isdisjoint(self._owner):
            return None
        if nodes:
            if replicas.known():
                return None
            leaves = _leaves_of(nodes)
            shared = {n: node for n, node in leaves.items() if n in self._leaves}
            if shared and _is_any_joint(shared):
                return None
        strand = Strand((), nodes, recvs)
        if not strand.contexts <= self._contexts:
            return None
        return None if hooks.on_crossings and _have_hooks(strand.recvs) else strand


def _leaves_of(nodes: Iterable[Any]) -> dict[int, Any]:
    return {id(node.variable): node for node in nodes}


def _is_any_joint(leaves: Mapping[int, Any]) -> bool:
    return any(replicas.is_joint(_node(*leaf)) for leaf in leaves.items())


def _node(leaf: int, known: Any) -> Any:
    """The node of a leaf."""
    if type(known) is not Send:
        return known
    return next(node for node, _ in known.edges if id(node.variable) == leaf)


def _have_hooks(crossings: Iterable[Crossing]) -> bool:
    """Whether users have put hooks on nodes of sends and recvs, which are not run here."""
    return any(crossing.is_hooked for crossing in crossings)


def strands_of(context: Context) -> Strands:
    """The strands of a context, with its lock held."""
    known: Strands | None = context.strands
    if known is None:
        known = context.strands = Strands(context.id)
    if len(known.sends) < len(context.sends):
        for number, send in context.sends.items():
            if number not in known.sends:
                known.add(send)
    return known
