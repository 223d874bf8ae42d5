"""Frames out of a socket, piece by piece as they come.

Bulk areas are received straight into the memory their tensors will live in, or lie in shared
memory.
"""

from __future__ import annotations

import socket
from collections import deque
from typing import Any

from .._wire.frames import HEADER, VERSION, Frame, Header, Limits, refusal
from .._wire.messages import GOODBYE, NOTES
from ..errors import ProtocolError
from .base import Traffic
from .shared_memory import Recycler, SegmentMap

_CHUNK = 65536
_HEADER: int = HEADER.size
_PIECE = 4 << 20  # read at a time: larger ones gain nothing


class FrameReader:
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

    def pull(self) -> None:
        """Read what is there, once; complete frames are added to `frames`.

        Raises:
            BlockingIOError: nothing is there.
            EOFError, OSError: the connection is over.
            ProtocolError: what came is no frame.
        """
        if self._long is not None:
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
        if at < end:
            self._rest = data[at:]

    def _take(self, data: bytes, at: int) -> int:
        """One frame from `data`; the bytes used, or 0 if more have to come first."""
        header: Header = HEADER.unpack_from(data, at)
        version, kind, encoding, length, call, scope, mark, bulk, segment, over = header
        if version != VERSION or length > self._most_body or bulk > self._most_bulk:
            raise refusal(header, self._most_body, self._most_bulk)
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
        # Both take memory only as their bytes arrive, however much is announced.
        body = memoryview(self._recycler.area(length)).cast("B")
        area = None
        if bulk and not segment:
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
