"""A socket with frames in both directions, and letters where memory is shared.

`Spin` is the one trick: for a short while before sleeping, look again and again, because being
woken costs more than looking; it backs off where that does not pay.
"""

from __future__ import annotations

import select
import socket
from contextlib import nullcontext

from .._wire.frames import Limits, note
from .._wire.messages import LETTERS
from . import shm_mailbox
from .base import Traffic
from .busy_poll import Patience, Spin
from .frame_reader import StreamReader, refuse
from .frame_writer import StreamWriter, Waiting, poll_until
from .shared_memory import Recycler, Segment, SegmentMap, SegmentPool


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
        """Let letters come from now on: one will `look` for them, or `read`, or `cease`."""
        if self.reader.inbox is not None:
            self.reader.inbox.begin(self.reader.received)

    def cease(self) -> bool:
        """Expect nothing any more; whether something came by now, and is taken in."""
        if self.reader.inbox is None:
            return False
        letter = self.reader.inbox.end()
        return letter is not None and self.reader.open_letter(letter)

    def may_look(self, spin: Spin) -> bool:
        """Whether it pays to look."""
        return spin.is_allowed and self._patience.pays

    def look(self, spin: Spin, times: int = 1) -> bool | None:
        """Take in what comes within a short while, if it pays to look for it; whether it did.

        Letters come if they were expected.

        Raises:
            EOFError, OSError, ProtocolError: as `pull`.
        """
        if self.reader.inbox is None:
            return self._patience.look(spin, self._pull, times)
        try:
            found = self._patience.look(spin, self._look, times)
        finally:
            came_late = self.cease()  # as the last look was over
        return found or came_late

    def offer_letters(self) -> None:
        """Have small frames go by shared memory, if there is some, and this processor can."""
        pool = self.writer.segments
        if pool is None or not shm_mailbox.are_possible():
            return
        segment = pool.lend(shm_mailbox.BOXES)
        if segment is None:
            return
        self._use_letters(segment, offered=True)
        try:
            self.writer.write_bytes(note(LETTERS, segment.id))
        except OSError:
            pass  # it is over: whoever uses it will notice

    def _accept_letters(self, number: int) -> None:
        if self.reader.segments is None or self.reader.inbox is not None:
            refuse(number)
        segment = self.reader.segments.borrow(number, shm_mailbox.BOXES)
        self._use_letters(segment, offered=False)

    def _use_letters(self, segment: Segment, *, offered: bool) -> None:
        boxes = shm_mailbox.boxes(segment.view(), offered=offered)
        self.reader.inbox, self.writer.outbox = boxes
        self.writer.outbox.note(self.writer.sent)

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
        self.reader.offered = refuse  # else it refers to itself
