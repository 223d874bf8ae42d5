"""The shared connection of a link: posted requests one way, their answers the other.

Sending: bursts are coalesced. A small frame may be held back if more are about to follow; it goes
out with them, when someone begins to wait, or after `_HOLD` seconds. A thread that finds another
one writing leaves its frame to that one, so that a full socket holds up one thread, not all.

Receiving, where requests arrive (`Channel`): the poller takes frames in and makes each a task.

Receiving, where answers arrive (`CallerChannel`): who waits, reads. At most one thread reads at a
time (it has the *role*). While nobody waits, the poller reads, unless a burst is being sent. An
answer is at every moment in one of four places, and a waiter looks for its own in this order
before it sleeps in the socket: delivered; in `frames`; being delivered by another thread
(`_in_delivery`); not yet read. Waiters without the role sleep until the answer itself wakes them,
whoever completes it, or the role is free. Delivery runs user callbacks, so the role is never held
during it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from .._wire.frames import Frame, Parcel, note
from .._wire.messages import GOODBYE, PING, PONG
from ..errors import ProtocolError
from ..threads import Bell
from .base import Answer
from .endpoint import BROKEN, Station, describe_end
from .framed_socket import Stream
from .shared_memory import SegmentMap, SegmentPool

_HOLD = 0.002
_MOST_HELD = 16
_FAREWELL = 1.0  # seconds to wait for a connection that is full
_MOST_POSTPONED = 8  # times `_HOLD` that a burst may go on before its answers are read
_MOST_IN_PASSING = 64  # answers that a waiter delivers beside its own
_MOST_WAITING = 1024  # frames that may wait for another thread's write


class Channel:
    """The acceptor's end: requests arrive, answers leave."""

    def __init__(
        self,
        station: Station,
        stream: Stream,
        peer: int,
        ended: Callable[[str | None], None],
    ) -> None:
        self._station = station
        self._stream = stream
        self._frames = stream.reader.frames
        self._peer = peer
        self._ended = ended
        self._write_lock = threading.Lock()
        self._outbox: deque[bytes] = deque()
        self._flush_due = False
        self._state_lock = threading.Lock()
        self._closed = False  # the end has begun: nothing more is read or watched
        self._over = False  # the end is complete
        self.heard_at = time.monotonic()

    def fileno(self) -> int:
        return self._stream.sock.fileno()

    @property
    def alive_at(self) -> float:
        """When the other end last showed that it is there: spoke, or took what we send."""
        return max(self.heard_at, self._stream.writer.drained_at)

    def start(self) -> None:
        self._station.poller.watch(self)

    def share_memory(self, pool: SegmentPool, segments: SegmentMap) -> None:
        self._stream.share_memory(pool, segments)

    def send(self, call: int, parcel: Parcel, *, more: bool = False) -> None:
        """Send a parcel; `more` follow soon.

        Raises:
            OSError: the connection is over.
        """
        if parcel.bulk_length:
            with self._station.executor.waiting(), self._write_lock:
                self._write_outbox()
                self._stream.writer.write(call, parcel)
            self.flush()
            return
        self._outbox.append(parcel.header(call) + parcel.body)
        if not more or len(self._outbox) >= _MOST_HELD:
            self.flush()
        else:
            self._hold()
        if self._closed:  # so late that the end has not seen it
            raise ConnectionResetError("connection closed")

    def flush(self) -> None:
        """Send what waits to be sent; if another thread is at it, that one does.

        Raises:
            OSError: the connection is over.
        """
        while self._outbox:
            if len(self._outbox) > _MOST_WAITING:  # do not outrun who writes
                with self._station.executor.waiting():
                    self._write_lock.acquire()
            elif not self._write_lock.acquire(blocking=False):
                return
            try:
                self._write_outbox()
            finally:
                self._write_lock.release()

    def note(self, kind: int) -> None:
        """Say something without a body, unless the connection is over."""
        self._outbox.append(note(kind))
        try:
            self.flush()
        except OSError:
            pass  # whoever reads will notice

    def ready(self) -> None:
        """The poller says that something came."""
        try:
            self._stream.reader.pull()
        except BlockingIOError:
            pass
        except BROKEN as error:
            self.end(error)
            return
        self._take_in()
        with self._state_lock:  # not while `end` drops it
            if not self._closed:
                self._station.poller.watch(self)

    def say_goodbye(self) -> None:
        """Let the other end know that what follows is no loss, unless it does not listen."""
        if not self._write_lock.acquire(timeout=_FAREWELL):
            return
        try:
            self._write_outbox()
            self._stream.writer.write_bytes(note(GOODBYE), time.monotonic() + _FAREWELL)
        except OSError:
            pass  # it is gone, too
        finally:
            self._write_lock.release()

    def end(self, why: BaseException | None) -> None:
        """It is over: tell the link, unless told before."""
        with self._state_lock:
            if self._closed:
                return
            self._closed = True
        if isinstance(why, ProtocolError):
            self.heard_at = time.monotonic()  # something came, if only nonsense
        self._station.poller.drop(self)
        self._stream.hang_up()
        self._deliver_rest()
        left = self._stream.reader.said_goodbye
        self._ended(None if left or why is None else describe_end(why))
        self._wake_all()
        with self._state_lock:
            self._over = True
        self._free()

    def _free(self) -> None:
        """Give the descriptor back. After the poller has dropped it, and when nobody uses it."""
        with self._write_lock:  # a writer notices the hang-up and leaves
            self._stream.close()

    def _deliver_rest(self) -> None:
        """For the other kind of channel, where answers may have come before the end."""

    def _wake_all(self) -> None:
        """For the other kind of channel, where someone may wait."""

    def _take_in(self) -> None:
        """Make tasks of the frames that came."""
        self._take_notes()
        while self._frames:
            frame = self._frames.popleft()
            self._station.executor.submit(_Delivery(self._station, self._peer, frame))

    def _take_notes(self) -> None:
        self.heard_at = time.monotonic()
        notes = self._stream.reader.notes
        while notes:
            try:
                kind = notes.popleft()
            except IndexError:
                return  # another thread was quicker
            if kind == PING:
                self.note(PONG)

    def _write_outbox(self) -> None:
        outbox = self._outbox
        if outbox:
            data = [outbox.popleft() for _ in range(min(len(outbox), _MOST_WAITING))]
            self._stream.writer.write_bytes(b"".join(data))

    def _hold(self) -> None:
        """See to it that what was held back goes out soon."""
        if not self._flush_due:
            self._flush_due = True
            due = time.monotonic() + _HOLD
            self._station.executor.call_at(due, self._flush_late)

    def _flush_late(self) -> None:
        self._flush_due = False
        try:
            self.flush()
        except OSError:
            pass  # the loss of the connection fails what was in it


class _Delivery:
    """A task: hand a frame to the layer above."""

    __slots__ = ("_frame", "_peer", "_station")

    def __init__(self, station: Station, peer: int, frame: Frame) -> None:
        self._station = station
        self._peer = peer
        self._frame = frame

    def __call__(self) -> None:
        self._station.receiver.arrived(self._peer, self._frame)


class CallerChannel(Channel):
    """The connector's end: requests leave, answers arrive."""

    def __init__(
        self,
        station: Station,
        stream: Stream,
        peer: int,
        ended: Callable[[str | None], None],
    ) -> None:
        super().__init__(station, stream, peer, ended)
        self._role = threading.Lock()
        self._inbox_lock = threading.Lock()
        self._in_delivery: list[int] = []  # one twice, if its answer came twice
        self._waiters: dict[int, Bell] = {}
        self._attending = 0
        self._posted = 0
        self._posted_before = 0  # at the last look at a burst
        self._postponed = 0  # how often its reading was put off
        self._answered = 0

    def post(self, call: int, parcel: Parcel) -> None:
        """Send a request; held back a moment if many are under way."""
        self._posted += 1
        self.send(call, parcel, more=self._posted - self._answered > _MOST_HELD)

    def attend(self, call: int, answer: Answer, deadline: float | None) -> None:
        """Wait for an answer, reading if nobody else does."""
        self._enter()
        bell: Bell | None = None
        try:
            while not answer.done():
                coming = call in self._in_delivery or self._closed
                if self._frames:
                    self._deliver_next()
                elif not coming and self._role.acquire(blocking=False):
                    self._read(call, answer, deadline)
                elif bell is None:
                    bell = self._waiters[call] = Bell()  # look once more, then sleep
                    answer.on_done(bell.ring)
                else:
                    with self._station.executor.waiting():
                        bell.wait_until(deadline)
                if deadline is not None and time.monotonic() >= deadline:
                    return
            for _ in range(min(len(self._frames), _MOST_IN_PASSING)):
                self._deliver_next()  # likely what this thread asks for next
        finally:
            self._waiters.pop(call, None)
            self._leave()

    def ready(self) -> None:
        if not self._role.acquire(blocking=False):
            return  # a waiter reads; it will have us watched again
        try:
            self._stream.reader.pull()
        except BlockingIOError:
            pass
        except BROKEN as error:
            self._role.release()
            self.end(error)
            return
        self._role.release()
        self._take_in()
        self._hand_over()

    def _take_in(self) -> None:
        self._take_notes()
        for _ in range(len(self._frames)):
            self._station.executor.submit(self._deliver_next)

    def _read(self, call: int, answer: Answer, deadline: float | None) -> None:
        """With the role: take in what comes, unless the answer is already on its way."""
        broken = None
        try:
            with self._inbox_lock:
                if self._frames or call in self._in_delivery or answer.done():
                    return
            with self._station.executor.waiting():
                if not self._stream.look(self._station.spin):
                    self._stream.read(deadline)
            self._take_notes()
        except TimeoutError:
            pass
        except BROKEN as error:
            broken = error
        finally:
            self._role.release()
        if broken is not None:
            self.end(broken)

    def _deliver_next(self) -> None:
        with self._inbox_lock:
            if not self._frames:
                return
            frame = self._frames.popleft()
            self._in_delivery.append(frame.call)
            self._answered += 1
        try:
            self._station.receiver.arrived(self._peer, frame)
        finally:
            self._in_delivery.remove(frame.call)

    def _enter(self) -> None:
        try:
            self.flush()
        except OSError:
            pass  # reading will find out
        with self._state_lock:
            self._attending += 1
            if self._attending == 1 and not self._closed:
                self._station.poller.pause(self)

    def _leave(self) -> None:
        with self._state_lock:
            self._attending -= 1
        if self._over and not self._attending:
            self._free()
        elif self._posted > self._answered and not self._attending:
            self._hold()  # who left will soon wait for the next
        else:
            self._hand_over()

    def _hold(self) -> None:
        """A burst: reading its answers one by one as they come would only slow it down."""
        if self._flush_due:
            return
        with self._state_lock:
            if not self._attending and not self._closed:
                self._station.poller.pause(self)
        super()._hold()  # last: what is due then has it watched again

    def _flush_late(self) -> None:
        super()._flush_late()
        goes_on, self._posted_before = self._posted != self._posted_before, self._posted
        if goes_on and self._postponed < _MOST_POSTPONED:
            self._postponed += 1
            self._hold()
            return
        self._postponed = 0
        if not self._attending:
            self._take_in()
        self._hand_over()

    def _hand_over(self) -> None:
        """The role is free: let a sleeping waiter take it, or else the poller."""
        for bell in list(self._waiters.values()):
            bell.ring()
            return
        with self._state_lock:
            if not self._attending and not self._closed:
                self._station.poller.watch(self)

    def _deliver_rest(self) -> None:
        while self._frames:
            self._deliver_next()

    def _wake_all(self) -> None:
        for bell in list(self._waiters.values()):
            bell.ring()

    def _free(self) -> None:
        with self._state_lock:
            if self._attending:
                return  # the last one to leave does it
        super()._free()
