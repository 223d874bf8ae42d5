"""One connection between two workers: frames both ways over one socket.

The worker that opened it, the *connector*, sends requests; the other, the *acceptor*, sends
responses. A request has a number, and its response the same. What a connection is for is agreed
when it is opened:

leased  One caller has it for the length of a call, and reads the response itself. At the other end
        one thread reads a request, runs it, and reads the next: a call costs two wake-ups, and
        nothing is handed from thread to thread. After a while without requests the thread is given
        back, and the poller watches.
shared  Any number of requests are in flight, and responses come in any order. Requests become
        tasks of the executor. Whoever waits for a response reads, for everyone; while nobody waits,
        the poller does (`reader_role.py`).

    connector   leased: idle <─> leased ──> abandoned
                shared: watched by the poller <─> read by a waiter
    acceptor    leased: watched by the poller <─> served by a thread
                shared: watched by the poller
    all         ── hang-up, error, goodbye ──> ended ── the last user leaves ──> closed

Who has a response sends it, from whatever thread: a function marked `async_execution` is answered
by the thread that completes its future. These hold:

* One thread reads at a time, and one writes (`send_queue.py`).
* No lock is held while user code runs, and `_lock` not while sending either.
* It ends once, and its descriptor is closed when no thread uses it any more.
* A caller that gives up abandons its leased connection: the poller reads what is still to come,
  which frees its memory, and then ends it.
* A signal handler may make a call while its thread is anywhere in here. It reads with the role of
  the frame that it has interrupted; where that holds a lock or takes a frame apart, it raises.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from threading import get_ident

from .._wire.frames import Frame, Parcel, note
from .._wire.messages import FAILURE, PING, PONG, RESULT
from ..errors import ProtocolError
from ..locks import CheckedLock, check_may_read, check_not_below
from ..threads import Bell
from .base import Answer, IsOver, check_wait
from .endpoint import BROKEN, Endpoint
from .exchange import Exchange
from .framed_socket import FramedSocket
from .quota import Charge
from .reader_role import ReaderRole, Step
from .send_queue import SendQueue

log = logging.getLogger("gradwire")

_RESPONSES = (RESULT, FAILURE)
_QUIET = 0.5  # seconds without a request before a serving thread is released
_HOLD = 0.002  # seconds to batch small frames, and to wait for a reader of responses
_MANY = 16  # requests in flight from which on small frames are batched
_MOST_IN_PASSING = 64  # responses that a waiter delivers beside its own

Ended = Callable[["Connection", "BaseException | None"], None]


class Connection:
    """A connection. `ended(connection, why)` is called once; None: this worker ended it."""

    def __init__(
        self,
        endpoint: Endpoint,
        framed: FramedSocket,
        peer: int,
        *,
        is_leased: bool,
        ended: Ended,
    ) -> None:
        self.peer = peer
        self.heard_at = time.monotonic()
        self.idle_since = 0.0
        self._endpoint = endpoint
        self.framed = framed
        self._is_leased = is_leased
        self._on_ended: Ended | None = ended
        self._lock = CheckedLock()
        self._users = 0
        self.has_ended = False
        self.is_owed = False  # a lease's request was sent, its response has not arrived
        self.queue = SendQueue(framed, endpoint.executor.waiting)
        self._timer: int | None = None  # while it runs: `_answered` when it was started
        self._role: ReaderRole[Frame, Bell] = ReaderRole(framed.reader.frames)
        self._reader = 0  # the thread that has the role
        self._exchanges: dict[int, Exchange] = {}  # by call
        self._posted = 0
        self._answered = 0

    def __repr__(self) -> str:
        use = "leased" if self._is_leased else "shared"
        return f"<{use} connection with worker {self.peer}, {self._users} users>"

    def fileno(self) -> int:
        return self.framed.sock.fileno()

    @property
    def alive_at(self) -> float:
        """When the other end last showed a sign of life: sent something, or took what we sent."""
        return max(self.heard_at, self.framed.drained_at)

    @property
    def said_goodbye(self) -> bool:
        """Whether the other worker is leaving, so that the end is not a loss."""
        return self.framed.reader.said_goodbye

    def watch(self) -> None:
        """Make the poller report arriving data."""
        with self._lock:  # not while `end` drops it
            if not self.has_ended:
                self._endpoint.poller.watch(self)

    # Sending

    def send(self, call: int, parcel: Parcel, *, more: bool = False) -> None:
        """Send a frame of a shared connection; `more` follow soon.

        Raises:
            OSError: the connection is over.
        """
        if parcel.bulk_length:
            self.queue.write(call, parcel)
        elif not self.queue.put(parcel.header(call) + parcel.body, more=more):
            self._start_timer()
        if self.has_ended:  # too late for `end` to see it
            raise ConnectionResetError("connection closed")

    def note(self, kind: int) -> None:
        """Send a frame without a body, unless the connection is over. Never blocks."""
        try:
            if not self.queue.note(note(kind)):
                self._start_timer()
        except OSError:
            pass  # the reader will notice

    def _start_timer(self) -> None:
        """Make sure that deferred frames are sent soon, and that a thread reads."""
        if self._timer is None:
            self._timer = self._answered
            self._endpoint.executor.call_at(time.monotonic() + _HOLD, self._time_is_up)

    def _time_is_up(self) -> None:
        answered, self._timer = self._timer, None
        self.queue.try_flush()
        if self._role.unopened and self._answered == answered:
            # A user's callback blocks the thread that was to deliver them.
            for _ in range(len(self._role.unopened)):
                self._endpoint.executor.submit(self._deliver_next)
        elif self._role.unopened:
            self._start_timer()
        self._hand_over(None)

    # A call on a leased connection

    def exchange(
        self,
        call: int,
        parcel: Parcel,
        deadline: float | None,
        is_over: IsOver | None,
    ) -> Frame:
        """Send a request and wait for its response. If interrupted, `abandon` it.

        Raises:
            TimeoutError: not in time, or no longer wanted.
            EOFError, OSError, ProtocolError: the connection is unusable.
        """
        self.framed.write(call, parcel, deadline)
        self.is_owed = True
        parcel.was_sent()
        while True:
            frame = self._next_frame(deadline, is_over)
            if frame.kind not in _RESPONSES:
                raise ProtocolError(f"{frame!r} where a response is expected")
            if frame.call == call:  # otherwise a duplicate
                self.is_owed = False
                return frame

    def _next_frame(self, deadline: float | None, is_over: IsOver | None) -> Frame:
        framed, busy_poll = self.framed, self._endpoint.busy_poll
        frames = framed.reader.frames
        while not frames:
            until = deadline if is_over is None else check_wait(deadline, is_over)
            try:
                framed.read(until, busy_poll)
            except TimeoutError:
                check_wait(deadline, is_over)
        return frames.popleft()

    def abandon(self) -> None:
        """No thread waits for the response any more. Ends once it has arrived, or now."""
        if self.is_owed:
            self.watch()
        else:
            self.end(None)

    def _discard_response(self) -> None:
        """Read and drop what arrives on an abandoned connection."""
        frames = self.framed.reader.frames
        try:
            self.framed.pull()
        except BROKEN:
            self.end(None)
        if frames:
            frames.clear()
            self.end(None)
        else:
            self.watch()

    # Posted requests on a shared connection, and waiting for their responses

    def post(self, call: int, parcel: Parcel) -> None:
        """Send a request; deferred for a moment if many are in flight.

        Raises:
            OSError: the connection is over.
        """
        self._posted += 1
        is_burst = self._posted - self._answered > _MANY
        if is_burst and self._timer is None:
            # Reading responses one by one as they arrive would slow it down.
            with self._lock:
                if not self.has_ended:
                    self._endpoint.poller.pause(self)
            self._start_timer()
        self.send(call, parcel, more=is_burst)

    def exchange_shared(
        self,
        call: int,
        parcel: Parcel,
        deadline: float | None,
        is_over: IsOver | None,
    ) -> Frame:
        """As `exchange`, on a shared connection."""
        exchange = self._exchanges[call] = Exchange()
        try:
            self.post(call, parcel)
            parcel.was_sent()
            while not exchange.done():
                until = check_wait(deadline, is_over)
                if not self.has_ended:
                    self.attend(call, exchange, until)
                else:  # `end` completes or fails what waits
                    bell = Bell()
                    exchange.on_done(bell.ring)
                    bell.wait_until(until)
        finally:
            del self._exchanges[call]
        if exchange.frame is None:
            raise EOFError(exchange.reason)
        return exchange.frame

    def attend(self, call: int, answer: Answer, deadline: float | None) -> None:
        """Wait for the response to a request, reading unless another thread does."""
        role, bell = self._role, Bell()
        self.queue.try_flush()
        if not self.use():
            return
        with self._lock:
            if role.enter():
                self._endpoint.poller.pause(self)
        try:
            is_bell_known = False
            while not answer.done():
                with self._lock:
                    step = Step.SLEEP if self.has_ended else role.step(call, bell)
                    if step is Step.READ:
                        self._reader = get_ident()
                if step is Step.DELIVER:
                    self._start_timer()  # a user's callback may block this thread
                    self._deliver_next()
                elif step is Step.READ:
                    self._read(deadline, answer)
                elif self._reader == get_ident():
                    check_may_read()  # a signal handler may, for the thread that it interrupted
                    self._read_now(deadline)
                elif not is_bell_known:
                    is_bell_known = True  # check once more, then sleep
                    answer.on_done(bell.ring)
                else:
                    if role.in_delivery[call]:
                        check_not_below(_DELIVERING, "call", call)
                    with self._endpoint.executor.waiting():
                        bell.wait_until(deadline)
                if deadline is not None and time.monotonic() >= deadline:
                    return
            for _ in range(min(len(role.unopened), _MOST_IN_PASSING)):
                self._start_timer()
                self._deliver_next()  # likely what this thread waits for next
        finally:
            self._leave(call)

    def _leave(self, call: int) -> None:
        with self._lock:
            next_reader = self._role.leave(call)
        is_more_due = self._role.unopened or self._posted > self._answered
        if next_reader is None and is_more_due:
            self._start_timer()  # the thread that left will soon wait for its next response
        else:
            self._hand_over(next_reader)
        self.stop_using()

    def _hand_over(self, next_reader: Bell | None) -> None:
        """The role is free: a sleeping waiter takes it, otherwise the poller."""
        if next_reader is not None:
            next_reader.ring()
            return
        with self._lock:
            if not self.has_ended and not self._role.is_taken:
                self._endpoint.poller.watch(self)

    def _read(self, deadline: float | None, answer: Answer) -> None:
        """With the role: read and deliver what arrives."""
        try:
            if not answer.done():
                self._read_now(deadline)
        finally:
            with self._lock:
                next_reader = self._role.give_up()
                self._reader = 0
            if next_reader is not None:
                next_reader.ring()

    def _read_now(self, deadline: float | None) -> None:
        try:
            has_come = self.framed.read(deadline, self._endpoint.busy_poll)
            if has_come:  # otherwise it is still silent, however often it is polled
                self._take_notes()
        except TimeoutError:
            pass
        except BROKEN as error:
            self.end(error)

    def _deliver_next(self) -> None:
        with self._lock:
            frame = self._role.open_next()
        if frame is None:
            return
        call = frame.call
        try:
            if frame.kind in _RESPONSES:
                self._answered += 1
                exchange = self._exchanges.get(call)
                if exchange is not None:
                    exchange.complete(frame)
                else:
                    self._endpoint.receiver.complete(self.peer, frame)
            else:
                self._request(frame)
        finally:
            with self._lock:
                self._role.delivered(call)

    # Requests of the other worker

    def serve(self) -> None:
        """Run the requests of a leased connection, until it is quiet or over."""
        frames, serve = self.framed.reader.frames, self._endpoint.receiver.serve
        try:
            while True:
                deadline = time.monotonic() + _QUIET
                while not frames:
                    self.framed.read(deadline, self._endpoint.busy_poll)
                frame = frames.popleft()
                # Not by `_request`: anomaly mode formats each frame below a user's function.
                respond = partial(self.respond, frame.call, frame.charge)
                serve(self.peer, frame, respond)
                del frame
        except TimeoutError:
            self.watch()
        except BROKEN as error:
            self.end(error)
        finally:
            self.stop_using()

    def ready(self) -> None:
        """Called by the poller: data has arrived."""
        if not self.use():
            return
        try:
            if self.is_owed:
                self._discard_response()
            elif self._is_leased:
                self._start_serving()
            else:
                self._read_ready()
        finally:
            self.stop_using()

    def _read_ready(self) -> None:
        with self._lock:
            if not self._role.take():
                return  # a waiter reads; it will make the poller watch again
            self._reader = get_ident()
        try:
            self.framed.pull()
        except BROKEN as error:
            self.end(error)
            return
        finally:
            with self._lock:
                next_reader = self._role.give_up()
                self._reader = 0
        self._take_notes()
        for _ in range(self.framed.reader.to_deliver()):
            self._endpoint.executor.submit(self._deliver_next)
        self._hand_over(next_reader)

    def start(self) -> None:
        """Begin to read, at the acceptor's end or of a shared connection."""
        if self._is_leased:
            self._start_serving()
        else:
            self.watch()

    def _start_serving(self) -> None:
        if self.use():
            try:
                self._endpoint.executor.host(self.serve)
            except BaseException:  # no more threads
                self.stop_using()
                raise

    def _request(self, frame: Frame) -> None:
        try:
            if frame.charge is None:
                raise ProtocolError("it makes requests where it is to answer them")
            frame.refused = frame.refused or frame.charge.refusal()
            respond = partial(self.respond, frame.call, frame.charge)
            self._endpoint.receiver.serve(self.peer, frame, respond)
        except ProtocolError as error:
            self.end(error)

    def respond(self, call: int, charge: Charge, parcel: Parcel) -> None:
        """Send the response to a request. Does nothing if the connection is over."""
        try:
            if self._is_leased:
                with self.queue.lock:
                    self.framed.write(call, parcel)
                charge.give_back()
            else:
                is_burst = self._endpoint.executor.backlog > 1
                more = (parcel.can_wait or is_burst) and not parcel.may_be_last
                if not self.queue.respond(call, parcel, charge, more=more):
                    self._start_timer()
        except OSError as error:
            log.debug("response to worker %d could not be sent: %s", self.peer, error)
        parcel.was_sent()

    def _take_notes(self) -> None:
        self.heard_at = time.monotonic()
        notes = self.framed.reader.notes
        while notes:
            try:
                kind = notes.popleft()
            except IndexError:
                return  # another thread was first
            if kind == PING:
                self.note(PONG)

    def end(self, why: BaseException | None) -> None:
        """It is over. Its users find out; responses that have arrived are delivered."""
        with self._lock:
            if self.has_ended:
                return
            self.has_ended = True
            self._users += 1
        if isinstance(why, ProtocolError):
            self.heard_at = time.monotonic()  # a sign of life, even if malformed
            log.warning("closed a connection with worker %d: %s", self.peer, why)
        self._endpoint.poller.drop(self)
        self.framed.hang_up()
        self._fail_rest(why)

    def _fail_rest(self, why: BaseException | None) -> None:
        """Fail what still waits, once the arrived responses are delivered. Runs once."""
        if self._role.unopened and not self._is_leased:
            # A user's callback may block this thread: then another continues.
            another = partial(self._fail_rest, why)
            self._endpoint.executor.call_at(time.monotonic() + _HOLD, another)
            while self._role.unopened:
                self._deliver_next()
        with self._lock:
            ended, self._on_ended = self._on_ended, None
        if ended is None:
            return
        ended(self, why)
        for exchange in list(self._exchanges.values()):
            exchange.fail("connection closed")
        with self._lock:
            sleepers, self._role.sleeping = self._role.sleeping, {}
        for bell in sleepers.values():
            bell.ring()
        self.stop_using()

    def use(self) -> bool:
        """Whether this thread may use it, until `stop_using`: it is not over."""
        with self._lock:
            if self.has_ended:
                return False
            self._users += 1
            return True

    def stop_using(self) -> None:
        with self._lock:
            self._users -= 1
            is_last = self.has_ended and not self._users
        if is_last:
            with self.queue.lock:  # a writer notices the hang-up and leaves
                self.framed.close()


_DELIVERING = Connection._deliver_next.__code__
