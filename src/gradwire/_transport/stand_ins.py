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

from .._wire.frames import Frame, Parcel
from .busy_poll import Spin
from .endpoint import BROKEN
from .questions import Question
from .turns import Turns

ALONE = 3
"""Times as long a look for one that waits for a frame and nothing else."""


class Duty:
    """What a stand-in is called for. It, or who asked, does it: whoever claims it first."""

    __slots__ = ("_claims", "parcel")

    def __init__(self, parcel: Parcel) -> None:
        self.parcel = parcel
        self._claims: dict[str, object] = {}

    def claim(self, who: object) -> bool:
        """Whether it is this one's. In a single step, and may be repeated."""
        return self._claims.setdefault("by", who) is who


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
        duty = question.duty = Duty(parcel)
        self._stand_ins.add(duty)
        self._pass_role(duty)
        try:
            self._station.hosts.run(partial(self._stand_in, question, duty))
        except Exception:  # noqa: BLE001 no more threads
            self._dismiss_stand_in(question)
            return False
        return True

    def _dismiss_stand_in(self, question: Question) -> None:
        """If there is a stand-in that has not begun, it never will; the role is the asker's.

        A Ctrl-C may cut this short: then it is done again.
        """
        duty = question.duty
        if duty is None or not duty.claim(question):
            return  # there is none, or it looks, and lets go of the role soon
        if self._has_role(duty):
            self._pass_role(question)
        self._stand_ins.discard(duty)
        question.duty = None

    def _stand_in(self, question: Question, duty: Duty) -> None:
        """In a thread for it alone: look for what comes, for a short while, and run it."""
        if not duty.claim(self):
            return  # it was dismissed
        requests: list[Frame] = []
        try:
            duty.parcel.was_sent()
            self._stream.look(self._station.spin, ALONE)
            requests = self._take_in(question)
        except BaseException as error:
            self.fail(error)
            if not isinstance(error, BROKEN):
                raise
        finally:
            self._let_go()
            question.duty = None
            self._stood_in(duty)
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

    def _stood_in(self, duty: Duty) -> None:
        """A stand-in does not use the lane any more."""
        raise NotImplementedError
