"""What one thread does in a direct pass (`direct.py`), and what is noted of it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
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
from .messages import Failed, Plain, Trip
from .strands import Ahead, BareStrand, Found, Reach, Strand, Strands

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

    running = 1
    """Threads."""
    failed: Failed | None = None
    """Why it is over. Whoever stops because of it says so: its asker may not know."""

    def __init__(self, strands: Strands) -> None:
        self.strands = strands
        self.is_simple = strands.are_simple()
        self.count = len(strands.sends)
        """How many sends there were when it began here; later ones are no part of it."""
        self.given: dict[int, Sequence[Tensor | None] | None] = {}
        """The sends that gradients came for, and these, if they are still to be run."""
        self.gone: list[int] = []
        """The recvs whose gradients have left."""

    @property
    def ran(self) -> set[int]:
        """The sends that were run."""
        return {number for number, parked in self.given.items() if parked is None}

    @property
    def parked(self) -> dict[int, Sequence[Tensor | None]]:
        """The gradients of sends that are still to be run."""
        given = self.given.items()
        return {number: parked for number, parked in given if parked is not None}


class Round:
    """What one thread does in a direct pass: it runs what it was given, and sees to the rest.

    What most rounds do not need is made when it is.
    """

    parked: Collection[int] = ()
    """Workers that have parked something."""
    _ahead: dict[int, Ahead] | None = None  # what strands have seen to
    _answers: SimpleQueue[tuple[int, CallFuture]] | None = None

    def __init__(
        self, desk: Desk, context: Context, record: Record, trip: Trip, asker: int = -1
    ) -> None:
        self._desk = desk
        self._context = context
        self._record = record
        self._trip = trip
        self._asker = asker
        self._ready: list[tuple[int, Strand | BareStrand, list[Tensor | None]]] = []
        self._leaving: dict[int, list[Plain]] = {}  # for the asker, too
        self._asked: list[int] = []  # workers that owe an answer

    def lead(self, reach: Reach, roots: Sequence[Tensor]) -> None:
        """Run the pass from its roots."""
        gradients = [torch.ones_like(root) for root in roots]
        flags = self._trip.flags
        self._sort(reach.run_from(self._context, tuple(roots), gradients, flags))
        self._go_on()

    def answer(self, arrived: Iterable[Plain]) -> Sequence[Plain]:
        """Run what arrived, and all that follows; what there is for the asker."""
        self._take(self._asker, arrived)
        self._go_on()
        return self._leaving.get(self._asker, ())

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

    def _go_on(self) -> None:
        """Run what is ready, and what follows from it, here and elsewhere."""
        context, record, ready = self._context, self._record, self._ready
        while record.failed is None and not context.is_released:
            if ready:
                number, strand, gradients = ready.pop()
                ahead = None if self._ahead is None else self._ahead.get(number)
                found = strand.run(context, gradients, self._trip.flags, ahead)
                if found:
                    self._sort(found)
            elif self._asked or len(self._leaving) > (self._asker in self._leaving):
                self._hear(*self._ask())
            else:
                return
        self._stop()

    def _take(self, sender: int, arrived: Iterable[Plain]) -> None:
        """See what the gradients that came are for."""
        record = self._record
        given, strands = record.given, record.strands
        is_simple = record.is_simple and self._trip.depth < _DEEPEST
        for number, gradients in arrived:
            strand = strands.get(number, sender, len(gradients)) if is_simple else None
            if strand is None:
                self._park(sender, number, gradients)
            elif number not in given:  # or it came twice
                given[number] = None
                self._ready.append((number, strand, [*gradients]))

    def _park(
        self, sender: int, number: int, gradients: Sequence[Tensor | None]
    ) -> None:
        """Keep gradients for whoever goes on."""
        if self._is_over():
            self._stop()
        deliveries.check(self._context, sender, number, gradients)
        if number not in self._record.given:
            self._record.given[number] = tuple(gradients)
            self._note_parked((self._desk.me,))

    def _sort(self, found: Found) -> None:
        """See where the gradients of recvs have to go."""
        for recv, gradients in found:
            bare = deliveries.bare(gradients)
            if bare is None:
                continue
            number, to = recv.id, recv.worker
            self._record.gone.append(number)
            if to == self._desk.me:
                self._take(to, ((number, bare),))
            elif to in self._leaving:
                self._leaving[to].append((number, bare))
            else:
                self._leaving[to] = [(number, bare)]

    def _note_parked(self, workers: Iterable[int]) -> None:
        self.parked = {*self.parked, *workers}

    # Asking others

    def _ask(self) -> tuple[int, Any]:
        """Send what leaves, that for the asker with it; a worker that has answered, and what."""
        leaving, self._leaving = self._leaving, {}
        if len(leaving) > 1 or self._asked:
            for to, plain in leaving.items():
                self._post(to, plain)
            return self._next_answer()
        ((to, plain),) = leaving.items()
        message = messages.direct(self._trip, plain)
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
        ahead = self._ahead = self._ahead or {}
        for number, strand in bare:
            if number not in self._record.given and number not in ahead:
                ahead[number] = strand.look_ahead()

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
        if parked:
            self._note_parked(parked)
        self._take(worker, found)

    def _is_over(self) -> bool:
        return self._record.failed is not None or self._context.is_released

    def _stop(self) -> NoReturn:
        """Raise why the pass is over."""
        if self._context.is_released:
            raise unknown(self._context.id)
        assert self._record.failed is not None
        raise Failing(self._record.failed)
