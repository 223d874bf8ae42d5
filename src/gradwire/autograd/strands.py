"""The graph of a context on one worker, where it is simple: what each send reaches by itself.

A *strand* is what one source reaches and no other does, but for leaves. It can be run as soon as
the gradients of its source are there; nothing else has to be known (`direct.py`). Unlike segments
(`graph.py`), strands are found once for all passes, until something more is sent.

Large graphs count as not simple. They take long to run, so gradients should leave while the rest is
still running; and what a pass costs besides does not matter there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge

from . import engine, replicas
from .contexts import Context
from .gradients import keep
from .graph import SMALL, Walk, check_context, walk
from .nodes import Crossing, Gradients, Send


class Strand:
    """What one source reaches: leaves and recvs, by their nodes."""

    __slots__ = ("_ends", "_inputs", "_is_bare", "_leaves", "_recvs")

    def __init__(
        self, ends: Sequence[Any], leaves: Collection[Any], recvs: Sequence[Any]
    ) -> None:
        self._ends = ends  # where gradients go in
        self._leaves = leaves
        self._recvs: list[Crossing] = [node.crossing for node in recvs]
        self._is_bare = False
        inputs = [GradientEdge(node, 0) for node in leaves]
        for node in recvs:
            inputs += [GradientEdge(node, i) for i in range(node.crossing.count)]
        self._inputs = tuple(inputs)

    @classmethod
    def of_send(cls, send: Send, found: Walk, index: int) -> Strand:
        """What a send reaches, which was walked as this one of the sources."""
        ends = [GradientEdge(*edge) for edge in send.node.next_functions]
        strand = cls(ends, found.leaves[index], found.recvs[index])
        # Leaves that were sent as they are, each once, need no engine.
        strand._is_bare = found.sizes[index] == 1 and len(strand._leaves) == len(ends)
        return strand

    def run(
        self, context: Context, gradients: list[Tensor | None], flags: int
    ) -> list[tuple[Crossing, Gradients]]:
        """Run it, and keep the gradients of its leaves; those of its recvs. Empties the list.

        Raises:
            Exception: whatever a backward or a hook raises.
        """
        if self._is_bare and not any(n.variable._backward_hooks for n in self._leaves):
            keep(context, [end.node for end in self._ends], gradients, flags)
            return []
        ends, given = [], []
        for end, gradient in zip(self._ends, gradients, strict=True):
            if gradient is not None:
                ends.append(end)
                given.append(gradient)
        del gradient
        gradients.clear()
        return self.run_from(context, ends, given, flags)

    def run_from(
        self,
        context: Context,
        ends: Sequence[GradientEdge | Tensor],
        gradients: list[Tensor],
        flags: int,
    ) -> list[tuple[Crossing, Gradients]]:
        """As `run`, from these ends of it."""
        if not self._inputs or not ends:
            return []
        captured = engine.call(ends, gradients, self._inputs, flags)
        at = len(self._leaves)
        found = []
        for recv in self._recvs:
            found.append((recv, captured[at : at + recv.count]))
            at += recv.count
        if self._leaves:
            of_leaves = list(captured[: len(self._leaves)])
            del captured  # what nobody else has need not be copied
            keep(context, self._leaves, of_leaves, flags)
        return found

    def is_hooked(self) -> bool:
        """Whether users have put hooks on the nodes of its recvs, which are not run here."""
        return any(recv.is_hooked for recv in self._recvs)


class Strands:
    """Those of one context on one worker, as it is now."""

    def __init__(self, sends: Mapping[int, Send], context: int) -> None:
        self._context = context
        self.sends = sends
        self._strands: dict[int, Strand] = {}
        self._walk = Walk()
        self._leaves: set[Any] = set()
        self._shared: set[Any] = set()  # the leaves that several sends reach
        self._is_small = walk([s.node for s in sends.values()], self._walk, SMALL)
        if self._is_small:
            self._sort()

    def _sort(self) -> None:
        check_context(self._walk, self._context)
        tied = set(chain.from_iterable(self._walk.links))
        for index, (number, send) in enumerate(self.sends.items()):
            leaves = self._walk.leaves[index]
            self._shared |= self._leaves & leaves
            self._leaves |= leaves
            if index not in tied:
                self._strands[number] = Strand.of_send(send, self._walk, index)

    def are_simple(self) -> bool:
        """Whether they can be run one by one, as far as leaves are concerned."""
        if not self._is_small or replicas.known():
            return False
        return not any(map(replicas.is_joint, self._shared))

    def get(self, number: int) -> Strand | None:
        """The strand of a send; None: it is not that simple."""
        strand = self._strands.get(number)
        if strand is None or self.sends[number].crossing.is_hooked:
            return None
        return None if strand.is_hooked() else strand

    def of_roots(self, roots: Sequence[Tensor]) -> Strand | None:
        """What roots reach, as one strand; None: it is not that simple."""
        found = Walk()
        if not walk([root.grad_fn for root in roots], found, SMALL):
            return None
        check_context(found, self._context)
        if not self._walk.owner.keys().isdisjoint(found.owner):
            return None
        leaves = set().union(*found.leaves)
        if any(map(replicas.is_joint, leaves & self._leaves)):
            return None
        strand = Strand((), leaves, list(chain.from_iterable(found.recvs)))
        return None if strand.is_hooked() else strand


def strands_of(context: Context) -> Strands:
    """The strands of a context."""
    known: Strands | None = context.strands
    if known is None or len(known.sends) != len(context.sends):
        with context.lock:
            sends = dict(context.sends)
        known = context.strands = Strands(sends, context.id)
    return known
