"""What one thread does in a direct pass (`direct.py`), and what is noted of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..errors import CallTimeout
from ..rpc.futures import CallFuture
from . import deliveries, messages
from .contexts import Context, unknown
from .desk import Desk
from .gradients import Leaf
from .messages import Failed, Plain, Trip
from .strands import Found, Strand, Strands

_DEEPEST = 16  # workers that wait for each other, one behind the other
_MOST_AHEAD = 8  # strands
_NAP = 0.05  # seconds between looks at whether the pass has failed elsewhere


class Failing(Exception):
    """The pass has failed, here or on another worker."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.message)
        self.failed = failed


class Record:
    """What a direct pass has done on one worker, should the full protocol have to go on from it."""

    __slots__ = (
        "count",
        "failed",
        "gone",
        "is_simple",
        "parked",
        "ran",
        "running",
        "strands",
    )

    def __init__(self, strands: Strands) -> None:
        self.strands = strands
        self.is_simple = strands.are_simple()
        self.count = len(strands.sends)
        """How many sends there were when it began here; later ones are no part of it."""
        self.ran: set[int] = set()
        """The sends that were run."""
        self.gone: set[int] = set()
        """The recvs whose gradients have left."""
        self.parked: dict[int, Sequence[Tensor | None]] = {}
        """The gradients of sends that are still to be run."""
        self.running = 0
        """Threads."""
        self.failed: Failed | None = None
        """Why it is over. Whoever stops because of it says so: its asker may not know."""


class Round:
    """What one thread does in a direct pass: it runs what it was given, and sees to the rest."""

    __slots__ = (
        "_ahead",
        "_answers",
        "_asked",
        "_asker",
        "_context",
        "_desk",
        "_leaving",
        "_ready",
        "_record",
        "_trip",
        "held",
        "parked",
    )

    def __init__(
        self, desk: Desk, context: Context, record: Record, trip: Trip, asker: int = -1
    ) -> None:
        self.held: list[Plain] = []
        """What there is for the asker."""
        self.parked: set[int] = set()
        """Workers that have parked something."""
        self._desk = desk
        self._context = context
        self._record = record
        self._trip = trip
        self._asker = asker
        self._ahead: dict[int, list[Leaf]] = {}  # what strands have seen to
        self._ready: list[tuple[int, Strand, list[Tensor | None]]] = []
        self._leaving: dict[int, list[Plain]] = {}
        self._asked: list[int] = []  # workers that owe an answer
        self._answers: SimpleQueue[tuple[int, CallFuture]] | None = None

    def lead(self, strand: Strand, roots: Sequence[Tensor]) -> None:
        """Run the pass from its roots."""
        gradients = [torch.ones_like(root) for root in roots]
        flags = self._trip.flags
        self._sort(strand.run_from(self._context, roots, gradients, flags))
        self._go_on()

    def answer(self, arrived: Iterable[Plain]) -> None:
        """Run what arrived, and all that follows."""
        self._take(self._asker, arrived)
        self._go_on()

    def abandon(self, failed: Failed) -> None:
        """The pass has failed: those who are still at work for us need not be.

        What they may still send here is not run.
        """
        record = self._record
        record.failed = record.failed or failed
        context, number = self._trip[:2]
        for worker in self._asked:
            message = messages.Abort(context, number, messages.pack(failed))
            self._desk.tell(worker, message)

    def _take(self, sender: int, arrived: Iterable[Plain]) -> None:
        record = self._record
        if self._is_over():
            self._stop()
        is_simple = record.is_simple and self._trip.depth < _DEEPEST
        for number, gradients in arrived:
            deliveries.check(self._context, sender, number, gradients)
            if number in record.ran or number in record.parked:
                continue  # it came twice
            strand = record.strands.get(number) if is_simple else None
            if strand is None:
                record.parked[number] = tuple(gradients)
                self.parked.add(self._desk.me)
            else:
                record.ran.add(number)
                self._ready.append((number, strand, list(gradients)))

    def _go_on(self) -> None:
        """Run what is ready, and what follows from it, here and elsewhere."""
        flags = self._trip.flags
        while True:
            while self._ready:
                number, strand, gradients = self._ready.pop()
                ahead = self._ahead.pop(number, None)
                found = strand.run(self._context, gradients, flags, ahead)
                if found:
                    self._sort(found)
            if self._is_over():
                self._stop()
            leaving = self._leaving
            if not leaving and not self._asked:
                return
            self._leaving = {}
            if self.held:  # it need not wait for others
                leaving[self._asker], self.held = self.held, []
            if len(leaving) == 1 and not self._asked:
                self._hear(*self._ask(*leaving.popitem()))
            else:
                for to, plain in leaving.items():
                    self._post(to, plain)
                self._hear(*self._next_answer())

    def _sort(self, found: Found) -> None:
        """See where the gradients of recvs have to go."""
        me = self._desk.me
        for recv, gradients in found:
            bare = deliveries.bare(gradients)
            if bare is None:
                continue
            self._record.gone.add(recv.id)
            plain = (recv.id, bare)
            to = recv.worker
            if to == self._asker:
                self.held.append(plain)
            elif to == me:
                self._take(me, (plain,))
            else:
                self._leaving.setdefault(to, []).append(plain)

    # Asking others

    def _ask(self, to: int, leaving: Sequence[Plain]) -> tuple[int, Any]:
        message = messages.direct(self._trip, leaving)
        self._asked.append(to)
        try:
            return to, self._desk.ask(to, message, self._is_over, self._look_ahead)
        except CallTimeout:
            self._stop()

    def _look_ahead(self) -> None:
        """Do what can be done while others are at work."""
        bare = self._record.strands.bare()
        if len(bare) > _MOST_AHEAD:
            return  # most of them may have no part in this pass
        for number, strand in bare:
            if number not in self._record.ran and number not in self._ahead:
                self._ahead[number] = strand.look_ahead()

    def _post(self, to: int, leaving: Sequence[Plain]) -> None:
        if self._answers is None:
            self._answers = SimpleQueue()
        future = self._desk.request(to, messages.direct(self._trip, leaving))
        self._asked.append(to)
        future.fate.seen = True
        future.on_done(partial(self._answers.put, (to, future)))

    def _next_answer(self) -> tuple[int, Any]:
        assert self._answers is not None
        while True:
            try:
                with self._desk.executor.waiting():
                    worker, future = self._answers.get(timeout=_NAP)
            except Empty:
                if self._is_over():
                    self._stop()
                continue
            return worker, future.value()

    def _hear(self, worker: int, answer: Any) -> None:
        self._asked.remove(worker)
        followed = messages.unpack_followed(answer)
        if isinstance(followed, Failed):
            raise Failing(followed)
        found, parked = followed
        self.parked.update(parked)
        self._take(worker, found)

    def _is_over(self) -> bool:
        return self._record.failed is not None or self._context.is_released

    def _stop(self) -> NoReturn:
        """Raise why the pass is over."""
        if self._context.is_released:
            raise unknown(self._context.id)
        assert self._record.failed is not None
        raise Failing(self._record.failed)
