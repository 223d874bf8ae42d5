"""All connections from one worker to another, at either end.

The caller opens them: first a shared one, whose end is the end of all; then leased ones for threads
that call concurrently; and between processes of one host a Unix socket that passes the descriptors
of shared memory. Callers beyond `_MOST_LEASED` at a time also use the shared connection. A goodbye
before the end distinguishes a worker that left from one that was lost.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from typing import TypeGuard

from .._wire.frames import Frame, Parcel
from .._wire.messages import PING
from ..errors import ProtocolError, WorkerLostError
from ..locks import CheckedLock
from . import shared_memory
from .base import Card, IsOver, NotConnected
from .connection import Connection
from .connector import Dialer
from .cuda_driver import cuda_driver
from .device_memory import DeviceMap, DevicePool
from .endpoint import BROKEN, Endpoint, describe_end
from .framed_socket import SharedMemory, Stream
from .handshake import Purpose
from .quota import Quota
from .shared_memory import SegmentMap, SegmentPool

log = logging.getLogger("gradwire")

_MOST_LEASED = 8  # to one worker
_LEASE_IDLE = 5.0  # a connection unused for so long is closed, unless it is the last
_MEMORY_IDLE = 30.0

Ended = Callable[["Connections", "str | None"], None]


class Connections:
    """What both ends have in common. The end of the shared connection is the end of all."""

    is_remote = False
    """Whether they could break without either kernel noticing."""

    def __init__(self, endpoint: Endpoint, peer: int, ended: Ended) -> None:
        self.peer = peer
        self.shared: Connection | None = None
        self._endpoint = endpoint
        self._on_ended = ended
        self._leased: set[Connection] = set()
        self._lock = CheckedLock()
        self._closed = False
        self._reason: str | None = None  # why they have ended
        self._side: socket.socket | None = None
        self._quota: Quota | None = None
        self._memory = SharedMemory()

    @property
    def was_used(self) -> bool:
        """Whether their end means the end of the other worker."""
        return True

    def tick(self) -> None:
        """Periodically: free what is idle."""
        if self._memory.pool is not None:
            self._memory.pool.trim(_MEMORY_IDLE)

    def close(self, *, goodbye: bool) -> None:
        """End them. Calls in flight fail."""
        if self.shared is None:
            self._end()
            return
        if goodbye:
            if self._memory.device_pool is not None:
                self._memory.device_pool.drain()
            self.shared.queue.say_goodbye()
        self.shared.end(None)

    def close_device_memory(self) -> None:
        """Close the other worker's device memory once all copies are done."""
        if self._memory.devices is not None:
            self._memory.devices.close()

    def free_device_memory(self) -> None:
        """Free this worker's, when the other one has closed it. Takes a while."""
        if self._memory.device_pool is not None:
            self._memory.device_pool.close(is_lost=self._reason is not None)

    def _connection(self, sock: Stream, *, is_leased: bool) -> Connection:
        framed = self._endpoint.framed(sock, self._memory)
        framed.reader.quota = self._quota
        return Connection(
            self._endpoint,
            framed,
            self.peer,
            is_leased=is_leased,
            ended=self._lease_ended if is_leased else self._shared_ended,
        )

    def _share_memory(self, side: Stream) -> None:
        if not is_unix(side):
            raise ProtocolError(
                "connection for shared memory, but not on a Unix socket"
            )
        self._side = side
        pool, segments = SegmentPool(side), SegmentMap(side)
        traffic = self._endpoint.traffic
        self._memory = SharedMemory(
            pool,
            segments,
            DevicePool(pool, self.peer, traffic, cuda_driver),
            DeviceMap(segments, cuda_driver),
        )

    def _lease_ended(self, connection: Connection, why: BaseException | None) -> None:
        with self._lock:
            self._leased.discard(connection)

    def _shared_ended(self, connection: Connection, why: BaseException | None) -> None:
        if why is not None and not connection.said_goodbye:  # else one has left
            self._reason = describe_end(why)
        self._end()

    def _end(self) -> None:
        with self._lock:
            self._closed = True
            leased = list(self._leased)
        for connection in leased:
            connection.end(None)
        if self._memory.devices is not None:
            self._memory.devices.release()
        if self._side is not None:
            self._side.close()
        self._on_ended(self, self._reason)


class OutgoingConnections(Connections):
    """The connector's end."""

    shared: Connection

    def __init__(
        self,
        endpoint: Endpoint,
        to: Card,
        *,
        dialer: Dialer,
        memory: bool,
        deadline: float | None,
        ended: Ended,
    ) -> None:
        super().__init__(endpoint, to.id, ended)
        self._to = to
        self._dialer = dialer
        self._idle: list[Connection] = []  # a thread that takes one out of it uses it
        self._opening = 0
        first = dialer.open_first(deadline)
        self.is_remote = not dialer.by_unix
        try:
            if memory and dialer.by_unix and shared_memory.is_available():
                self._share_memory_from(deadline)
        except BaseException:
            first.close()
            raise
        self.shared = self._connection(first, is_leased=False)
        self.shared.start()
        self.ping()  # now it counts at the other end

    def __repr__(self) -> str:
        return (
            f"<connections to {self._to.name}: {self.describe()}, "
            f"{len(self._leased)} leased>"
        )

    def describe(self) -> str:
        """The transport, for messages to people."""
        if self.is_remote:
            return "TCP, TLS" if self._dialer.by_tls else "TCP"
        pool = self._memory.device_pool
        return "Unix sockets" + (
            "" if pool is None else f", shared memory{pool.describe()}"
        )

    def exchange(
        self,
        call: int,
        parcel: Parcel,
        deadline: float | None,
        is_over: IsOver | None,
    ) -> Frame:
        """Send a request and wait for the response.

        Raises:
            WorkerLostError, TimeoutError
        """
        while True:
            connection = self._lease(deadline)
            if connection is None:
                try:
                    return self.shared.exchange_shared(call, parcel, deadline, is_over)
                except TimeoutError:
                    raise
                except BROKEN as error:
                    raise self._lost(error) from error
            try:
                frame = connection.exchange(call, parcel, deadline, is_over)
                connection.idle_since = time.monotonic()
                self._idle.append(connection)
            except BROKEN as error:
                if isinstance(error, TimeoutError):
                    self._abandon(connection)
                    raise
                connection.end(error)
                connection.stop_using()
                if (
                    connection.is_owed
                    or parcel.bulk_length
                    or parcel.was_emptied
                    or not connection.idle_since
                ):
                    raise self._lost(error) from error
                # It broke while it was idle, and nothing was sent: others may be whole.
            except BaseException:
                self._abandon(connection)
                raise
            else:
                if connection.has_ended:  # too late for its end to see it
                    self._close_idle(connection)
                return frame

    def _abandon(self, connection: Connection) -> None:
        """This thread no longer waits for the response."""
        connection.abandon()
        connection.stop_using()

    def _lost(self, error: BaseException) -> WorkerLostError:
        return WorkerLostError(self._to.name, self._reason or describe_end(error))

    def _lease(self, deadline: float | None) -> Connection | None:
        """A connection for one call; None if there can be no more now."""
        while self._idle:
            try:
                connection = self._idle.pop()  # the one used last: its thread is awake
            except IndexError:
                break
            if not connection.has_ended:
                return connection
            connection.stop_using()
        with self._lock:
            if len(self._leased) + self._opening >= _MOST_LEASED:
                return None
            self._opening += 1
        try:
            return self._open(deadline)
        except NotConnected as error:  # for a transient reason
            if deadline is not None and time.monotonic() >= deadline:
                raise
            log.debug("no other connection to %s: %s", self._to.name, error)
            return None
        finally:
            with self._lock:
                self._opening -= 1

    def tick(self) -> None:
        """Periodically: close idle ones."""
        limit = time.monotonic() - _LEASE_IDLE
        for connection in self._idle[:-1]:
            if connection.idle_since < limit:
                self._close_idle(connection)
        super().tick()

    def _close_idle(self, connection: Connection) -> None:
        """Close a connection, unless it is leased."""
        try:
            self._idle.remove(connection)
        except ValueError:
            return
        connection.end(None)
        connection.stop_using()

    def _lease_ended(self, connection: Connection, why: BaseException | None) -> None:
        super()._lease_ended(connection, why)
        self._close_idle(connection)

    def ping(self) -> None:
        self.shared.note(PING)

    def _open(self, deadline: float | None) -> Connection:
        # Tried once: the shared connection will do.
        sock = self._dialer.open(Purpose.LEASED, deadline, lambda: True)
        connection = self._connection(sock, is_leased=True)
        connection.use()
        with self._lock:
            self._leased.add(connection)
            closed = self._closed
        if closed:
            connection.end(None)
            connection.stop_using()
            raise WorkerLostError(self._to.name, self._reason or "connection closed")
        return connection

    def _share_memory_from(self, deadline: float | None) -> None:
        try:
            self._share_memory(self._dialer.open(Purpose.SEGMENTS, deadline))
        except WorkerLostError as error:
            log.debug("no shared memory with %s: %s", self._to.name, error)


class IncomingConnections(Connections):
    """The acceptor's end. All connections of a peer share one quota."""

    _quota: Quota

    def __init__(
        self, endpoint: Endpoint, peer: int, ended: Ended, *, quota: Quota
    ) -> None:
        super().__init__(endpoint, peer, ended)
        self._quota = quota
        self._silent_since = 0.0

    def __repr__(self) -> str:
        return f"<connections from worker {self.peer}: {len(self._leased)} leased>"

    @property
    def count(self) -> int:
        """How many there are; one at least, as each may still come."""
        return max(1, len(self._leased) + bool(self.shared) + bool(self._side))

    @property
    def was_used(self) -> bool:
        """Whether anything arrived. If not, the peer may have given up half-way."""
        return self.shared is not None and self.shared.heard_at != self._silent_since

    def _lease_ended(self, connection: Connection, why: BaseException | None) -> None:
        super()._lease_ended(connection, why)
        if self.shared is None and not self._leased and self._side is None:
            self._end()  # from a peer that did not start with the shared one, as Gradwire does

    def accept(self, purpose: Purpose, sock: Stream) -> None:
        """Add an authenticated connection.

        Raises:
            ProtocolError: there already is one of its kind, or all have ended.
        """
        with self._lock:
            if self._closed:
                raise ProtocolError("its other connections have ended")
            if purpose is Purpose.SEGMENTS:
                if self._side is not None or not shared_memory.is_available():
                    raise ProtocolError("unexpected connection for shared memory")
                self._share_memory(sock)
                if self.shared is not None:
                    self.shared.framed.share_memory(self._memory)
                return
            if purpose is Purpose.LEASED:
                leased = self._connection(sock, is_leased=True)
                leased.start()  # first: there may be no thread for it
                self._leased.add(leased)
                return
            if self.shared is not None:
                raise ProtocolError("second shared connection")
            self.is_remote = not is_unix(sock)
            self.shared = self._connection(sock, is_leased=False)
            self._silent_since = self.shared.heard_at
        self.shared.start()


def is_unix(sock: Stream) -> TypeGuard[socket.socket]:
    return isinstance(sock, socket.socket) and sock.family == socket.AF_UNIX
