"""A socket with frames in both directions, and large areas in shared memory where there is some."""

from __future__ import annotations

import select
import socket
import time
from contextlib import nullcontext

from .._wire.frames import Limits
from .base import Traffic
from .busy_poll import WAKE_UP, BusyPoll
from .frame_reader import FrameReader
from .frame_writer import FrameWriter, Waiting, poll_until
from .shared_memory import Recycler, SegmentMap, SegmentPool

_NEVER = BusyPoll(0.0)


class FramedSocket:
    """A socket with frames in both directions. One thread reads at a time, and one writes."""

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
        self.reader = FrameReader(sock, limits, recycler, traffic)
        self.writer = FrameWriter(sock, waiting, traffic)
        self._pull = self.reader.pull
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        self._last_wait = 0.0  # how long the last wait for something to come took

    def share_memory(
        self, pool: SegmentPool | None, segments: SegmentMap | None
    ) -> None:
        self.writer.segments = pool
        self.reader.segments = segments

    def read(self, deadline: float | None, busy_poll: BusyPoll = _NEVER) -> None:
        """Wait for something to come, and take it in; or nothing, then wait again.

        Raises:
            TimeoutError, EOFError, OSError, ProtocolError: as `pull` and `poll_until`.
        """
        try:
            self._pull()
            return
        except BlockingIOError:
            began = time.perf_counter()
        until = busy_poll.begin(self._last_wait)
        if until and self._poll(until, busy_poll):
            self._last_wait = time.perf_counter() - began
            return
        try:
            poll_until(self._readable, deadline)
        finally:
            self._last_wait = max(0.0, time.perf_counter() - began - WAKE_UP)

    def _poll(self, until: float, busy_poll: BusyPoll) -> bool:
        """Look again and again until then; whether something came."""
        now = time.perf_counter
        try:
            while now() < until:
                try:
                    self._pull()
                    return True
                except BlockingIOError:
                    pass
            return False
        finally:
            busy_poll.end()

    def hang_up(self) -> None:
        """End the connection; whoever waits on it wakes up."""
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it is over already

    def close(self) -> None:
        """Hang up, and free the descriptor. Only when nobody uses it."""
        self.hang_up()
        self.sock.close()
