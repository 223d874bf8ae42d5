"""Runs the segments of one worker in one pass, and keeps the gradients of its leaves.

Knows nothing of messages or of the order in which segments run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import GradientEdge

from . import anomaly, ddp, engine, hooks
from .contexts import Context, Contexts, add
from .ddp import accumulating, replicated
from .engine import Job
from .gradients import (
    Leaf,
    keep,
    keep_accumulated,
    keep_plain,
    kept_so_far,
    look_at,
)
from .messages import ANOMALY, CREATE, QUIET, RETAIN
from .nodes import Crossing, Edge, Gradients, Run
from .pass_state import ROOTS, Indexes
from .segments import Plan, Reach, Segment, lift

Given = dict[int, Sequence["Tensor | None"]]
"""The gradients that came for messages, by send."""


class Start(NamedTuple):
    """Where a pass begins: roots, and their gradients (None: ones)."""

    roots: Sequence[Tensor] = ()
    gradients: Sequence[Tensor | None] = ()
    wanted: Sequence[GradientEdge] = ()
    """What else to get the gradients of."""

    def edges(self) -> list[Edge]:
        return [(root.grad_fn, root.output_nr) for root in self.roots]

    def pairs(self) -> list[tuple[Tensor, Tensor | None]]:
        return [*zip(self.roots, self.gradients, strict=True)]


class SegmentRunner:
    """For one pass on one worker."""

    def __init__(
        self, contexts: Contexts, context: Context, plan: Plan, start: Start, flags: int
    ) -> None:
        self.wanted: list[Tensor | None] = [None] * len(start.wanted)
        self._contexts = contexts
        self._context = context
        self._plan = plan
        self._start = start
        self._flags = flags

    def reach(self, sources: Mapping[int, Indexes]) -> Reach | Segment:
        """What these slots of the sources of one segment reach."""
        return self._plan.reach(sources, self._start.edges)[1]

    def run(
        self, sources: Mapping[int, Indexes], given: Given | None, run: Run
    ) -> Sequence[tuple[Crossing, Gradients]]:
        """Run a segment from these sources; returns the gradients of recvs that were not delivered.

        `given`: the gradients of its sends, if all have arrived.

        Raises:
            Exception: whatever a backward or a hook raises.
        """
        if given and self._keep_bare(sources, given):
            return ()
        flags = self._flags
        if not flags & (ANOMALY | CREATE):
            return self._run(sources, given, run)
        # Calls that a backward makes belong to the context if they are to be differentiated again.
        context = self._context
        with self._contexts.entered(context) if flags & CREATE else nullcontext():
            if not flags & ANOMALY:
                return self._run(sources, given, run)
            sends, _ = self._plan.reach(sources, self._start.edges)
            nodes = [send.node for send in sends]
            if ROOTS in sources:
                nodes += [root.grad_fn for root in self._start.roots]
            with anomaly.explained(nodes, run, flags):
                return self._run(sources, given, run)

    def _run(
        self, sources: Mapping[int, Indexes], given: Given | None, run: Run
    ) -> Sequence[tuple[Crossing, Gradients]]:
        flags = self._flags
        sends, reach = self._plan.reach(sources, self._start.edges)
        recvs = [*reach.recvs]
        leaves = () if flags & QUIET else [*reach.leaves]
        replicas = replicated(leaves) if leaves else ()
        if replicas or (hooks.on_crossings and _are_hooked([*sends, *recvs])):
            given = None
        if given is None:
            sends = [send.only(sources[send.crossing.id]) for send in sends]
            if len(sources) > 1 and sends:
                lift(reach.nodes, sends[-1].place)
        roots = self._start.pairs() if ROOTS in sources else ()
        size, wanted = len(reach.nodes), self._start.wanted
        job = Job(roots, sends, given, size, leaves, wanted, recvs, flags)
        if replicas:
            known = partial(kept_so_far, self._context)
            kept = partial(keep_accumulated, self._context, flags)
            with accumulating(replicas, leaves, known, kept, run.is_over):
                engine.accumulate(job, run)
            return ()
        of_leaves, of_wanted, of_recvs = engine.execute(job, run)
        if run.is_over():  # no thread waits for it any more
            return ()
        if leaves:
            keep(self._context, look_at(leaves), of_leaves, flags)
        for index, gradient in enumerate(of_wanted):
            if gradient is not None:
                self._add_wanted(index, gradient)
        return of_recvs

    def _add_wanted(self, index: int, gradient: Tensor) -> None:
        with self._context.lock:
            before = self.wanted[index]
            self.wanted[index] = gradient if before is None else add(before, gradient)

    def _keep_bare(self, sources: Mapping[int, Indexes], given: Given) -> bool:
        """Keep the gradients of leaves that were sent as they are; False: the engine is needed."""
        source = next(iter(sources))
        segment = self._plan.segment(source)
        if segment is None or not segment.is_bare or self._start.wanted or ddp.known():
            return False
        (send,) = segment.sends
        if hooks.were_made() or not send.leaves:
            leaves = look_at([node for node, _ in send.edges])
            if any(hooks.of_tensor(leaf.tensor) for leaf in leaves):
                return False
            if send.crossing.is_hooked:
                return False
        elif self._flags & ~RETAIN:
            leaves = [Leaf(leaf, (), ()) for leaf in send.leaves]
        else:
            keep_plain(self._context, send.leaves, given.pop(source))
            return True
        gradients = [*given.pop(source)]
        if not self._flags & QUIET:
            keep(self._context, leaves, gradients, self._flags, are_ours=True)
        return True


def _are_hooked(ends: Iterable[Any]) -> bool:
    """Whether nodes of sends and recvs have to run because of their hooks."""
    return any(end.crossing.is_hooked for end in ends)
