"""Stand-ins: where a call back is expected, another thread looks for it from the start.

To wake the thread that runs a call back (B) takes about as long as a small call. So where the last
request like this one was called back, from the same depth of calls in calls, A wakes B as soon as
it has asked, and B looks in its stead: what comes, it runs at once.

    worker0: A asks, calls B, sleeps ·· B looks, runs, answers ·· A reads on
    worker1:               T runs, asks ·························· T answers

B looks for as long as A would have, and then leaves it to A, which is rung, as it is if the answer
came after all. If B has not begun within moments, A does without it. So nobody waits for longer
than without stand-ins, and a wrong guess costs a wake-up.
"""

from __future__ import annotations

from functools import partial

from ..wire.frames import Frame, Parcel
from .questions import Question
from .spin import Spin
from .station import BROKEN
from .turns import Turns

ALONE = 3
"""Times as long a look for one that waits for a frame and nothing else."""


class StandIns(Turns):
    """How one end of a lane has stand-ins."""

    def _call_stand_in(
        self, question: Question, parcel: Parcel, spin: Spin | None
    ) -> bool:
        """Have another thread look in this one's stead; False: it does not."""
        if spin is None or not self._stream.may_look(spin):
            return False
        if not self._has_role(question):
            return False
        with self._lock:
            self._jobs += 1  # the lane is there until it has looked
            duty = question.duty = [parcel]
        self._pass_role(duty)
        try:
            self._station.hosts.run(partial(self._stand_in, question, duty))
        except Exception:  # noqa: BLE001 no more threads
            self._dismiss_stand_in(question)
            return False
        return True

    def _dismiss_stand_in(self, question: Question) -> None:
        """If there is a stand-in that has not begun, it never will; the role is the asker's."""
        duty = question.duty
        if duty is None:
            return
        try:
            duty.pop()
        except IndexError:
            return  # it looks, and lets go of the role soon
        if self._has_role(duty):
            self._pass_role(question)
        question.duty = None
        self._job_ended(None)

    def _stand_in(self, question: Question, duty: list[Parcel]) -> None:
        """In a thread for it alone: look for what comes, for a short while, and run it."""
        try:
            parcel = duty.pop()
        except IndexError:
            return  # it was dismissed
        requests: list[Frame] = []
        try:
            parcel.was_sent()
            self._stream.look(self._station.spin, ALONE)
            requests = self._take_in(question)
        except BaseException as error:
            self.fail(error)
            if not isinstance(error, BROKEN):
                raise
        finally:
            self._let_go()
            question.duty = None
            self._job_ended(None)
            if question.answer is not None or not requests:
                question.bell.ring()
        if requests:
            first = [requests.pop(0)]
            try:
                self._start(requests, question)
            finally:
                self._run_apart(first, question)

    # What is done besides

    def _run_apart(self, only: list[Frame], asker: Question | None) -> None:
        """In a thread for it alone: run a request and answer it."""
        raise NotImplementedError

    def _job_ended(self, asker: Question | None) -> None:
        raise NotImplementedError
