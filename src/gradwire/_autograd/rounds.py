"""What one thread does in a direct pass (`tree_pass.py`), and what is noted of it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, NoReturn

from torch import Tensor
from torch.autograd.graph import GradientEdge

from .._rpc.futures import CallFuture
from ..errors import CallTimeout, ProtocolError
from . import deliveries, messages
from .contexts import Context, unknown
from .deliveries import bare, copied
from .desk import Desk
from .engine import call, make_ones_ahead
from .gradients import keep, look_at
from .messages import NO_SHORTCUTS, Failed, Plain, Shortcuts, Trip
from .nodes import Crossing, Gradients
from .strands import Ahead, BareStrand, Reach, Strand, Strands

_MOST_AHEAD = 8  # strands
_NAP = 0.05  # seconds between looks at whether the pass has failed elsewhere


class Failing(Exception):
    """The pass has failed, here or on another worker."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.message)
        self.failed = failed


class Record:
    """What a direct pass has done on one worker, should the full protocol have to go on from it."""

    failed: Failed | None = None
    """Why it is over. Whoever stops because of it says so: its asker may not know."""

    def __init__(self, strands: Strands) -> None:
        self.strands = strands
        self.is_simple = strands.are_simple()
        self.count = len(strands.sends)
        """How many sends there were when it began here; later ones are no part of it."""
        self.given: dict[int, Sequence[Tensor | None] | None] = {}
        """The sends that gradients came for, and these, if they are still to be run."""
        self.running = [True]
        """One for each thread: that is changed in one step, and needs no lock."""
        self.gone: list[int] = []
        """The recvs whose gradients have left."""

    def ran(self) -> set[int]:
        """The sends that were run."""
        return self.given.keys() - self.parked()

    def parked(self) -> dict[int, Sequence[Tensor | None]]:
        """The gradients of sends that are still to be run."""
        given = [(number, self.given[number]) for number in list(self.given)]
        return {number: parked for number, parked in given if parked is not None}


class Round:
    """What one thread does in a direct pass: it runs what it was given, and sees to the rest."""

    parked: Collection[int] = ()
    """Workers that have parked something."""
    shortcuts: Shortcuts = NO_SHORTCUTS
    """Those of the asker."""
    taken: Sequence[int] = ()
    """Those of them that were taken."""
    _ahead: Mapping[int, Ahead] = {}  # what strands have seen to
    _back: Sequence[Plain] = ()  # what the asker would send back as it is
    _answers: SimpleQueue[tuple[int, CallFuture]] | None = None

    def __init__(
        self, desk: Desk, context: Context, record: Record, trip: Trip, asker: int = -1
    ) -> None:
        self.leaving: dict[int, list[Plain]] = {}
        """By worker; in the end, what there is for the asker."""
        self._desk = desk
        self._context = context
        self._record = record
        self._trip = trip
        self._asker = asker
        self._asked: list[int] = []  # workers that owe an answer

    def run(
        self,
        reach: Reach,
        ends: tuple[Tensor | GradientEdge, ...],
        gradients: list[Any],
    ) -> None:
        """Run what is reached from these ends. Empties the list.

        Raises:
            Exception: whatever a backward or a hook raises.
        """
        if not ends or not reach.inputs:
            return
        flags = self._trip.flags
        captured = call(ends, gradients, reach.inputs, flags)
        if self._is_over():  # nobody waits for it any more
            self._stop()
        if reach.leaves:
            count = len(reach.leaves)
            of_leaves, captured = [*captured[:count]], captured[count:]
            keep(self._context, look_at(reach.leaves), of_leaves, flags)
        self._see_off(reach.recvs, captured)

    def _see_off(self, recvs: Iterable[Crossing], captured: Gradients) -> None:
        """See where the gradients of these have to go."""
        at = 0
        for recv in recvs:
            end = at + recv.count
            found = bare(captured[at:end])
            at = end
            if found is not None:
                number = recv.id
                self._record.gone.append(number)
                if number in self.shortcuts:
                    self.taken = (*self.taken, number)
                    self._back = (*self._back, (self.shortcuts[number], found))
                    continue
                self.leaving.setdefault(recv.worker, []).append((number, found))

    def follow(self, sender: int, arrived: list[Plain]) -> None:
        """Run what came from a worker, and all that follows from it. Empties the list."""
        record, context, leaving = self._record, self._context, self.leaving
        given, is_fresh = record.given, True
        while record.failed is None and not context.is_released:
            if arrived:
                number, gradients = arrived.pop()
                strand = record.strands.get(number, sender, len(gradients))
                if strand is None:
                    parked = gradients if is_fresh else copied(gradients)
                    self.park(sender, number, parked)
                elif number not in given:  # or it came twice
                    given[number] = None
                    gradients = [*gradients]  # nobody else has them now
                    self._run_strand(strand, gradients, is_fresh=is_fresh)
            elif self._back:
                sender, arrived, self._back = self._asker, [*self._back], ()
                is_fresh = False
            elif self._asked or len(leaving) > (self._asker in leaving):
                sender, arrived = self._ask()
                is_fresh = sender != self._desk.me
            else:
                return
        self._stop()

    def _run_strand(
        self,
        strand: Strand | BareStrand | None,
        gradients: list[Tensor | None],
        *,
        is_fresh: bool,
    ) -> None:
        """Run a strand. Its gradients are fresh if they came by a message."""
        if isinstance(strand, Strand) and strand.passes_on():
            self._see_off(strand.recvs, tuple(gradients))
            return
        if not is_fresh:  # others may have the same memory
            gradients[:] = copied(gradients)
        if isinstance(strand, BareStrand):
            flags = self._trip.flags
            strand = strand.keep(self._context, gradients, flags, self._ahead)
        if strand is not None:
            self.run(strand, strand.ends(gradients), gradients)

    def park(
        self, sender: int, number: int, gradients: Sequence[Tensor | None]
    ) -> None:
        """Keep gradients for whoever goes on."""
        if self._is_over():
            self._stop()
        deliveries.check(self._context, sender, number, gradients)
        if number not in self._record.given:
            self._record.given[number] = tuple(gradients)
            self._note_parked((self._desk.me,))

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

    def _note_parked(self, workers: Iterable[int]) -> None:
        self.parked = {*self.parked, *workers}

    # Asking others

    def _ask(self) -> tuple[int, list[Plain]]:
        """Send what leaves, that for the asker with it; what came from whom."""
        leaving, me = self.leaving, self._desk.me
        if me in leaving:
            return me, leaving.pop(me)
        shortcuts = NO_SHORTCUTS
        if len(leaving) > 1 or self._asked:
            to, answer = self._ask_several()
        else:
            to, plain = leaving.popitem()
            shortcuts = self._record.strands.shortcuts(to, self._record.given)
            message = messages.direct(self._trip, plain, shortcuts)
            try:
                answer = self._desk.ask(to, message, self._is_over, self._look_ahead)
            except BaseException as error:
                self._asked.append(to)
                if isinstance(error, CallTimeout):
                    self._stop()
                raise
        followed = messages.unpack_followed(answer)
        if isinstance(followed, Failed):
            raise Failing(followed)
        found, parked, taken = followed
        if taken:
            self._note_taken(taken, shortcuts)
        if parked:
            self._note_parked(parked)
        return to, found

    def _note_taken(self, taken: Iterable[int], shortcuts: Shortcuts) -> None:
        """Gradients have passed these sends by, and the recvs behind them."""
        for number in taken:
            if number not in shortcuts:
                raise ProtocolError(f"send {number} was not to be passed by")
            self._record.given[number] = None
            self._record.gone.append(shortcuts[number])

    def _look_ahead(self) -> None:
        """Do what can be done while others are at work."""
        make_ones_ahead()
        bare = self._record.strands.bare()
        if len(bare) > _MOST_AHEAD:
            return  # most of them may have no part in this pass
        given, ahead = self._record.given, {**self._ahead}
        for number, strand in bare:
            if number not in given and number not in ahead:
                ahead[number] = strand.look_ahead()
        self._ahead = ahead

    def _ask_several(self) -> tuple[int, Any]:
        """Ask without waiting; the first answer there is."""
        if self._answers is None:
            self._answers = SimpleQueue()
        while self.leaving:
            to, plain = self.leaving.popitem()
            future = self._desk.request(to, messages.direct(self._trip, plain))
            self._asked.append(to)
            future.fate.seen = True
            future.on_done(partial(self._answers.put, (to, future)))
        while True:
            try:
                with self._desk.executor.waiting():
                    worker, future = self._answers.get(timeout=_NAP)
            except Empty:
                if self._is_over():
                    self._stop()
                continue
            self._asked.remove(worker)
            return worker, future.value()

    def _is_over(self) -> bool:
        return self._record.failed is not None or self._context.is_released

    def _stop(self) -> NoReturn:
        """Raise why the pass is over."""
        if self._context.is_released:
            raise unknown(self._context.id)
        assert self._record.failed is not None
        raise Failing(self._record.failed)
