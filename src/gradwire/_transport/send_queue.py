"""Frames on their way into one socket, from many threads.

One thread writes at a time. A thread that finds another one writing leaves its frame to it, so a
full socket holds up one thread, not all. Small frames may be kept for a moment, to leave in one
system call with others.
"""

from __future__ import annotations

import time
from collections import deque

from .._wire.frames import Parcel, note
from .._wire.messages import GOODBYE
from ..errors import GradwireError
from ..locks import CheckedLock
from .framed_socket import FramedSocket, Waiting

_MOST_HELD = 16  # frames that wait for others
_MOST_WAITING = 1024  # frames that may wait for another thread's write
_FAREWELL = 1.0  # seconds to wait for a socket that is full


class SendQueue:
    """The sending half of a connection."""

    def __init__(self, framed: FramedSocket, waiting: Waiting) -> None:
        self.lock = CheckedLock()
        """Held while writing."""
        self._framed = framed
        self._waiting = waiting
        self._unsent: deque[bytes] = deque()

    def write(self, call: int, parcel: Parcel) -> None:
        """Send a frame at once, after those that wait.

        Raises:
            OSError: the connection is over.
        """
        with self._waiting(), self.lock:
            self._write_unsent()
            self._framed.write(call, parcel)
        self.flush()

    def put(self, data: bytes, *, more: bool = False) -> bool:
        """Send a small frame; `more` follow soon. False: it still has to be flushed.

        Raises:
            OSError: the connection is over.
        """
        self._unsent.append(data)
        if more and len(self._unsent) < _MOST_HELD:
            return False
        self.flush()
        return True

    def flush(self) -> None:
        """Send what waits to be sent; if another thread is at it, that one does.

        Raises:
            OSError: the connection is over.
        """
        while self._unsent:
            if len(self._unsent) > _MOST_WAITING:  # do not outrun who writes
                with self._waiting():
                    self.lock.acquire()
            elif not self.lock.acquire(blocking=False):
                return
            try:
                self._write_unsent()
            finally:
                self.lock.release()

    def try_flush(self) -> None:
        """As `flush`; if the connection is over, whoever reads finds out."""
        try:
            self.flush()
        except OSError:
            pass

    def say_goodbye(self) -> None:
        """Let the other end know that what follows is no loss, unless it does not listen."""
        if not self.lock.acquire(timeout=_FAREWELL):
            return
        try:
            self._write_unsent()
            self._framed.write_bytes(note(GOODBYE), time.monotonic() + _FAREWELL)
        except OSError:
            pass  # it is gone, too
        finally:
            self.lock.release()

    def _write_unsent(self) -> None:
        unsent = self._unsent
        if unsent:
            data = [unsent.popleft() for _ in range(min(len(unsent), _MOST_WAITING))]
            try:
                self._framed.write_bytes(b"".join(data))
            except GradwireError:  # a signal handler cannot, where its thread reads
                unsent.extendleft(reversed(data))
                raise
