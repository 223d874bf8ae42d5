"""What one worker has to run in one pass: the segments of its graph, and how to run one.

Knows nothing of messages or of the order in which segments are run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import islice
from typing import Any

from torch import Tensor

from . import anomaly, engine, hooks
from .actions import Piece, Plan, Slot
from .actions import Run as PieceRun
from .contexts import Context, add
from .ddp import accumulating, is_joint, replicated
from .engine import Job, Start
from .gradients import keep, keep_accumulated, kept_so_far, look_at
from .graph import Edge, Recvs, Segment, cut, merge
from .messages import ANOMALY, CREATE, QUIET
from .nodes import Crossing, Gradients, Run, Send
from .rounds import Record


class Work:
    """The sources of a pass on a worker, as they are when it is made."""

    def __init__(
        self,
        context: Context,
        start: Start,
        flags: int,
        record: Record | None = None,
        enter: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`record`: what the pass has done here directly, before this. `enter`: the context.

        Calls that a backward makes belong to it, if they are to be differentiated again.
        """
        with context.lock:
            sends, recvs = dict(context.sends), dict(context.recvs)
        if record is not None:
            known, ran, gone = (
                islice(sends.items(), record.count),
                record.ran(),
                {*record.gone},
            )
            sends = {n: send for n, send in known if n not in ran}
            recvs = {n: recv for n, recv in recvs.items() if n not in gone}
        roots = [(root.grad_fn, root.output_nr) for root in start.roots]
        self._context = context
        self._start = start
        self._flags = flags
        self._enter = enter if flags & CREATE else nullcontext
        self._segments = self._cut(roots, list(sends.values()))
        self._lock = threading.Lock()
        self.wanted: list[Tensor | None] = [None] * len(start.wanted)
        self.plan = Plan(
            [_piece(segment) for segment in self._segments],
            _slots([send.crossing for send in sends.values()]),
            _slots([recv.crossing for recv in recvs.values()]),
        )

    def has_roots(self, piece: int) -> bool:
        return bool(self._segments[piece].roots)

    def is_last(self, piece: int, recv: int) -> bool:
        """Whether a run of a piece is about to end when it comes to this recv."""
        return recv in self._segments[piece].last

    def is_whole(self, run: PieceRun) -> bool:
        """Whether a run begins at all that its piece begins at."""
        sends = self._segments[run.piece].sends
        return len(run.sends) == sum([send.count for send in sends])

    def narrow(self, piece: int, sends: Sequence[Slot]) -> list[Slot]:
        """Leave out the other sends of a piece; the recvs that are still reached."""
        with (
            self._lock
        ):  # two threads may come in either order: what is left out stays so
            whole = self._segments[piece]
            kept, parts = self._cut_to(whole, sends)
            recvs: Recvs = {}
            for part in parts:
                merge(recvs, part.recvs)
            leaves = {leaf for part in parts for leaf in part.leaves}
            ids = [recv.crossing.id for recv in recvs]
            last = {n: whole.last[n] for n in ids if n in whole.last}
            foreign = [recv for part in parts for recv in part.foreign]
            narrow = Segment(whole.roots, kept, leaves, recvs, last, foreign=foreign)
            self._segments[piece] = narrow
        return _reached(parts)

    def reach(self, piece: int, sends: Sequence[Slot]) -> list[Slot]:
        """The recvs that the roots of a piece reach, and these sends of it."""
        _, parts = self._cut_to(self._segments[piece], sends)
        return _reached(parts)

    def _cut_to(
        self, whole: Segment, sends: Sequence[Slot]
    ) -> tuple[list[Send], list[Segment]]:
        """These sends of a segment, and what it is with its roots and no others."""
        slots: dict[int, list[int]] = {}
        for number, index in sends:
            slots.setdefault(number, []).append(index)
        known = {send.crossing.id: send for send in whole.sends}
        kept = [send.only(slots[n]) for n, send in known.items() if n in slots]
        kept = [send for send in kept if send.count]
        return kept, self._cut(self._roots(whole), kept)

    def _cut(self, roots: Sequence[Edge], sends: Sequence[Send]) -> list[Segment]:
        return cut(roots, sends, self._context.id, is_joint, replicated)

    def execute(
        self, piece: int, run: Run, given: dict[int, Gradients] | None
    ) -> Sequence[tuple[Crossing, Gradients]]:
        """Run a piece, and keep the gradients of its leaves; those of recvs not yet delivered.

        `given`: the gradients of its sends, if they are all there.

        Raises:
            Exception: whatever a backward or a hook raises.
        """
        with self._enter():
            if not self._flags & ANOMALY:
                return self._execute(piece, run, given)
            with anomaly.explained(self._sources(piece), run, self._flags):
                return self._execute(piece, run, given)

    def _sources(self, piece: int) -> list[Any]:
        segment = self._segments[piece]
        roots = [node for node, _ in self._roots(segment)]
        return [*roots, *(send.node for send in segment.sends)]

    def _roots(self, segment: Segment) -> list[Edge]:
        roots = [self._start.roots[index] for index in segment.roots]
        return [(root.grad_fn, root.output_nr) for root in roots]

    def _execute(
        self, piece: int, run: Run, given: dict[int, Gradients] | None
    ) -> Sequence[tuple[Crossing, Gradients]]:
        segment, start = self._segments[piece], self._start
        if given is not None and _is_hooked(segment):
            given = None
        if segment.is_bare and given is not None and self._keep_bare(segment, given):
            return ()
        roots = [(start.roots[i], start.gradients[i]) for i in segment.roots]
        replicas = () if self._flags & QUIET else replicated(segment.leaves)
        if replicas:
            job = Job(roots, segment, (), self._flags, None)
            known = partial(kept_so_far, self._context)
            kept = partial(keep_accumulated, self._context, self._flags)
            with accumulating(replicas, segment.leaves, known, kept, run.is_over):
                engine.accumulate(job, run)
            return ()
        job = Job(roots, segment, start.wanted, self._flags, given)
        found = engine.execute(job, run)
        if run.is_over():  # nobody waits for it any more
            return ()
        if found.leaves:
            keep(self._context, look_at(segment.leaves), found.leaves, self._flags)
        for index, gradient in enumerate(found.wanted):
            if gradient is not None:
                with self._lock:
                    before = self.wanted[index]
                    total = gradient if before is None else add(before, gradient)
                    self.wanted[index] = total
        return found.recvs

    def _keep_bare(self, segment: Segment, given: dict[int, Gradients]) -> bool:
        """Keep the gradients of leaves that were sent as they are; False: the engine is needed."""
        (send,) = segment.sends
        nodes = [node for node, _ in send.edges]
        if (
            len(segment.leaves) < len(nodes)
            or self._start.wanted
            or self._flags & QUIET
            or any(hooks.of_tensor(node.variable) for node in nodes)
            or replicated(nodes)
        ):
            return False
        gradients = list(send.pick(given.pop(send.crossing.id)))
        keep(self._context, look_at(nodes), gradients, self._flags)
        return True


def _is_hooked(segment: Segment) -> bool:
    """Whether the nodes of its sends and recvs have to be run, for the sake of their hooks."""
    return any(send.crossing.is_hooked for send in segment.sends) or any(
        recv.crossing.is_hooked for recv in segment.recvs
    )


def _slots(crossings: Iterable[Crossing]) -> dict[Slot, int]:
    """The tensors of these messages, and the workers at the other ends."""
    return {(c.id, i): c.worker for c in crossings for i in range(c.count)}


def _piece(segment: Segment) -> Piece:
    sends = [(s.crossing.id, i) for s in segment.sends for i in range(s.count)]
    return Piece(tuple(sends), tuple(_reached([segment])), bool(segment.roots))


def _reached(segments: Iterable[Segment]) -> list[Slot]:
    recvs = [pair for segment in segments for pair in segment.recvs.items()]
    return [(node.crossing.id, i) for node, indexes in recvs for i in sorted(indexes)]
