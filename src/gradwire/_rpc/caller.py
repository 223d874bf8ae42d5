"""The caller's side: sends requests, tracks those in flight, completes their futures.

The table of calls in flight is pure (`calls.py`); its lock is never held while sending or running
user code. A call ends exactly once: by its response, its deadline, or the loss of its worker.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.jit import ScriptFunction

from .. import streams
from .._transport.base import NotConnected, Transport
from .._wire.device_maps import names_in
from .._wire.failures import revive_failure
from .._wire.frames import Frame, Freight, Parcel
from .._wire.functions import describe
from .._wire.messages import RESULT, Call, Failure
from ..errors import (
    CallTimeout,
    ClosedError,
    GradwireError,
    StaleReferenceError,
    WorkerLostError,
)
from ..locks import CheckedLock
from ..options import Options, check_timeout
from ..threads import Bell, Executor
from . import torch_modes
from .calls import CallsInFlight, Pending
from .deferred_requests import Held, HeldBack
from .futures import CallFuture, Fate, fresh_copy, settle
from .interceptors import InterceptedCodec
from .members import Peer

_MARGIN = 0.05  # seconds before the deadline of a call when connecting stops
_FOR_EVER = float("inf")
_NO_LIMIT = (0, _FOR_EVER)


class Caller:
    """Calls from one worker."""

    def __init__(
        self,
        me: int,
        *,
        options: Options,
        executor: Executor,
        transport: Transport,
        codec: InterceptedCodec,
    ) -> None:
        self.timeout_error = CallTimeout
        """What is raised when a call takes too long, or a subclass of it."""
        self._me = me
        self._default_timeout = options.timeout
        self._executor = executor
        self._transport = transport
        self._codec = codec
        self._attend = self._wait_for  # one bound method for all futures
        self._lock = CheckedLock()
        self._calls = CallsInFlight()
        self._held = HeldBack(executor, self._start)
        self._readers: dict[int, int] = {}  # by call, the thread that reads for it
        self._opening: set[int] = set()  # calls whose response has arrived, undecoded
        self._exchanging: dict[int, int] = {}  # by call, the worker waited for
        self._exchanges = 0  # so far
        self._posted = 0  # users' calls posted so far
        self._alarm = _FOR_EVER
        self._closed = False

    @property
    def in_flight(self) -> int:
        return len(self._calls) + len(self._exchanging)

    @property
    def started(self) -> int:
        """How many calls users have made from here."""
        return self._posted + self._exchanges

    def answers(self) -> list[CallFuture]:
        """The futures of all asynchronous requests in flight."""
        with self._lock:
            return [pending.answer for pending in self._calls]

    def underway(self, to: int) -> set[int]:
        """The calls in flight to a worker."""
        with self._lock:
            posted = {pending.call for pending in self._calls if pending.to == to}
            waits = {call for call, at in self._exchanging.copy().items() if at == to}
            return posted | waits | self._opening

    def call_sync(
        self, peer: Peer, call: Call, timeout: float | None, meanwhile: Any = None
    ) -> Any:
        """Call and wait; `meanwhile` is called once the request has been sent."""
        parcel = self._codec.call(call, peer.manner)
        parcel.meanwhile = meanwhile
        return self.exchange(peer, parcel, call.function, timeout)

    def call_async(self, peer: Peer, call: Call, timeout: float | None) -> CallFuture:
        """Call; returns a future of the result."""
        parcel = self._codec.call(call, peer.manner)
        return self.post(peer, parcel, call.function, timeout, calls=1)

    def call_soon(
        self,
        peer: Peer,
        call: Call,
        timeout: float | None,
        make: Callable[..., CallFuture],
    ) -> CallFuture:
        """Call; returns a future of the result, created by `make`.

        The request is deferred for a moment if possible; it may be taken back (`take_held`).
        """
        parcel = self._codec.call(call, peer.manner)
        held = self._request(peer, parcel, call.function, timeout, make)
        if not parcel.bulk_length and peer.id != self._me:
            self._held.hold(held)
        else:
            self._held.flush(peer.id)
            self._start(held, 1)
        future: CallFuture = held.pending.answer
        return future

    def exchange(
        self,
        peer: Peer,
        parcel: Parcel,
        what: Any,
        timeout: float | None,
        is_over: Callable[[], bool] | None = None,
        number: int | None = None,
    ) -> Any:
        """Send a request and wait for its response."""
        seconds = self._default_timeout if timeout is None else check_timeout(timeout)
        if self._held.requests:
            self._held.flush(peer.id)
        number = peer.next_call() if number is None else number
        self._exchanges += 1
        self._exchanging[number] = peer.id
        frame = None
        try:
            try:
                limit = None if seconds in _NO_LIMIT else time.monotonic() + seconds
                frame = self._transport.exchange(
                    peer.card, number, parcel, deadline=limit, is_over=is_over
                )
            except TimeoutError as error:
                reason = why_not_connected(error)
                raise self._late(what, peer, seconds, reason) from None
            except WorkerLostError as error:
                if self._closed:  # this worker has left
                    raise ClosedError("this worker was shut down") from error
                raise
            value = self._open(peer, what, frame)
            if streams.in_use:
                streams.take(value)
            if frame.waits:
                after(frame, limit, lambda: self._late(what, peer, seconds))
            return value
        finally:
            del self._exchanging[number]  # atomic, as is copying it: needs no lock
            if parcel.freight:
                arrived = frame is not None and frame.kind == RESULT
                account(parcel.freight, arrived=arrived)

    def post(
        self,
        peer: Peer,
        parcel: Parcel,
        what: Any,
        timeout: float | None,
        *,
        calls: int = 0,
    ) -> CallFuture:
        """Send a request; returns the future of its response. Counts as that many user calls."""
        held = self._request(peer, parcel, what, timeout, CallFuture)
        self._held.flush(peer.id)
        self._start(held, calls)
        future: CallFuture = held.pending.answer
        return future

    def take_held(self, future: CallFuture) -> Held | None:
        """Take over the deferred request behind this future, if it has not been sent yet."""
        return self._held.take(future.to, future.call)

    def ask_held(self, held: Held, kind: int, timeout: float | None) -> Any:
        """Send a deferred request as one of another kind, and wait for its response.

        The future of the original request is done when the response is there.
        """
        held.parcel.kind = kind
        future: CallFuture = held.pending.answer
        what, left = future.fate.what, future.deadline - time.monotonic()
        seconds = self._seconds(timeout) or _FOR_EVER
        try:
            number = held.pending.call
            value = self.exchange(
                held.peer, held.parcel, what, min(seconds, left), number=number
            )
        except CallTimeout as error:
            if left <= seconds:
                future.set_exception(fresh_copy(error))
                raise
            raise type(error)(error.call, error.worker, seconds) from None
        except WorkerLostError as error:
            if error.worker == held.peer.name:  # and not of a reference in the response
                future.set_exception(fresh_copy(error))
            raise
        finally:
            if not future.done():
                future.set_result(None)
        return value

    def local_future(self, what: Any, worker: str) -> CallFuture:
        """A future that is completed locally."""
        return CallFuture(0, self._me, _FOR_EVER, self._attend, Fate(what, worker))

    def complete(self, peer: Peer, frame: Frame) -> None:
        """A response has arrived."""
        with self._lock:
            pending = self._calls.answered(frame.call)
            if pending is None:
                return  # late, or a duplicate
            self._opening.add(frame.call)
        account(pending.freight, arrived=frame.kind == RESULT)
        future, call = pending.answer, frame.call
        try:
            value = self._open(peer, future.fate.what, frame)
        except Exception as error:  # noqa: BLE001 user code
            self._opening.discard(call)
            future.set_exception(error)
            return
        if not frame.waits:
            self._opening.discard(call)
            future.set_result(value)
            return

        def outcome() -> Any:
            limit = None if pending.deadline == _FOR_EVER else pending.deadline
            after(frame, limit, lambda: too_late(pending, self.timeout_error))
            return value

        def finish() -> None:
            try:
                settle(future, outcome)
            finally:
                self._opening.discard(call)

        self._executor.submit(finish)  # not here: this thread reads for others too

    def worker_gone(self, worker: int, reason: str) -> None:
        """Fail the calls in flight to a worker that is lost."""
        with self._lock:
            orphans = self._calls.worker_lost(worker)
        held = self._held.drop(worker)
        if held is not None:
            orphans.append(held.pending)
        for pending in orphans:
            fail(pending, WorkerLostError(pending.answer.fate.worker, reason))

    def close(self) -> None:
        """Fail everything in flight."""
        self._closed = True
        with self._lock:
            orphans = [p for p in self._calls if self._calls.answered(p.call)]
        for pending in [*orphans, *(held.pending for held in self._held.drop_all())]:
            fail(pending, ClosedError("this worker was shut down"))

    def wait_quiet(self, deadline: float | None = None) -> bool:
        """Wait until nothing is in flight from here; False if not before the deadline."""
        self._held.flush_all()
        for pending in self._calls:
            self._wait_for(pending.answer, deadline)
            if not pending.answer.done():
                return False
        while self._exchanging or self._opening:  # by other threads of this process
            if deadline is not None and time.monotonic() >= deadline:
                return False
            time.sleep(0.001)
        return True

    def _seconds(self, timeout: float | None) -> float:
        return self._default_timeout if timeout is None else check_timeout(timeout)

    def _request(
        self,
        peer: Peer,
        parcel: Parcel,
        what: Any,
        timeout: float | None,
        make: Callable[..., CallFuture],
    ) -> Held:
        """A request that has not been sent yet."""
        seconds = self._seconds(timeout)
        deadline = time.monotonic() + seconds if seconds else _FOR_EVER
        call = peer.next_call()
        future = make(call, peer.id, deadline, self._attend, Fate(what, peer.name))
        pending = Pending(call, peer.id, seconds, deadline, future, parcel.freight)
        return Held(peer, parcel, pending)

    def _start(self, held: Held, calls: int = 1) -> None:
        """Send a request and register it as in flight."""
        pending = held.pending
        deadline = pending.deadline
        with self._lock:
            self._posted += calls
            self._calls.started(pending)
            sooner = deadline < self._alarm
            if sooner:
                self._alarm = deadline
        if sooner:
            self._executor.call_at(deadline, self._expire)
        if pending.timeout:  # before the alarm, which could not give the reason
            deadline -= min(_MARGIN, pending.timeout / 10)
        self._send(held.peer, pending.call, held.parcel, deadline)

    def _send(self, peer: Peer, call: int, parcel: Parcel, deadline: float) -> None:
        try:
            limit = None if deadline == _FOR_EVER else deadline
            self._transport.post(peer.card, call, parcel, limit)
        except (GradwireError, TimeoutError) as error:
            with self._lock:
                pending = self._calls.answered(call)
            if pending is None:
                return
            if isinstance(error, GradwireError):
                fail(pending, error)
            else:
                why = why_not_connected(error)
                fail(pending, too_late(pending, self.timeout_error, why))

    def _wait_for(self, future: CallFuture, deadline: float | None) -> None:
        """Wait until a future is done, or the deadline."""
        self._held.flush_all()
        while not future.done():
            if deadline is not None and time.monotonic() >= deadline:
                return
            until = min(future.deadline, deadline or _FOR_EVER)
            limit = None if until == _FOR_EVER else until
            if future.to != self._me:
                self._read_for(future, limit)
            self._expire()
            if not future.done():
                self._sleep(future, limit)

    def _read_for(self, future: CallFuture, deadline: float | None) -> None:
        """Read the connection for all waiting threads, if no other thread does."""
        me = threading.get_ident()
        if self._readers.setdefault(future.call, me) != me:
            return
        try:
            self._transport.attend(future.to, future.call, future, deadline)
        finally:
            self._readers.pop(
                future.call, None
            )  # a signal handler may have waited as well

    def _sleep(self, future: CallFuture, deadline: float | None) -> None:
        """Wait without a connection to read from."""
        bell = Bell()
        future.on_done(bell.ring)
        with self._executor.waiting():
            bell.wait_until(deadline)
        self._expire()

    def _expire(self) -> None:
        """Fail the calls whose deadline has passed."""
        now = time.monotonic()
        with self._lock:
            if now < self._alarm:
                return
            late = self._calls.expired(now)
            self._alarm = self._calls.next_deadline()
        if self._alarm < _FOR_EVER:
            self._executor.call_at(self._alarm, self._expire)
        for pending in late:
            fail(pending, too_late(pending, self.timeout_error))

    def _late(
        self, what: Any, peer: Peer, seconds: float, reason: str = ""
    ) -> CallTimeout:
        return self.timeout_error(describe(what), peer.name, seconds, reason)

    def _open(self, peer: Peer, func: Any, frame: Frame) -> Any:
        """The result in a response; raises the exception in it."""
        try:
            message = self._codec.open(frame, peer.id)
        except (WorkerLostError, StaleReferenceError, torch.OutOfMemoryError):
            raise  # of a reference in it, or of its tensors
        except Exception as error:
            if type(error) is GradwireError:  # of a device's driver
                raise
            raise TypeError(
                f"the result of {describe(func)} on worker {peer.name!r} cannot be "
                f"decoded here: {type(error).__name__}: {error}"
            ) from error
        if type(message) is Failure:
            raise revive_failure(message, peer.name)
        return message.value


def after(
    frame: Frame, deadline: float | None, late: Callable[[], CallTimeout]
) -> None:
    """Wait until everything that the message in a frame depends on has completed.

    Raises:
        CallTimeout: what `late` returns: it has not by the deadline.
    """
    try:
        for wait in frame.waits:
            wait.wait(deadline)
    except TimeoutError:
        raise late() from None


def account(freights: Iterable[Freight], *, arrived: bool) -> None:
    """Report the outcome of a request to the upper layers that track it."""
    for freight in freights:
        if arrived:
            freight.delivered()
        else:
            freight.in_doubt()


def fail(pending: Pending, error: Exception) -> None:
    """Complete it with an error: there will be no response."""
    account(pending.freight, arrived=False)
    pending.answer.set_exception(error)


def why_not_connected(error: TimeoutError) -> str:
    """Why a request could not be sent; empty if it was."""
    return str(error) if isinstance(error, NotConnected) else ""


def too_late(
    pending: Pending, kind: type[CallTimeout], reason: str = ""
) -> CallTimeout:
    """The error of a call that timed out."""
    fate = pending.answer.fate
    return kind(describe(fate.what), fate.worker, pending.timeout, reason)


check_scripted: Callable[[Any, Any, Any], None] | None = None
"""Sees that a scripted function takes its arguments, where scripts may make calls (`script.py`)."""


def prepare(
    func: Any,
    args: Any,
    kwargs: Any,
    device_map: Mapping[Any, Any] | None = None,
    kind: type[Call] = Call,
    ids: tuple[int, ...] = (),
) -> Call:
    """A user's call, checked, with this thread's modes.

    Raises:
        ValueError: the device map makes no sense.
        TypeError: it cannot be called or passed; names what.
        RuntimeError: a scripted function does not take these arguments.
    """
    if not callable(func):
        raise TypeError(f"{func!r} cannot be called: give a function")
    if type(args) is not tuple:
        if args is not None and not isinstance(args, (tuple, list)):
            raise TypeError(f"args={args!r}: give a tuple, such as args=(x,)")
        args = tuple(args or ())
    if kwargs is None:
        kwargs = {}
    elif isinstance(kwargs, dict):
        kwargs = dict(kwargs)
    else:
        raise TypeError(f"kwargs={kwargs!r}: give a dict, such as kwargs={{'x': 1}}")
    if check_scripted is not None and type(func) is ScriptFunction:
        check_scripted(func, args, kwargs)
    call = kind(func, args, kwargs, torch_modes.capture(), ids)
    if device_map is not None:
        call.device_map = names_in(device_map)
    return call
