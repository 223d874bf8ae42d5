"""A link: all connections that one worker made to another.

One shared channel, lanes as needed, and between processes of one host a Unix socket for the
descriptors of shared memory. A link has a direction: the worker that wants to call makes it. Its
end is the end of the channel; a goodbye before it makes the difference between a worker that left
and one that was lost.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable

from .._wire.frames import Frame, Parcel
from .._wire.messages import PING
from ..errors import ProtocolError, WorkerLostError
from . import shared_memory
from .base import Card, IsOver, NotConnected
from .channels import CallerChannel, Channel
from .connector import Dialer
from .endpoint import BROKEN, Station, describe_end
from .framed_socket import Stream
from .handshake import Purpose
from .lanes import CallerLane, ServerLane
from .shared_memory import SegmentMap, SegmentPool

log = logging.getLogger("gradwire")

_LANE_IDLE = 5.0  # a lane unused for so long is closed, unless it is the last
_MEMORY_IDLE = 30.0

Ended = Callable[["OutgoingLink | IncomingLink", "str | None"], None]


class OutgoingLink:
    """The connector's end of a link."""

    def __init__(
        self,
        station: Station,
        to: Card,
        *,
        dialer: Dialer,
        memory: bool,
        deadline: float | None,
        ended: Ended,
    ) -> None:
        self.peer = to.id
        self._station = station
        self._to = to
        self._dialer = dialer
        self._on_ended = ended
        self._free: list[CallerLane] = []
        self._lanes: set[CallerLane] = set()
        self._parting: set[CallerLane] = set()  # not used again, with something to come
        self._lock = threading.Lock()
        self._closed = False
        self._reason: str | None = None  # why it has ended
        self._side: socket.socket | None = None
        self._pool: SegmentPool | None = None
        self._map: SegmentMap | None = None
        first = dialer.open_first(deadline)
        try:
            if memory and dialer.by_unix:
                self._share_memory(deadline)
        except BaseException:
            first.close()
            raise
        self.channel = CallerChannel(
            station, self._stream(first), self.peer, self._channel_ended
        )
        self.channel.start()
        self.ping()  # now it counts at the other end

    was_used = True
    """Whether its end is the end of the other worker."""

    @property
    def is_remote(self) -> bool:
        """Whether it could break without either kernel noticing."""
        return not self._dialer.by_unix

    def __repr__(self) -> str:
        return f"<link to {self._to.name}: {self.describe()}, {len(self._lanes)} lanes>"

    def describe(self) -> str:
        """How it is made, for people."""
        if not self._dialer.by_unix:
            return "TCP"
        return "Unix sockets" + (", shared memory" if self._pool is not None else "")

    def post(self, call: int, parcel: Parcel) -> None:
        self.channel.post(call, parcel)

    def exchange(
        self, parcel: Parcel, deadline: float | None, is_over: IsOver | None = None
    ) -> Frame:
        """A call by a lane.

        Raises:
            WorkerLostError, TimeoutError
        """
        lane = self._take_lane(deadline)
        alone = len(self._lanes) - len(self._free) == 1
        try:
            frame = lane.exchange(parcel, deadline, alone, is_over)
        except TimeoutError:
            self._part_with(lane)
            raise
        except BROKEN as error:
            self._drop(lane)
            reason = self._reason or describe_end(error)
            raise WorkerLostError(self._to.name, reason) from error
        except BaseException:  # Ctrl-C: the answer will still come
            self._part_with(lane)
            raise
        if not lane.untangle():
            self._part_with(lane)
            return frame
        lane.idle_since = time.monotonic()
        self._free.append(lane)
        if self._closed:
            self._drop(lane)
        return frame

    def tick(self) -> None:
        """Now and then: close what is not used."""
        limit = time.monotonic() - _LANE_IDLE
        while len(self._free) > 1:
            try:
                lane = self._free.pop(0)  # lanes are taken from the other end
            except IndexError:
                break
            if lane.idle_since > limit:
                self._free.insert(0, lane)
                break
            self._drop(lane)
        if self._pool is not None:
            self._pool.trim(_MEMORY_IDLE)

    def ping(self) -> None:
        self.channel.note(PING)

    def close(self, *, goodbye: bool) -> None:
        """End it. Calls in it fail."""
        if goodbye:
            self.channel.say_goodbye()
        self.channel.end(None)

    def _channel_ended(self, reason: str | None) -> None:
        with self._lock:
            self._closed = True
            self._reason = reason
            lanes = list(self._lanes)
            parting = list(self._parting)
        for lane in lanes:
            lane.hang_up()
        while self._free:
            try:
                self._drop(self._free.pop())
            except IndexError:
                break
        for lane in parting:
            lane.close()
        if self._side is not None:
            self._side.close()
        self._on_ended(self, reason)

    def _take_lane(self, deadline: float | None) -> CallerLane:
        """A free lane, or a new one; or one that gets free while there can be no new one."""
        while True:
            try:
                return self._free.pop()
            except IndexError:
                pass
            try:
                return self._open_lane(deadline)
            except NotConnected as error:
                if self._closed:
                    raise self._lost() from error
                if not self._free:
                    raise

    def _open_lane(self, deadline: float | None) -> CallerLane:
        needless = lambda: self._closed or bool(self._free)  # noqa: E731
        sock = self._dialer.open(Purpose.LANE, deadline, needless)
        stream = self._stream(sock)
        stream.offer_letters()
        lane = CallerLane(self._station, stream, self.peer)
        with self._lock:
            if self._closed:
                sock.close()
                raise self._lost()
            self._lanes.add(lane)
        return lane

    def _lost(self) -> WorkerLostError:
        return WorkerLostError(self._to.name, self._reason or "connection closed")

    def _drop(self, lane: CallerLane) -> None:
        with self._lock:
            known = lane in self._lanes
            self._lanes.discard(lane)
        if known:
            lane.close()

    def _part_with(self, lane: CallerLane) -> None:
        """Nobody waits here any more, but something may still come."""
        with self._lock:
            self._lanes.discard(lane)
            self._parting = {p for p in self._parting if p.fileno() >= 0} | {lane}
            closed = self._closed
        if closed:
            lane.close()
        else:
            lane.linger()

    def _stream(self, sock: socket.socket) -> Stream:
        return self._station.stream(sock, self._pool, self._map)

    def _share_memory(self, deadline: float | None) -> None:
        if not shared_memory.is_available():
            return
        try:
            self._side = self._dialer.open(Purpose.SEGMENTS, deadline)
        except WorkerLostError as error:
            log.debug("no shared memory with %s: %s", self._to.name, error)
            return
        self._pool, self._map = SegmentPool(self._side), SegmentMap(self._side)


class IncomingLink:
    """The acceptor's end of a link."""

    def __init__(self, station: Station, peer: int, ended: Ended) -> None:
        self.peer = peer
        self.channel: Channel | None = None
        self.is_remote = False
        self._station = station
        self._on_ended = ended
        self._lanes: set[ServerLane] = set()
        self._side: socket.socket | None = None
        self._pool: SegmentPool | None = None
        self._map: SegmentMap | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._silent_since = 0.0

    @property
    def was_used(self) -> bool:
        """Whether anything came by it. If not, who made it may have given up half-way."""
        return self.channel is not None and self.channel.heard_at != self._silent_since

    def __repr__(self) -> str:
        return f"<link from worker {self.peer}: {len(self._lanes)} lanes>"

    def accept(self, purpose: Purpose, sock: socket.socket) -> None:
        """Take in an authenticated connection.

        Raises:
            ProtocolError: there is one of its kind already, or the link is over.
        """
        with self._lock:
            if self._closed:
                raise ProtocolError("link is closed")
            if purpose is Purpose.SEGMENTS:
                if self._side is not None or not shared_memory.is_available():
                    raise ProtocolError("unexpected channel for shared memory")
                self._side = sock
                self._pool, self._map = SegmentPool(sock), SegmentMap(sock)
                if self.channel is not None:
                    self.channel.share_memory(self._pool, self._map)
                return
            if purpose is Purpose.LANE:
                lane = ServerLane(
                    self._station, self._stream(sock), self.peer, self._lane_ended
                )
                lane.start()  # first: there may be no thread for it
                self._lanes.add(lane)
                return
            if self.channel is not None:
                raise ProtocolError("second channel for one link")
            self.is_remote = sock.family != socket.AF_UNIX
            self.channel = Channel(
                self._station, self._stream(sock), self.peer, self._channel_ended
            )
            self._silent_since = self.channel.heard_at
        self.channel.start()

    def tick(self) -> None:
        if self._pool is not None:
            self._pool.trim(_MEMORY_IDLE)

    def close(self, *, goodbye: bool) -> None:
        if self.channel is None:
            self._channel_ended(None)
            return
        if goodbye:
            self.channel.say_goodbye()
        self.channel.end(None)

    def _channel_ended(self, reason: str | None) -> None:
        with self._lock:
            self._closed = True
            lanes = list(self._lanes)
            side, self._side = self._side, None
        for lane in lanes:
            lane.hang_up()
        if side is not None:
            side.close()
        self._on_ended(self, reason)

    def _lane_ended(self, lane: ServerLane) -> None:
        with self._lock:
            self._lanes.discard(lane)

    def _stream(self, sock: socket.socket) -> Stream:
        return self._station.stream(sock, self._pool, self._map)
