"""The graph of a context on one worker, where it is simple: what each send reaches by itself.

A *strand* is what one source reaches and no other does, but for leaves. It can be run as soon as
the gradients of its source are there; nothing else has to be known (`direct.py`). Unlike segments
(`graph.py`), strands are found once for all passes.

Large graphs count as not simple. They take long to run, so gradients should leave while the rest is
still running; and what a pass costs besides does not matter there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge

from . import engine, hooks, replicas
from .contexts import Context
from .gradients import keep
from .graph import SMALL, walk
from .nodes import Crossing, Gradients, Send

Found = list[tuple[Crossing, Gradients]]
"""The gradients of recvs."""


class Strand:
    """What one source reaches: leaves and recvs, given by their nodes.

    `ends`: where gradients go in. `is_bare`: there is nothing between these and leaves.
    """

    __slots__ = ("_ends", "_inputs", "_is_bare", "_leaves", "contexts", "recvs")

    def __init__(
        self,
        ends: Sequence[Any],
        leaves: Collection[Any],
        recvs: Sequence[Any],
        *,
        is_bare: bool = False,
    ) -> None:
        self.recvs: list[Crossing] = []
        self.contexts: set[int] = set()
        """Those in which what it begins with arrived; one, if all is right."""
        self._ends = ends
        self._leaves = leaves
        self._is_bare = is_bare
        inputs = [GradientEdge(node, 0) for node in leaves] if leaves else []
        for node in recvs:
            crossing = node.crossing
            self.recvs.append(crossing)
            self.contexts.add(crossing.context)
            for index in range(crossing.count):
                inputs.append(GradientEdge(node, index))
        self._inputs = tuple(inputs)

    def run(
        self, context: Context, gradients: list[Tensor | None], flags: int
    ) -> Found:
        """Run it, and keep the gradients of its leaves; those of its recvs. Empties the list.

        Raises:
            Exception: whatever a backward or a hook raises.
        """
        if self._is_bare and not _are_hooked(self._leaves):
            keep(context, [node for node, *_ in self._ends], gradients, flags)
            return []
        ends, given = [], []
        for end, gradient in zip(self._ends, gradients, strict=True):
            if gradient is not None:
                ends.append(GradientEdge(*end))
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
            keep(context, self._leaves, of_leaves, flags)
        return found


def _are_hooked(leaves: Collection[Any]) -> bool:
    """Whether leaves, given by their nodes, have hooks that the engine would call."""
    return bool([node for node in leaves if node.variable._backward_hooks])


class Strands:
    """Those of one context on one worker."""

    def __init__(self, context: int) -> None:
        self.sends: dict[int, Send] = {}
        """What they were found for."""
        self._owner: dict[Any, int] = {}
        self._strands: dict[int, Strand] = {}
        self._leaves: set[Any] = set()
        self._shared: set[Any] = set()  # the leaves that several sends reach
        self._contexts = {context}  # those in which something in it arrived

    def add(self, send: Send) -> None:
        """Have one more."""
        number, size = send.crossing.id, len(self._owner)
        self.sends[number] = send
        if size > SMALL:
            return
        leaves, recvs, links = walk(send.node, number, self._owner, SMALL)
        if leaves:
            self._shared |= self._leaves & leaves
            self._leaves |= leaves
        if links:
            for other in links:
                self._strands.pop(other, None)
            return
        ends = send.node.next_functions
        is_bare = len(self._owner) == size + 1 and len(leaves) == len(ends)
        strand = Strand(ends, leaves, recvs, is_bare=is_bare)
        self._strands[number] = strand
        self._contexts |= strand.contexts

    def are_simple(self) -> bool:
        """Whether they can be run one by one, as far as size and leaves are concerned."""
        if len(self._owner) > SMALL or len(self._contexts) > 1 or replicas.known():
            return False
        return not self._shared or not any(map(replicas.is_joint, self._shared))

    def get(self, number: int) -> Strand | None:
        """The strand of a send; None: it is not that simple."""
        strand = self._strands.get(number)
        if strand is None:
            return None
        crossings = (*strand.recvs, self.sends[number].crossing)
        return None if _have_hooks(crossings) else strand

    def of_roots(self, roots: Sequence[Tensor]) -> Strand | None:
        """What roots reach, as one strand; None: it is not that simple."""
        owner: dict[Any, int] = {}
        leaves: set[Any] = set()
        recvs: list[Any] = []
        for root in roots:
            more, found, _ = walk(root.grad_fn, 0, owner, SMALL)
            leaves |= more
            recvs += found
        if len(owner) > SMALL or not owner.keys().isdisjoint(self._owner):
            return None
        if leaves and any(map(replicas.is_joint, leaves & self._leaves)):
            return None
        strand = Strand((), leaves, recvs)
        if not strand.contexts <= self._contexts or _have_hooks(strand.recvs):
            return None
        return strand


def _have_hooks(crossings: Iterable[Crossing]) -> bool:
    """Whether users have put hooks on nodes of sends and recvs, which are not run here."""
    return hooks.on_crossings() and any(c.is_hooked for c in crossings)


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
