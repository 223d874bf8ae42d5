"""The caller's half: sends calls, keeps those in flight, completes their futures.

What is in flight is in a pure table (`calls.py`); its lock is never held while sending or running
user code. A call ends once: by its answer, by its deadline, or with the worker it went to.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable
from typing import Any

from ..errors import CallTimeout, ClosedError, GradwireError, WorkerLostError
from ..options import Options
from ..threads import Bell, Executor
from ..transport.base import Transport
from ..wire.codec import Codec, revive_failure
from ..wire.frames import Frame, Parcel
from ..wire.functions import describe
from ..wire.messages import Call, Failure
from . import modes
from .calls import CallsInFlight, Pending
from .futures import CallFuture, Fate
from .peers import Peer

_FOR_EVER = float("inf")


class Caller:
    """Calls from one worker. `deliver` takes the frames it sends to itself."""

    def __init__(
        self,
        me: int,
        *,
        options: Options,
        executor: Executor,
        transport: Transport,
        codec: Codec,
        deliver: Callable[[int, Frame], None],
    ) -> None:
        self.started = 0  # calls ever made from here
        self._me = me
        self._default_timeout = options.timeout
        self._executor = executor
        self._transport = transport
        self._codec = codec
        self._deliver = deliver
        self._attend = self._wait_for  # one bound method for all futures
        self._lock = threading.Lock()
        self._calls = CallsInFlight()
        self._readers: dict[int, int] = {}  # by call, the thread that reads for it
        self._exchanging = 0  # calls under way by lanes
        self._alarm = _FOR_EVER

    @property
    def in_flight(self) -> int:
        return len(self._calls) + self._exchanging

    def call_sync(
        self, peer: Peer, func: Any, args: Any, kwargs: Any, timeout: float | None
    ) -> Any:
        """Call and wait; by a lane of its own where there are lanes."""
        if not self._transport.has_lanes or peer.id == self._me:
            return self.call_async(peer, func, args, kwargs, timeout).wait()
        parcel = self._encode(peer, func, args, kwargs)
        seconds = self._seconds(timeout)
        with self._lock:
            self.started += 1
            self._exchanging += 1
        try:
            frame = self._transport.exchange(peer.card, parcel, seconds or None)
        except TimeoutError:
            raise CallTimeout(describe(func), peer.name, seconds) from None
        finally:
            with self._lock:
                self._exchanging -= 1
        return self._open(peer, func, frame)

    def call_async(
        self, peer: Peer, func: Any, args: Any, kwargs: Any, timeout: float | None
    ) -> CallFuture:
        """Call; the future of the result."""
        parcel = self._encode(peer, func, args, kwargs)
        return self.post(peer, parcel, func, timeout, calls=1)

    def post(
        self,
        peer: Peer,
        parcel: Parcel,
        what: Any,
        timeout: float | None,
        *,
        calls: int = 0,
    ) -> CallFuture:
        """Send a request; the future of its answer. It counts as so many calls of a user."""
        seconds = self._seconds(timeout)
        deadline = time.monotonic() + seconds if seconds else _FOR_EVER
        call = peer.next_call()
        future = CallFuture(
            call, peer.id, deadline, self._attend, Fate(what, peer.name)
        )
        with self._lock:
            self.started += calls
            self._calls.started(Pending(call, peer.id, seconds, deadline, future))
            sooner = deadline < self._alarm
            if sooner:
                self._alarm = deadline
        if sooner:
            self._executor.call_at(deadline, self._expire)
        self._send(peer, call, parcel, deadline)
        return future

    def complete(self, peer: Peer, frame: Frame) -> None:
        """An answer came."""
        with self._lock:
            pending = self._calls.answered(frame.call)
        if pending is None:
            return  # too late, or repeated
        future = pending.answer
        try:
            value = self._open(peer, future.fate.what, frame)
        except Exception as error:  # noqa: BLE001 user code
            future.set_exception(error)
        else:
            future.set_result(value)

    def worker_gone(self, worker: int, reason: str) -> None:
        """Fail what waits for a worker that is no more."""
        with self._lock:
            orphans = self._calls.worker_lost(worker)
        for pending in orphans:
            error = WorkerLostError(pending.answer.fate.worker, reason)
            pending.answer.set_exception(error)

    def close(self) -> None:
        """Fail what is in flight."""
        with self._lock:
            orphans = [p for p in self._calls if self._calls.answered(p.call)]
        for pending in orphans:
            pending.answer.set_exception(ClosedError("this worker was shut down"))

    def wait_quiet(self) -> None:
        """Wait until nothing is in flight from here."""
        for pending in self._calls:
            self._wait_for(pending.answer, None)
        while self._exchanging:
            time.sleep(0.001)  # other threads of this process; each ends by itself

    def _encode(self, peer: Peer, func: Any, args: Any, kwargs: Any) -> Parcel:
        if not callable(func):
            raise TypeError(f"{func!r} cannot be called: give a function")
        if args is not None and not isinstance(args, (tuple, list)):
            raise TypeError(f"args={args!r}: give a tuple, such as args=(x,)")
        if kwargs is not None and not isinstance(kwargs, dict):
            raise TypeError(
                f"kwargs={kwargs!r}: give a dict, such as kwargs={{'x': 1}}"
            )
        call = Call(func, tuple(args or ()), dict(kwargs or {}), modes.capture())
        try:
            return self._codec.call(call, peer.manner)
        except (RecursionError, pickle.PicklingError) as error:
            if "recursion" not in str(error):
                raise
            raise TypeError(f"arguments of {describe(func)} nest too deep") from error

    def _seconds(self, timeout: float | None) -> float:
        if timeout is None:
            return self._default_timeout
        if timeout < 0:
            raise ValueError(f"timeout={timeout!r}: give seconds, or 0 for none")
        return timeout

    def _send(self, peer: Peer, call: int, parcel: Parcel, deadline: float) -> None:
        if peer.id == self._me:
            frame = parcel.arrive(call)
            self._executor.submit(lambda: self._deliver(self._me, frame))
            return
        try:
            limit = None if deadline == _FOR_EVER else deadline
            self._transport.post(peer.card, call, parcel, limit)
        except GradwireError as error:
            self._fail(call, error)
        except TimeoutError:
            self._expire()

    def _fail(self, call: int, error: Exception) -> None:
        with self._lock:
            pending = self._calls.answered(call)
        if pending is not None:
            pending.answer.set_exception(error)

    def _wait_for(self, future: CallFuture, deadline: float | None) -> None:
        """Wait until a future is done, or the deadline."""
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
        """Take part in the reading: one of the threads that wait for a future does."""
        me = threading.get_ident()
        if self._readers.setdefault(future.call, me) != me:
            return
        try:
            self._transport.attend(future.to, future.call, future, deadline)
        finally:
            del self._readers[future.call]

    def _sleep(self, future: CallFuture, deadline: float | None) -> None:
        """Wait where there is no connection to read from."""
        bell = Bell()
        future.on_done(bell.ring)
        with self._executor.waiting():
            bell.wait_until(deadline)
        self._expire()

    def _expire(self) -> None:
        """Fail the calls whose time is up."""
        now = time.monotonic()
        with self._lock:
            if now < self._alarm:
                return
            late = self._calls.expired(now)
            self._alarm = self._calls.next_deadline()
        if self._alarm < _FOR_EVER:
            self._executor.call_at(self._alarm, self._expire)
        for pending in late:
            fate = pending.answer.fate
            error = CallTimeout(describe(fate.what), fate.worker, pending.timeout)
            pending.answer.set_exception(error)

    def _open(self, peer: Peer, func: Any, frame: Frame) -> Any:
        """What an answer says; raises what it says was raised."""
        try:
            message = self._codec.open(frame)
        except Exception as error:
            raise TypeError(
                f"the result of {describe(func)} on worker {peer.name!r} cannot be "
                f"decoded here: {type(error).__name__}: {error}"
            ) from error
        if type(message) is Failure:
            raise revive_failure(message, peer.name)
        return message.value
