"""Lanes: connections that carry one exchange at a time, so that nothing has to be sorted out.

The connector's end belongs to one calling thread for the length of a call. At the acceptor's end
a thread reads a request, runs it and writes the answer: two wake-ups a call, and no pool that
nested calls could run dry. A call back inside a call goes by the same lane (`nesting.py`). A lane
that has been quiet for a while gives its thread back and is watched by the poller.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from .._wire.frames import Frame, Parcel
from ..errors import WorkerLostError
from .base import Card, IsOver
from .endpoint import BROKEN, Station, describe_end
from .framed_socket import Stream
from .nesting import LaneEnd
from .questions import ANSWERS, Limit, Question, here
from .stand_ins import ALONE

_LIGHT = 64 << 10  # larger requests may be cut short by their timeout, and the lane too
_QUIET = 0.5  # seconds after which a lane gives its thread back


class CallerLane(LaneEnd):
    """The connector's end."""

    def __init__(self, station: Station, stream: Stream, peer: int) -> None:
        super().__init__(station, stream, peer)
        self.idle_since = 0.0

    def exchange(
        self,
        parcel: Parcel,
        deadline: float | None,
        spin: bool,
        is_over: IsOver | None = None,
    ) -> Frame:
        """Send a request and wait for its answer.

        Raises:
            TimeoutError: not in time, or it is over; the lane owes an answer then.
            EOFError, OSError, ProtocolError: the lane is of no more use.
        """
        question = Question()
        try:
            with self._writing:
                self.send(question, parcel, deadline)
            permission = self._station.spin if spin else None
            limit = Limit(deadline, is_over)
            answer = self.wait_for(question, parcel, limit, permission)
        except BaseException:
            self.leave(question)
            raise
        if question.jobs:
            self.leave(question)
        return answer

    def linger(self) -> None:
        """The caller went away. What is still to come is read, which frees its memory."""
        self._unattended = True
        self._watch()
        self.settle()

    def settle(self) -> None:
        if self._unattended and (self.is_settled or self._error is not None):
            self.close()


class ServerLane(LaneEnd):
    """The acceptor's end."""

    def __init__(
        self,
        station: Station,
        stream: Stream,
        peer: int,
        ended: Callable[[ServerLane], None],
    ) -> None:
        super().__init__(station, stream, peer)
        self._ended = ended
        self._is_ending = False

    def start(self) -> None:
        self._station.executor.host(self.serve)

    def ready(self) -> None:
        if self._unpark():
            self._station.executor.host(self.serve)
        else:
            self._look()

    def serve(self) -> None:
        """Answer requests until it is quiet or over."""
        try:
            while True:
                frame = self._next_request()
                number, parcel = frame.call, self.run(frame)
                del frame  # its memory goes back before the caller goes on
                if self._take_role(self):
                    self._stream.expect()  # the next may follow at once
                self.reply(number, parcel)
                parcel.was_sent()
                del parcel
        except TimeoutError:
            self._park()
        except BROKEN as error:
            self.fail(error)
            self._end()

    def hang_up(self) -> None:
        """End it; the thread in it, if there is one, does the rest."""
        with self._lock:
            self._is_ending = True
        super().hang_up()
        if self._unpark():
            self._end()

    def _next_request(self) -> Frame:
        """Wait for a request.

        Raises:
            TimeoutError: none came; or a thread that asks reads here, for this one too.
        """
        if not self._take_role(self):
            raise TimeoutError
        if self._tangled:
            self.untangle()
        frames, others = self._frames, []
        try:
            while True:
                if frames:
                    self._stream.cease()
                else:
                    self._stream.look(self._station.spin, ALONE)
                if not frames:
                    self._sleep()
                frame = frames.popleft()
                if frame.kind in ANSWERS:
                    self._hand_out(frame, None)
                    continue
                if frames:
                    others = self._take_in(None)
                return frame
        finally:
            self._let_go()
            self._start(others, None)

    def _sleep(self) -> None:
        """Wait for a frame, whichever it is.

        Raises:
            TimeoutError: it has been quiet for long.
        """
        deadline = time.monotonic() + _QUIET
        while not self._frames:
            self._stream.read(deadline)

    def _park(self) -> None:
        """Give the thread back."""
        with self._lock:
            is_ending = self._is_ending
            self._unattended = not is_ending
        if is_ending:  # the poller may be closed before it could tell us
            self._end()
        else:
            self._watch()

    def _unpark(self) -> bool:
        with self._lock:
            parked, self._unattended = self._unattended, False
        return parked

    def _end(self) -> None:
        self._ended(self)
        self.close()


def ask_back(
    station: Station,
    to: Card,
    parcel: Parcel,
    deadline: float | None,
    is_over: IsOver | None,
) -> Frame | None:
    """Ask by the lane whose request this thread is running, if it comes from there.

    None: it does not, or another lane is better.

    Raises:
        WorkerLostError, TimeoutError
    """
    lane: LaneEnd | None = here.lane
    if lane is None or lane.peer != to.id or lane._station is not station:
        return None
    if parcel.bulk_length or len(parcel.body) > _LIGHT:
        return None
    here.lane = None  # one question at a time
    try:
        return lane.ask_back(parcel, deadline, is_over)
    except TimeoutError:
        raise
    except BROKEN as error:
        raise WorkerLostError(to.name, describe_end(error)) from error
    finally:
        here.lane = lane
