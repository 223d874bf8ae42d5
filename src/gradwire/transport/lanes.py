"""Lanes: connections that carry one exchange at a time, so that nothing has to be sorted out.

The connector's end belongs to one calling thread for the length of a call. At the acceptor's end
a thread reads a request, runs it and writes the answer: two wake-ups a call, and no pool that
nested calls could run dry. A lane that has been quiet for a while gives its thread back and is
watched by the poller.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from ..errors import ProtocolError
from ..wire.frames import Frame, Parcel
from .base import IsOver
from .station import BROKEN, Station
from .streams import Stream

log = logging.getLogger("gradwire")

_QUIET = 0.5  # seconds after which a lane gives its thread back


class CallerLane:
    """The connector's end."""

    __slots__ = ("_station", "idle_since", "is_owed", "stream")

    def __init__(self, station: Station, stream: Stream) -> None:
        self._station = station
        self.stream = stream
        self.idle_since = 0.0
        self.is_owed = (
            False  # a request went out whole, and its answer is still to come
        )

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
        station, stream = self._station, self.stream
        stream.writer.write(0, parcel, deadline)
        self.is_owed = True
        parcel.settle(is_idle=True)
        if parcel.meanwhile is not None:
            parcel.meanwhile()
        with station.executor.waiting():
            permission = station.spin if spin else None
            frame = stream.next_frame(deadline, permission, is_over)
        self.is_owed = False
        return frame

    def close(self) -> None:
        self.stream.close()


class OwedLane:
    """A lane whose caller went away: the answer is read and dropped, which frees its memory."""

    def __init__(self, station: Station, lane: CallerLane) -> None:
        self._station = station
        self._stream = lane.stream

    def fileno(self) -> int:
        return self._stream.sock.fileno()

    def ready(self) -> None:
        try:
            self._stream.reader.pull()
        except BlockingIOError:
            pass
        except BROKEN:
            self.close()
            return
        if self._stream.reader.frames:
            self.close()
        else:
            self._station.poller.watch(self)

    def close(self) -> None:
        self._station.poller.drop(self)
        self._stream.reader.frames.clear()
        self._stream.close()


class ServerLane:
    """The acceptor's end."""

    def __init__(
        self,
        station: Station,
        stream: Stream,
        peer: int,
        ended: Callable[[ServerLane], None],
    ) -> None:
        self._station = station
        self._stream = stream
        self._peer = peer
        self._ended = ended
        self._lock = threading.Lock()
        self._parked = False  # in the poller's care, without a thread
        self._over = False

    def fileno(self) -> int:
        return self._stream.sock.fileno()

    def start(self) -> None:
        self._station.executor.host(self.serve)

    def ready(self) -> None:
        if self._unpark():
            self._station.executor.host(self.serve)

    def serve(self) -> None:
        """Answer requests until it is quiet or over."""
        station, stream = self._station, self._stream
        answer, peer, spin = station.receiver.answer, self._peer, station.spin
        try:
            while True:
                frame = stream.next_frame(time.monotonic() + _QUIET, spin)
                parcel = answer(peer, frame)
                del frame  # its memory goes back before the caller goes on
                stream.writer.write(0, parcel)
                parcel.settle(is_idle=True)
                del parcel
        except TimeoutError:
            with self._lock:
                over, self._parked = self._over, not self._over
                if not over:
                    station.poller.watch(self)
            if over:  # the poller may be closed before it could tell us
                self._close()
        except BROKEN as error:
            if isinstance(error, ProtocolError):
                log.warning("closed a lane from worker %d: %s", self._peer, error)
            self._close()

    def hang_up(self) -> None:
        """End it; the thread in it, if there is one, does the rest."""
        with self._lock:
            self._over = True
        self._stream.hang_up()
        if self._unpark():
            self._close()

    def _unpark(self) -> bool:
        with self._lock:
            parked, self._parked = self._parked, False
        return parked

    def _close(self) -> None:
        self._station.poller.drop(self)
        self._ended(self)
        self._stream.close()
