"""The outgoing frames of one socket, from many threads.

One thread writes at a time. A thread that finds another one writing leaves its frame to it, so a
full socket blocks one thread, not all; only senders of requests may have to wait for room. Small
frames may be deferred for a moment, to leave in one system call with others.
"""

from __future__ import annotations

import time
from collections import deque

from .. import streams
from .._wire.frames import Parcel, note
from .._wire.messages import GOODBYE
from ..errors import GradwireError
from ..locks import CheckedLock
from .framed_socket import FramedSocket, Waiting
from .quota import Charge

_MOST_HELD = 16  # frames in a batch
_MOST_WAITING = 1024  # frames that may wait for another thread's write
_LARGE = 65536  # bytes of a response above which it is not deferred
_FAREWELL = 1.0  # seconds to wait for a socket that is full


class SendQueue:
    """The sending half of a connection."""

    def __init__(self, framed: FramedSocket, waiting: Waiting) -> None:
        self.lock = CheckedLock()
        """Held while writing."""
        self._framed = framed
        self._waiting = waiting
        self._unsent: deque[bytes] = deque()
        self._responses: deque[tuple[int, Parcel, Charge]] = deque()
        """Those that are large, or too many."""

    def write(self, call: int, parcel: Parcel) -> None:
        """Send a frame at once, after those already queued.

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

    def respond(
        self, call: int, parcel: Parcel, charge: Charge, *, more: bool = False
    ) -> bool:
        """As `put`, with a response. If it is left to who is writing, it is charged until then.

        Raises:
            OSError: the connection is over.
        """
        size = len(parcel.body) + parcel.bulk_length
        is_small = size <= _LARGE and not parcel.bulk_length
        if is_small and len(self._unsent) < _MOST_WAITING:
            charge.give_back()
            return self.put(parcel.header(call) + parcel.body, more=more)
        charge.now_takes(size)
        self._responses.append((call, parcel, charge))
        self.flush()
        return True

    def note(self, data: bytes) -> bool:
        """Send a note as far as there is room, without a wait. False: the rest has to be flushed.

        Where another thread is writing it is needless: what that one writes says as much.

        Raises:
            OSError: the connection is over.
        """
        if not self.lock.acquire(blocking=False):
            return True
        try:
            if not self._unsent:
                self._unsent.append(data)
            waiting, sent = self._take_unsent(), 0
            try:
                sent = self._framed.write_now(waiting)
            finally:  # a signal handler cannot write while its thread reads
                if sent < len(waiting):
                    self._unsent.appendleft(waiting[sent:])
        finally:
            self.lock.release()
        return not (self._unsent or self._responses)

    def flush(self) -> None:
        """Send what waits to be sent; if another thread is at it, that one does.

        Raises:
            OSError: the connection is over.
        """
        while self._unsent or self._responses:
            if len(self._unsent) > _MOST_WAITING:  # do not outpace the writer
                with self._waiting():
                    self.lock.acquire()
            elif not self.lock.acquire(blocking=False):
                return
            try:
                self._write_unsent()
            finally:
                self.lock.release()

    def try_flush(self) -> None:
        """As `flush`; if the connection is over, the reader finds out."""
        try:
            self.flush()
        except OSError:
            pass

    def say_goodbye(self) -> None:
        """Let the other end know that what follows is no loss, unless it does not listen."""
        if not self.lock.acquire(timeout=_FAREWELL):
            return
        try:
            data = self._take_unsent() + note(GOODBYE)
            self._framed.write_bytes(data, time.monotonic() + _FAREWELL)
        except OSError:
            pass  # it is gone, too
        finally:
            self.lock.release()

    def _write_unsent(self) -> None:
        if self._unsent:
            data = self._take_unsent()
            try:
                self._framed.write_bytes(data)
            except GradwireError:  # a signal handler cannot while its thread reads
                self._unsent.appendleft(data)
                raise
        if self._responses:
            response = call, parcel, charge = self._responses.popleft()
            try:
                with streams.for_others():  # it may be another thread's
                    self._framed.write(call, parcel)
            except GradwireError:
                self._responses.appendleft(response)
                raise
            charge.give_back()

    def _take_unsent(self) -> bytes:
        unsent = self._unsent
        some = [unsent.popleft() for _ in range(min(len(unsent), _MOST_WAITING))]
        return b"".join(some)
