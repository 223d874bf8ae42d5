"""Frames into a socket, whole, or into shared memory.

Sockets here never block; who has to wait polls, with a deadline.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager

from .._wire import raw_bytes
from .._wire.frames import Parcel
from .base import NAP, Traffic
from .shared_memory import SegmentPool

Waiting = Callable[[], AbstractContextManager[None]]
"""What to wrap around a wait (`Executor.waiting`)."""

_MAX_BUFFERS = 64  # of one sendmsg: every system takes that many


class FrameWriter:
    """Puts frames into a socket. One thread at a time."""

    def __init__(self, sock: socket.socket, waiting: Waiting, traffic: Traffic) -> None:
        self.segments: SegmentPool | None = None
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
        try:
            self.write_bytes(
                parcel.header(call, segment.id if segment else 0) + parcel.body,
                deadline,
            )
        except BaseException:
            if segment is not None:
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
        buffers.append(raw_bytes.view(tensor))
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
