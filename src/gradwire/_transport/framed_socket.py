"""Reads frames from a socket incrementally, and writes whole frames into it.

Bulk areas are received directly into the memory that their tensors will use, or are in shared
memory. Sockets here never block; a thread that has to wait polls, with a deadline.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

from .._wire import raw_bytes
from .._wire.frames import (
    HEADER,
    VERSION,
    Frame,
    Header,
    Limits,
    Parcel,
    Piece,
    refusal,
)
from .._wire.messages import GOODBYE, NOTES
from ..errors import ProtocolError
from ..locks import check_none_held, reentered
from .base import NAP, Traffic
from .busy_poll import WAKE_UP, BusyPoll
from .device_memory import DeviceMap, DevicePool
from .quota import MOST_REFUSED, Charge, Quota
from .shared_memory import Recycler, SegmentMap, SegmentPool


class SharedMemory(NamedTuple):
    """What two workers of a host share memory by; None: nothing."""

    pool: SegmentPool | None = None
    segments: SegmentMap | None = None
    device_pool: DevicePool | None = None
    devices: DeviceMap | None = None


Waiting = Callable[[], AbstractContextManager[None]]
"""What to wrap around a wait (`Executor.waiting`)."""

WORD = 32
"""From which bit on the header's segment is a word of the memory of devices."""
_SEGMENT = (1 << WORD) - 1
_NEVER = BusyPoll(0.0)
_MAX_BUFFERS = 64  # of one sendmsg: every system takes that many
_CHUNK = 65536
_HEADER: int = HEADER.size
_PIECE = 4 << 20  # read at a time: larger ones gain nothing


class Stream(Protocol):
    """The part of a socket's interface that is used here; a TLS connection has it as well."""

    def fileno(self) -> int: ...
    def recv(self, size: int) -> bytes: ...
    def recv_into(self, buffer: memoryview) -> int: ...
    def send(self, data: bytes) -> int: ...
    def sendmsg(self, buffers: list[memoryview]) -> int: ...
    def setblocking(self, flag: bool) -> None: ...
    def shutdown(self, how: int) -> None: ...
    def close(self) -> None: ...


class FrameReader:
    """Reads frames from a socket as they arrive."""

    def __init__(
        self,
        sock: Stream,
        limits: Limits,
        recycler: Recycler,
        traffic: Traffic | None = None,
    ) -> None:
        self.frames: deque[Frame] = deque()
        self.notes: deque[int] = deque()  # kinds of the transport's own messages
        self.said_goodbye = False
        self.segments: SegmentMap | None = None
        self.quota: Quota | None = None
        """The limits of who sends requests here."""
        self.came = 0
        """Frames since `to_deliver` was last called, or more."""
        self.devices: DeviceMap | None = None
        self._sock = sock
        self._recv = sock.recv
        self._most_body, self._most_bulk = limits
        self._recycler = recycler
        self._traffic = traffic or Traffic()
        self._rest = b""
        self._long: tuple[Header, memoryview, Any] | None = None
        self._parts: deque[memoryview] = (
            deque()
        )  # of the long frame, still to be filled
        self._charge: Charge | None = None  # for the long frame
        self._unwanted = 0  # remaining bytes of a long frame that is refused

    def pull(self) -> None:
        """Read what has arrived, once; complete frames are added to `frames`.

        Raises:
            BlockingIOError: nothing has.
            EOFError, OSError: the connection is over.
            ProtocolError: malformed frame.
        """
        if self._long is not None:
            if self._unwanted:
                self._drop_some()
                return
            count = self._sock.recv_into(self._parts[0][:_PIECE])
            if not count:
                raise EOFError("connection closed in the middle of a frame")
            self._traffic.received += count
            self._filled(count)
            return
        try:
            data = self._recv(_CHUNK)
        except ConnectionResetError:
            data = b""
        if not data:
            raise EOFError("connection closed")
        self._traffic.received += len(data)
        if self._rest:
            data = self._rest + data
            self._rest = b""
        at, end = 0, len(data)
        while end - at >= _HEADER:
            used = self._take(data, at)
            if not used:
                break
            at += used
            self.came += 1
        if at < end:
            self._rest = data[at:]

    def to_deliver(self) -> int:
        """How often someone has to deliver a frame, now that some have come."""
        came, self.came = self.came, 0
        # Requests are delivered only in this way; many may be waiting for a thread.
        return len(self.frames) if self.quota is None else came

    def _take(self, data: bytes, at: int) -> int:
        """One frame from `data`; the bytes used, or 0 if it is incomplete."""
        header: Header = HEADER.unpack_from(data, at)
        version, kind, encoding, length, call, scope, mark, bulk, segment, over = header
        if version != VERSION or length > self._most_body or bulk > self._most_bulk:
            raise refusal(header, self._most_body, self._most_bulk)
        start = at + _HEADER
        end = start + length
        if end <= len(data) and not (bulk or segment or kind in NOTES):  # usually
            frame = Frame(kind, encoding, call, data[start:end])
            if scope or over:
                frame.scope, frame.mark, frame.over = scope, mark, over
            if self.quota is not None:
                self._account(frame, self.quota.charge(length), length)
            self.frames.append(frame)
            return end - at
        in_stream = bulk and not segment & _SEGMENT
        if end <= len(data) and not in_stream:
            self._finish(header, data[start:end], None)
            return end - at
        if not in_stream and length <= _CHUNK:
            return 0
        return _HEADER + self._begin_long(header, memoryview(data)[start:])

    def _begin_long(self, header: Header, data: memoryview) -> int:
        """Receive the rest of this frame directly to where it belongs."""
        _, _, _, length, _, _, _, bulk, segment, _ = header
        size = length if segment else length + bulk
        if self.quota is not None:
            self._charge = self.quota.charge(size)
            if self._charge is None:
                return self._refuse_long(header, size, len(data))
        # Both take memory only as their bytes arrive, however much is announced.
        body = memoryview(self._recycler.area(length)).cast("B")
        area = None
        if bulk and not segment & _SEGMENT:
            area = self._recycler.area(bulk)
        self._long = header, body, area
        parts = [body, memoryview(area or b"").cast("B")]
        self._parts = deque(p for p in parts if p)
        used = 0
        while self._parts and used < len(data):
            count = min(len(self._parts[0]), len(data) - used)
            self._parts[0][:count] = data[used : used + count]
            self._filled(count)
            used += count
        return used

    def _account(self, frame: Frame, charge: Charge | None, size: int) -> None:
        """Charge a request to its sender, or refuse it.

        Raises:
            ProtocolError: so many were refused that the sender cannot be reading the responses.
        """
        quota = self.quota
        assert quota is not None
        if charge is not None:
            frame.charge = charge
            return
        frame.refused = quota.refusal(size)
        frame.body, frame.area, frame.charge = b"", None, Charge(quota, 0)
        if quota.requests > quota.most_requests + MOST_REFUSED:
            raise ProtocolError(f"{quota.requests} requests of it are in flight")

    def _refuse_long(self, header: Header, size: int, here: int) -> int:
        """Drop all of this frame as it arrives."""
        self._long = header, memoryview(b""), None
        self._unwanted = size - min(here, size)
        if not self._unwanted:
            self._finish_refused(size)
        return min(here, size)

    def _drop_some(self) -> None:
        data = self._recv(min(self._unwanted, _CHUNK))
        if not data:
            raise EOFError("connection closed in the middle of a frame")
        self._traffic.received += len(data)
        self._unwanted -= len(data)
        if not self._unwanted:
            assert self._long is not None
            _, _, _, length, _, _, _, bulk, segment, _ = self._long[0]
            self._finish_refused(length if segment else length + bulk)

    def _finish_refused(self, size: int) -> None:
        assert self._long is not None
        (_, kind, encoding, _, call, *_), _, _ = self._long
        self._long = None
        frame = Frame(kind, encoding, call, b"")
        self._account(frame, None, size)
        self.frames.append(frame)
        self.came += 1

    def _filled(self, count: int) -> None:
        part = self._parts.popleft()[count:]
        if part:
            self._parts.appendleft(part)
        elif not self._parts:
            assert self._long is not None
            header, body, area = self._long
            self._long = None
            self._finish(header, body, area)

    def _finish(self, header: Header, body: bytes | memoryview, area: Any) -> None:
        _, kind, encoding, _, call, scope, mark, bulk, segment, over = header
        charge, self._charge = self._charge, None
        if kind in NOTES:
            self.said_goodbye |= kind == GOODBYE
            self.notes.append(kind)
            return
        frame = Frame(kind, encoding, call, body)
        frame.area = area
        if segment:
            self._share(frame, segment, bulk)
        frame.scope, frame.mark, frame.over = scope, mark, over
        if self.quota is not None:
            size = len(body)
            self._account(frame, charge or self.quota.charge(size), size)
        self.frames.append(frame)
        self.came += 1

    def _share(self, frame: Frame, segment: int, bulk: int) -> None:
        """Complete a frame by what is in shared memory."""
        if self.segments is None:
            raise ProtocolError("frame in shared memory, but none is shared")
        if segment & _SEGMENT:
            frame.area = self.segments.area(segment & _SEGMENT, bulk)
            self._traffic.received += bulk
        if word := segment >> WORD:
            if self.devices is None:
                raise ProtocolError("frame in memory of a device, but none is shared")
            frame.on_device = self.devices.arrival(word)


class FramedSocket:
    """A socket with frames in both directions. One thread reads at a time, and one writes."""

    def __init__(
        self,
        sock: Stream,
        limits: Limits,
        recycler: Recycler,
        waiting: Waiting = nullcontext,
        traffic: Traffic | None = None,
        *,
        reader: type[FrameReader] = FrameReader,
    ) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.drained_at = 0.0  # when the other end last made room in a full connection
        self._traffic = traffic or Traffic()
        self.reader = reader(sock, limits, recycler, self._traffic)
        self._pull = self.reader.pull
        self._is_pulling = False
        self._send = sock.send
        self._pool: SegmentPool | None = None
        self._devices: DevicePool | None = None
        self._waiting = waiting
        self._last_wait = 0.0  # how long the last wait for data took

    def share_memory(self, shared: SharedMemory) -> None:
        self._pool, self.reader.segments = shared.pool, shared.segments
        self._devices, self.reader.devices = shared.device_pool, shared.devices

    def read(self, deadline: float | None, busy_poll: BusyPoll = _NEVER) -> bool:
        """Wait for something to come, and take it in, or do so the next time. Whether it has come.

        Raises:
            TimeoutError, EOFError, OSError, ProtocolError: as `pull` and `poll_until`.
            GradwireError: nothing can come, because this thread was interrupted with a lock.
        """
        if self.pull():
            return True
        began = time.perf_counter()
        if busy_poll.found(self.pull, self._last_wait):
            self._last_wait = time.perf_counter() - began
            return True
        try:
            with self._waiting():
                return self._sleep(deadline)
        finally:
            self._last_wait = max(0.0, time.perf_counter() - began - WAKE_UP)

    def _sleep(self, deadline: float | None) -> bool:
        """Sleep until something comes, or a little less; whether it has."""
        moment = time.monotonic() + NAP
        if deadline is None or deadline > moment:
            try:
                return poll_until(self.sock, select.POLLIN, moment)
            except TimeoutError:
                check_none_held()  # it may be without a limit
        return poll_until(self.sock, select.POLLIN, deadline)

    def pull(self) -> bool:
        """Whether something had come; takes it in.

        Raises:
            EOFError, OSError, ProtocolError: as `FrameReader.pull`.
            GradwireError: this thread is at it, and was interrupted.
        """
        if self._is_pulling:
            raise reentered()
        self._is_pulling = True
        try:
            self._pull()
        except BlockingIOError:
            return False
        finally:
            self._is_pulling = False
        return True

    def write(self, call: int, parcel: Parcel, deadline: float | None = None) -> None:
        """Send a parcel.

        Raises:
            TimeoutError: not all of it could be sent in time. The connection is of no more use.
            OSError: the connection is over.
        """
        if not parcel.bulk_length:
            self.write_bytes(parcel.header(call) + parcel.body, deadline)
            return
        word = 0 if parcel.device_at < 0 else self._place_on_device(parcel)
        try:
            self._write_bulk(call, parcel, deadline, word << WORD)
        except BaseException:
            if self._devices is not None and parcel.was_emptied:
                self._devices.take_back(word)
            raise

    def _place_on_device(self, parcel: Parcel) -> int:
        """Put tensors on devices into memory that the other worker maps, if possible."""
        if self._devices is not None:
            return self._devices.place(parcel)
        self._traffic.by_host += parcel.bulk_length - parcel.device_at
        return 0

    def _write_bulk(
        self, call: int, parcel: Parcel, deadline: float | None, word: int
    ) -> None:
        segment = None
        if self._pool is not None and parcel.bulk_length:
            segment = self._pool.place(parcel.bulk, parcel.bulk_length)
        if segment is None:
            self._write_buffers(_in_stream(call, parcel, word), deadline)
            return
        parcel.bulk = ()  # frees its memory before the other side continues
        self._traffic.sent += parcel.bulk_length
        try:
            header = parcel.header(call, word | segment.id)
            self.write_bytes(header + parcel.body, deadline)
        except BaseException:
            segment.give_back()
            raise

    def write_bytes(self, data: bytes, deadline: float | None = None) -> None:
        try:
            sent = self._send(data)
        except BlockingIOError:
            sent = 0
        self._traffic.sent += sent
        if sent < len(data):
            self._write_buffers(deque([memoryview(data)[sent:]]), deadline)

    def write_now(self, data: bytes) -> int:
        """Send as much as fits without blocking; how much that is. The rest must follow."""
        try:
            sent = self._send(data)
        except BlockingIOError:
            return 0
        self._traffic.sent += sent
        return sent

    def _write_buffers(
        self, buffers: deque[memoryview], deadline: float | None
    ) -> None:
        while buffers:
            try:
                sent = self.sock.sendmsg(
                    [buffers[i] for i in range(min(len(buffers), _MAX_BUFFERS))]
                )
            except BlockingIOError:
                with self._waiting():
                    drained = poll_until(self.sock, select.POLLOUT, deadline)
                if drained:
                    self.drained_at = time.monotonic()
                continue
            self._traffic.sent += sent
            while buffers and sent >= len(buffers[0]):
                sent -= len(buffers.popleft())
            if sent:
                buffers[0] = buffers[0][sent:]

    def hang_up(self) -> None:
        """Shut the connection down, which wakes all threads that wait on it."""
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it is over already

    def close(self) -> None:
        """Hang up, and free the descriptor. Only when no thread uses it."""
        self.hang_up()
        self.sock.close()


def _in_stream(call: int, parcel: Parcel, word: int) -> deque[memoryview]:
    """Header, body and bulk area, with the gaps between its pieces."""
    buffers = deque([memoryview(parcel.header(call, word) + parcel.body)])
    # Buffers hold no reference: the parcel has to.
    parcel.bulk = [Piece(offset, tensor.cpu()) for offset, tensor in parcel.bulk]
    at = 0
    for offset, tensor in parcel.bulk:
        if offset > at:
            buffers.append(memoryview(bytes(offset - at)))
        buffers.append(raw_bytes.view(tensor))
        at = offset + tensor.nbytes
    if parcel.bulk_length > at:
        buffers.append(memoryview(bytes(parcel.bulk_length - at)))
    return buffers


def poll_until(sock: Stream, event: int, deadline: float | None) -> bool:
    """Sleep until the socket has an event, or a little less; whether it has.

    Raises:
        TimeoutError: the deadline came first.
    """
    left = None if deadline is None else max(0.0, deadline - time.monotonic())
    if threading.current_thread() is threading.main_thread():
        # A Ctrl-C just before the sleep does not end it: wake up now and then.
        left = NAP if left is None else min(left, NAP)
    poll = select.poll()  # a new one: signal handlers may be here at the same time
    poll.register(sock, event)
    found = poll.poll(None if left is None else left * 1000)
    if deadline is not None and time.monotonic() >= deadline:
        raise TimeoutError
    return bool(found)
