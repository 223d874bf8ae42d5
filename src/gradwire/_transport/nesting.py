"""One end of a lane, where calls may come back inside a call: both go by the same lane.

A thread that runs a request of a lane and calls its sender back, synchronously, asks by that same
lane: the thread that asked it is reading there already, so nobody has to be woken at the other end.
That one hands the request to a pooled thread, sleeps while it runs, and then reads on. So at each
end the innermost of the waiting threads reads, and it alone spins. Nothing is run in a thread that
waits: what is run does not see its modes and locks, and its own timeout goes on.

    worker0: A asks ·· A hands over → B runs, asks ·· B reads the answer, answers → A reads on ··
    worker1:  T runs, asks ······················ T hands over → T' runs, answers  ·· T answers

Where a call back is expected, B looks in A's stead from the start (`stand_ins.py`).

Each end numbers what it asks, so an answer is told from a request by its kind and finds who asked.

Whoever gives up leaves a lane on which the two ends do not agree any more who waits for whom: it is
*tangled*. While it is, nothing more is asked back by it from this end, and the poller reads it
whenever no thread does. What is under way comes to its end: late answers are dropped by their
number, requests are run in threads of their own. These hold, so that everything is read:

* Answers are handed out by the reader as such: who takes over from it has missed nothing.
* Who waits without reading (its request is run by B, or another one reads) is rung when that ends.
  If it is not within moments, the poller is asked to look, too.
* Letters are expected by the one who reads, and not any more when it sleeps or lets go of that; or
  by B, for A, before B answers: it gives A the role of reading, and then rings it.
* A thread leaves its question before it answers its own request. So when the connector's end has
  its answer, all that the acceptor's end asked before has arrived and is counted (`_jobs`), and
  nothing is asked afterwards. A lane with anything left to come is not used again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from functools import partial

from .._wire.frames import Frame, Parcel
from ..errors import ProtocolError
from .base import IsOver
from .busy_poll import Spin
from .endpoint import BROKEN, Station
from .framed_socket import Stream
from .questions import ANSWERS, MOMENT, Limit, Question, here
from .stand_ins import ALONE, Duty, StandIns

log = logging.getLogger("gradwire")

_PATIENCE = 0.005  # seconds after which a nested request counts as a long one


class LaneEnd(StandIns):
    """What both ends of a lane do: ask, answer, and read for all who wait here."""

    def __init__(self, station: Station, stream: Stream, peer: int) -> None:
        super().__init__(station, stream, peer)
        self._answer = station.receiver.answer
        self._write = stream.writer.write
        self._writing = threading.Lock()
        self._asked = 0  # the last question's number

    @property
    def is_settled(self) -> bool:
        """Whether nothing more is to come from either side."""
        return not (self._owed or self._jobs or self._stand_ins or self._error)

    # Asking

    def ask_back(
        self, parcel: Parcel, deadline: float | None, is_over: IsOver | None
    ) -> Frame | None:
        """Ask the sender of the request that this thread runs; None: not by this lane.

        Raises:
            TimeoutError, EOFError, OSError, ProtocolError: as `wait_for`.
        """
        if self._error or not self._writing.acquire(timeout=MOMENT):
            return None
        question = Question()
        try:
            try:
                if self._tangled:
                    return None
                self.send(question, parcel, deadline)
            finally:
                self._writing.release()
            limit = Limit(deadline, is_over)
            return self.wait_for(question, parcel, limit, self._station.spin)
        finally:
            self.leave(question)

    def send(self, question: Question, parcel: Parcel, deadline: float | None) -> None:
        """Send a request. The caller may write; it reads here from now on, if nobody does."""
        if self._take_role(question):
            self._stream.expect()
        self._asked += 2
        number = self._asked + (parcel.meanwhile is not None)  # odd: nobody reads yet
        self._questions[number] = question
        try:
            self._write(number, parcel, deadline)
        except BaseException as error:
            del self._questions[number]
            self.fail(error)
            raise
        question.number = number

    def wait_for(
        self, question: Question, parcel: Parcel, limit: Limit, spin: Spin | None
    ) -> Frame:
        """The answer to a request that has just been sent.

        Raises:
            TimeoutError: not in time, or it is over.
            EOFError, OSError, ProtocolError: the lane is of no more use.
        """
        # Who has something to do meanwhile does it itself, and is not called back.
        habit = parcel.habit if parcel.meanwhile is None else None
        is_expected = question.depth in habit if habit else False
        if not (is_expected and self._call_stand_in(question, parcel, spin)):
            parcel.was_sent()
        with self._station.executor.waiting():
            if spin is not None and self._has_role(question):
                self._catch(question, spin)
            while question.answer is None:
                is_served = question.jobs or question.duty is not None
                if is_served and not self._has_role(question):
                    self._rest(question, limit, _PATIENCE)
                elif self._take_role(question):
                    self._read_for(question, limit, spin)
                else:
                    self._rest(question, limit, 0.0)
        if question.was_called_back is not is_expected and habit is not None:
            (habit.discard if is_expected else habit.add)(question.depth)
        return question.answer

    def leave(self, question: Question) -> None:
        """The thread that asked goes on, with an answer or without."""
        number = question.number
        gives_up = number and (question.answer is None or question.jobs > 0)
        self._dismiss_stand_in(question)
        if gives_up:
            with self._lock:  # from now on it is not given the role any more
                self._tangled = True
                self._owed.add(number)
            if self._questions.pop(number, None) is None:
                self._owed.discard(number)  # it is answered, or just being
        if self._has_role(question):
            self._stream.cease()
            self._let_go()
        if gives_up:
            self._look()  # for what was read and not seen to

    def _catch(self, question: Question, spin: Spin) -> None:
        """With the role: take the answer if it comes soon and alone, as most do."""
        frames, requests = self._frames, None
        try:
            self._stream.look(spin, ALONE)
            is_it = len(frames) == 1 and frames[0].call == question.number
            if is_it and frames[0].kind in ANSWERS:
                del self._questions[question.number]
                question.answer = frames.popleft()
            else:
                requests = self._take_in(question)
        except BROKEN as error:
            self.fail(error)
            raise
        finally:
            self._let_go()
        if requests:
            self._start(requests, question)

    def _read_for(self, question: Question, limit: Limit, spin: Spin | None) -> None:
        """With the role: read until there is the answer, or a request."""
        requests: list[Frame] = []
        try:
            while question.answer is None and not requests:
                if self._error is not None:
                    raise EOFError(str(self._error))
                self._stream.expect()
                if spin is None or not self._stream.look(spin, ALONE):
                    try:
                        self._stream.read(limit.next())
                    except TimeoutError:
                        limit.check()
                requests = self._take_in(question)
        except TimeoutError:
            raise
        except BROKEN as error:
            self.fail(error)
            raise
        finally:
            self._let_go()
        self._start(requests, question)

    def _rest(self, question: Question, limit: Limit, patience: float) -> None:
        """Sleep until rung: another thread reads, or runs what came."""
        if question.bell.wait(patience):
            return
        self._dismiss_stand_in(question)
        if self._has_role(question):
            return  # perhaps it was given the role, and who did has other things to do
        with self._lock:
            self._resting += 1
        try:
            self._look()
            if question.answer is not None:
                return
            if self._error is not None:
                raise EOFError(str(self._error))
            if not question.bell.wait(limit.nap()):
                limit.check()
        finally:
            with self._lock:
                self._resting -= 1

    # Answering

    def run(self, frame: Frame) -> Parcel:
        """Run a request; its answer."""
        here.lane = None if frame.call & 1 else self
        try:
            return self._answer(self.peer, frame)
        finally:
            here.lane = None

    def reply(self, number: int, parcel: Parcel, asker: Question | None = None) -> None:
        """Answer a request; `asker` handed it over, and may have to read what follows."""
        with self._writing:
            # Nobody reads while a small one is written. A large one may have to wait for that.
            if asker is not None and parcel.is_small:
                self._give_role(asker)
            self._write(number, parcel)

    def _start(self, requests: Iterable[Frame], asker: Question | None) -> None:
        """Have requests run that were taken in, each in a thread for it alone."""
        for frame in requests:
            try:
                self._station.hosts.run(partial(self._run_apart, [frame], asker))
            except Exception as error:  # no more threads
                self.fail(error)
                self._job_ended(asker)
                raise

    def _run_apart(self, only: list[Frame], asker: Question | None) -> None:
        """In a thread for it alone: run a request and answer it."""
        here.depth = 0 if asker is None else asker.depth + 1
        try:
            frame = only.pop()
            number, parcel = frame.call, self.run(frame)
            del frame  # its memory goes back before the caller goes on
            self.reply(number, parcel, asker)
        except BaseException as error:
            self.fail(error)
            if not isinstance(error, BROKEN):
                raise
            return
        finally:
            here.depth = 0
            self._job_ended(asker)
        parcel.was_sent()  # at last: who asked wakes up meanwhile

    def _job_ended(self, asker: Question | None) -> None:
        with self._lock:
            self._jobs -= 1
            if asker is not None:
                asker.jobs -= 1
            is_last = self._over and not self._is_used
        if asker is not None:
            asker.bell.ring()
        self._see_whether_over(is_last=is_last)

    def _stood_in(self, duty: Duty) -> None:
        with self._lock:
            self._stand_ins.discard(duty)
            is_last = self._over and not self._is_used
        self._see_whether_over(is_last=is_last)

    @property
    def _is_used(self) -> bool:
        """Whether threads use the lane besides those that ask by it; with the lock."""
        return self._jobs > 0 or bool(self._stand_ins)

    def _see_whether_over(self, *, is_last: bool) -> None:
        if is_last:
            self._free()
        elif self._unattended:
            self.settle()

    # The end

    def untangle(self) -> bool:
        """Whether the lane is as it was in the beginning."""
        if self._tangled:
            with self._lock:
                if self.is_settled:
                    self._tangled = False
        return not self._tangled and self._error is None

    def fail(self, error: BaseException) -> None:
        """The lane is of no more use: tell all who wait."""
        if self._error is None:
            if isinstance(error, ProtocolError):
                log.warning("closed a lane with worker %d: %s", self.peer, error)
            self._error = error
        self.hang_up()

    def hang_up(self) -> None:
        """End it; those who wait find out."""
        self._stream.hang_up()
        for question in list(self._questions.values()):
            question.bell.ring()

    def close(self) -> None:
        """End it, and free it when the last job has ended. Nobody else is here any more."""
        with self._lock:
            self._over = True
            is_used = self._is_used
        self.hang_up()
        if not is_used:
            self._free()

    def _free(self) -> None:
        self._station.poller.drop(self)
        self._frames.clear()
        self._stream.close()
