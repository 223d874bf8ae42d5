"""Frames on a socket: written whole, read piece by piece.

Sockets here never block; who has to wait polls, with a deadline. Bulk areas are received straight
into the memory their tensors will live in. `Spin` is the one trick: for a short while before
sleeping, look again and again, because being woken costs more than looking; it backs off where
that does not pay. Small frames may come as letters while we look (`letters.py`).
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ..errors import ProtocolError
from ..wire import memory
from ..wire.frames import HEADER, Frame, Header, Limits, Parcel, parse_header
from ..wire.messages import GOODBYE, LETTERS, NOTES
from . import letters
from .base import NAP, Traffic
from .letters import Inbox, Outbox
from .segments import Recycler, Segment, SegmentMap, SegmentPool
from .spin import Patience, Spin

Waiting = Callable[[], AbstractContextManager[None]]
"""What to wrap around a wait (`Executor.waiting`)."""

_CHUNK = 65536
_MAX_BUFFERS = 64  # of one sendmsg: every system takes that many
_HEADER: int = HEADER.size
_BELL = Parcel(LETTERS, 0, b"").header(0)
_PIECE = 4 << 20  # read and written at a time: larger ones gain nothing


class StreamReader:
    """Takes frames out of a socket as they come."""

    def __init__(
        self,
        sock: socket.socket,
        limits: Limits,
        recycler: Recycler,
        traffic: Traffic | None = None,
    ) -> None:
        self.frames: deque[Frame] = deque()
        self.notes: deque[int] = deque()  # kinds of the transport's own messages
        self.said_goodbye = False
        self.segments: SegmentMap | None = None
        self.inbox: Inbox | None = None
        self.offered: Callable[[int], None] = _refuse
        """Called with the number of a segment that is offered for letters."""
        self.received = 0  # bytes from the socket
        self._sock = sock
        self._recv = sock.recv
        self._limits = limits
        self._recycler = recycler
        self._traffic = traffic or Traffic()
        self._rest = b""
        self._long: tuple[Header, bytearray, Any] | None = None
        self._parts: deque[memoryview] = (
            deque()
        )  # of the long frame, still to be filled

    def pull(self) -> bool:
        """Read what is there, once; complete frames are added to `frames`. True: it did.

        Raises:
            BlockingIOError: nothing is there.
            EOFError, OSError: the connection is over.
            ProtocolError: what came is no frame.
        """
        if self._long is not None:
            count = self._sock.recv_into(self._parts[0][:_PIECE])
            if not count:
                raise EOFError("connection closed in the middle of a frame")
            self.received += count
            self._traffic.received += count
            self._filled(count)
            return True
        data = self._recv(_CHUNK)
        if self.inbox is not None:
            letter = self.inbox.take()
            if letter is not None:
                self.open_letter(letter)  # which is older
                if not data:
                    return True
        if not data:
            raise EOFError("connection closed")
        self.received += len(data)
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
        if at < end:
            self._rest = data[at:]
        return True

    def look(self) -> bool:
        """As `pull`, but look for a letter first; there is an inbox."""
        letter = self.inbox.look()  # type: ignore[union-attr]
        if letter is None:
            return self.pull()
        self.open_letter(letter)
        return True

    def open_letter(self, letter: bytes) -> None:
        """Take a frame in that came as a letter.

        Raises:
            ProtocolError: it is none.
        """
        length = len(letter)
        self._traffic.received += length
        if length < _HEADER or self._take(letter, 0) != length:
            raise ProtocolError(f"letter of {length} bytes that is no frame")

    def _take(self, data: bytes, at: int) -> int:
        """One frame from `data`; the bytes used, or 0 if more have to come first."""
        header = parse_header(data, self._limits, at)
        _, kind, encoding, length, call, scope, mark, bulk, segment, over = header
        start = at + _HEADER
        end = start + length
        if end <= len(data) and not (bulk or segment or kind in NOTES):  # as most are
            frame = Frame(kind, encoding, call, data[start:end])
            if scope or over:
                frame.scope, frame.mark, frame.over = scope, mark, over
            self.frames.append(frame)
            return end - at
        in_stream = bulk and not segment
        if end <= len(data) and not in_stream:
            self._finish(header, data[start:end], None)
            return end - at
        if not in_stream and length <= _CHUNK:
            return 0
        return _HEADER + self._begin_long(header, memoryview(data)[start:])

    def _begin_long(self, header: Header, data: memoryview) -> int:
        """Have the rest of this frame received straight to where it belongs."""
        _, _, _, length, _, _, _, bulk, segment, _ = header
        body = bytearray(length)
        area = None
        if bulk and not segment:
            area = self._recycler.area(bulk)
        self._long = header, body, area
        parts = [memoryview(body), memoryview(area or b"").cast("B")]
        self._parts = deque(p for p in parts if p)
        used = 0
        while self._parts and used < len(data):
            count = min(len(self._parts[0]), len(data) - used)
            self._parts[0][:count] = data[used : used + count]
            self._filled(count)
            used += count
        return used

    def _filled(self, count: int) -> None:
        part = self._parts.popleft()[count:]
        if part:
            self._parts.appendleft(part)
        elif not self._parts:
            assert self._long is not None
            header, body, area = self._long
            self._long = None
            self._finish(header, memoryview(body), area)

    def _finish(self, header: Header, body: bytes | memoryview, area: Any) -> None:
        _, kind, encoding, _, call, scope, mark, bulk, segment, over = header
        if kind == LETTERS:
            if segment:
                self.offered(segment)
            return  # else it rings, and whoever takes that has looked for a letter
        if kind in NOTES:
            self.said_goodbye |= kind == GOODBYE
            self.notes.append(kind)
            return
        if segment:
            if self.segments is None:
                raise ProtocolError("frame in shared memory, but none is shared")
            area = self.segments.area(segment, bulk)
            self._traffic.received += bulk
        frame = Frame(kind, encoding, call, body)
        frame.area = area
        frame.scope, frame.mark, frame.over = scope, mark, over
        self.frames.append(frame)


def _refuse(segment: int) -> None:
    raise ProtocolError("letters offered where there can be none")


class StreamWriter:
    """Puts frames into a socket. One thread at a time."""

    def __init__(self, sock: socket.socket, waiting: Waiting, traffic: Traffic) -> None:
        self.segments: SegmentPool | None = None
        self.outbox: Outbox | None = None
        self.sent = 0  # bytes by the socket
        self._traffic = traffic
        self._sock = sock
        self._send = sock.send
        self._waiting = waiting
        self.drained_at = 0.0  # when the other end last made room in a full connection
        self._writable = select.poll()
        self._writable.register(sock, select.POLLOUT)

    def write(self, call: int, parcel: Parcel, deadline: float | None = None) -> None:
        """Send a parcel.

        Raises:
            TimeoutError: not all of it could be sent in time. The connection is of no more use.
            OSError: the connection is over.
        """
        segment = None
        if parcel.bulk_length:
            if self.segments is not None:
                segment = self.segments.place(parcel.bulk, parcel.bulk_length)
            if segment is None:
                self._write_buffers(_in_stream(call, parcel), deadline)
                return
            parcel.bulk = ()  # lets go of its memory before the other side goes on
            self._traffic.sent += parcel.bulk_length
        data = parcel.header(call, segment.id if segment else 0) + parcel.body
        outbox = self.outbox
        found = None if outbox is None else outbox.put(data, self.sent)
        if found:
            self._traffic.sent += len(data)
            return
        try:
            self.write_bytes(data if found is None else _BELL, deadline)
        except BaseException:
            if segment is not None:
                segment.give_back()
            raise

    def write_bytes(self, data: bytes, deadline: float | None = None) -> None:
        try:
            sent = self._send(data)
        except BlockingIOError:
            sent = 0
        self.sent += sent
        self._traffic.sent += sent
        if sent < len(data):
            self._write_buffers(deque([memoryview(data)[sent:]]), deadline)

    def _write_buffers(
        self, buffers: deque[memoryview], deadline: float | None
    ) -> None:
        while buffers:
            try:
                sent = self._sock.sendmsg(
                    [buffers[i] for i in range(min(len(buffers), _MAX_BUFFERS))]
                )
            except BlockingIOError:
                with self._waiting():
                    drained = poll_until(self._writable, deadline)
                if drained:
                    self.drained_at = time.monotonic()
                continue
            self.sent += sent
            self._traffic.sent += sent
            while buffers and sent >= len(buffers[0]):
                sent -= len(buffers.popleft())
            if sent:
                buffers[0] = buffers[0][sent:]


def _in_stream(call: int, parcel: Parcel) -> deque[memoryview]:
    """Header, body and the bulk area, with the gaps between its pieces."""
    buffers = deque([memoryview(parcel.header(call) + parcel.body)])
    at = 0
    for offset, tensor in parcel.bulk:
        if offset > at:
            buffers.append(memoryview(bytes(offset - at)))
        buffers.append(memory.view(tensor))
        at = offset + tensor.nbytes
    if parcel.bulk_length > at:
        buffers.append(memoryview(bytes(parcel.bulk_length - at)))
    return buffers


def poll_until(poll: select.poll, deadline: float | None) -> bool:
    """Sleep until the poll has something, or a little less; whether it has.

    Raises:
        TimeoutError: the deadline came first.
    """
    left = None if deadline is None else max(0.0, deadline - time.monotonic())
    if threading.current_thread() is threading.main_thread():
        # A Ctrl-C that comes just before the sleep does not end it: look now and then.
        left = NAP if left is None else min(left, NAP)
    found = poll.poll(None if left is None else left * 1000)
    if deadline is not None and time.monotonic() >= deadline:
        raise TimeoutError
    return bool(found)


class Stream:
    """A socket with frames in both directions."""

    def __init__(
        self,
        sock: socket.socket,
        limits: Limits,
        recycler: Recycler,
        waiting: Waiting = nullcontext,
        traffic: Traffic | None = None,
    ) -> None:
        sock.setblocking(False)
        self.sock = sock
        traffic = traffic or Traffic()
        self.reader = StreamReader(sock, limits, recycler, traffic)
        self.writer = StreamWriter(sock, waiting, traffic)
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        self._patience = Patience()
        self._pull = self.reader.pull
        self._look = self.reader.look
        self.reader.offered = self._accept_letters

    def share_memory(
        self, pool: SegmentPool | None, segments: SegmentMap | None
    ) -> None:
        self.writer.segments = pool
        self.reader.segments = segments

    def read(self, deadline: float | None) -> None:
        """Wait for something to come, and take it in; or nothing, then wait again.

        Raises:
            TimeoutError, EOFError, OSError, ProtocolError: as `pull` and `poll_until`.
        """
        if self.cease():
            return
        try:
            self._pull()
        except BlockingIOError:
            poll_until(self._readable, deadline)

    def expect(self) -> None:
        """Say ahead that one will `look`, or `read`; if not, one has to `cease`."""
        if self.reader.inbox is not None:
            self.reader.inbox.begin(self.reader.received)

    def cease(self) -> bool:
        """Expect nothing any more; whether something came by now, and is taken in."""
        letter = None if self.reader.inbox is None else self.reader.inbox.end()
        if letter is not None:
            self.reader.open_letter(letter)
        return letter is not None

    def look(self, spin: Spin, times: int = 1) -> bool | None:
        """Take in what comes within a short while, if it pays to look for it; whether it did.

        Raises:
            EOFError, OSError, ProtocolError: as `pull`.
        """
        if self.reader.inbox is None:
            return self._patience.look(spin, self._pull, times)
        self.expect()
        try:
            found = self._patience.look(spin, self._look, times)
        finally:
            came_late = self.cease()
        return found or came_late

    def offer_letters(self) -> None:
        """Have small frames go by shared memory, if there is some."""
        pool = self.writer.segments
        segment = pool.lend(letters.BOXES) if pool is not None else None
        if segment is None:
            return
        self._use_letters(segment, offered=True)
        try:
            self.writer.write_bytes(Parcel(LETTERS, 0, b"").header(0, segment.id))
        except OSError:
            pass  # it is over: whoever uses it will notice

    def _accept_letters(self, number: int) -> None:
        if self.reader.segments is None or self.reader.inbox is not None:
            raise ProtocolError("letters offered where there can be none")
        segment = self.reader.segments.borrow(number, letters.BOXES)
        self._use_letters(segment, offered=False)

    def _use_letters(self, segment: Segment, *, offered: bool) -> None:
        boxes = letters.boxes(segment.view(), offered=offered)
        self.reader.inbox, self.writer.outbox = boxes

    def hang_up(self) -> None:
        """End the connection; whoever waits on it wakes up."""
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it is over already

    def close(self) -> None:
        """Hang up, and free the descriptor and memory. Only when nobody waits on it."""
        self.hang_up()
        self.sock.close()
        self.reader.inbox = self.writer.outbox = None
