"""Items deferred for a moment, so that they can be piggybacked on something else.

`Deferred` is the one mechanism for what can travel with something else: what has not after a moment
is handed on in one batch. (Notes about references never do, and must be acknowledged: they have a
notifier of their own.) The report that a context has ended waits for a request in this way
(`_autograd/context_release.py`), and so does, here, a request that creates a value for the one that
fetches it, so that both go in one message: at most one per worker. It is sent before the next
message to that worker, when a thread waits, or when it is late; unless its holder takes it back to
send it in another way. This is done only where it pays off: after a few requests in a row that
would have been taken back, until one is not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Generic, NamedTuple, TypeVar

from .._wire.frames import Parcel
from ..locks import CheckedLock
from ..threads import Executor
from .calls import Pending
from .members import Peer

T = TypeVar("T")

_HOLD = 0.01
_CONVINCING = 3


class Deferred(Generic[T]):
    """Items that wait for one to two periods; then those still `due` are given to `late`.

    Until then no thread but the monitor is woken, and without items not even that one.
    """

    def __init__(
        self,
        executor: Executor,
        period: float,
        *,
        due: Callable[[T], bool],
        late: Callable[[list[T]], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._executor = executor
        self._period = period
        self._due = due
        self._late = late
        self._clock = clock  # the one of the executor's timers
        self._lock = CheckedLock()
        self._new: list[T] = []
        self._old: list[T] = []  # that have waited for a period
        self._is_watched = False

    def add(self, item: T) -> None:
        with self._lock:
            self._new.append(item)
            watch, self._is_watched = not self._is_watched, True
        if watch:
            self._executor.look_at(self._clock() + self._period, self._look)

    def _look(self) -> None:
        with self._lock:
            late, self._old, self._new = self._old, self._new, []
            watch = self._is_watched = bool(self._old)
        if watch:
            self._executor.look_at(self._clock() + self._period, self._look)
        due = list(filter(self._due, late))
        if due:
            self._executor.submit(partial(self._late, due))


class Held(NamedTuple):
    """A request that has not been sent yet."""

    peer: Peer
    parcel: Parcel
    pending: Pending


class HeldBack:
    """The deferred requests of one worker."""

    def __init__(
        self,
        executor: Executor,
        send: Callable[[Held], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._send = send
        self._lock = CheckedLock()
        self.requests: dict[int, Held] = {}  # by the worker they go to
        self._deferred: Deferred[tuple[int, int]] = Deferred(
            executor, _HOLD, due=self._is_here, late=self._go_out, clock=clock
        )
        self._last = 0  # the last request that could be deferred
        self._streak = 0  # requests in a row for which it paid off

    def hold(self, held: Held) -> None:
        """Defer a request if that pays off, and send the one deferred before it."""
        with self._lock:
            before = self.requests.pop(held.peer.id, None)
            if before is not None or self._last:
                self._streak = 0  # it was not taken back
            self._last = held.pending.call
            pays = self._streak >= _CONVINCING
            if pays:
                self.requests[held.peer.id] = held
        if before is not None:
            self._send(before)
        if pays:
            self._deferred.add((held.peer.id, held.pending.call))
        else:
            self._send(held)

    def take(self, to: int, call: int) -> Held | None:
        """Take over a deferred request; None if it has been sent."""
        with self._lock:
            if call == self._last:
                self._last = 0
                self._streak += 1
            held = self.requests.get(to)
            if held is None or held.pending.call != call:
                return None
            return self.requests.pop(to)

    def drop(self, to: int) -> Held | None:
        """Drop what is deferred for a lost worker."""
        with self._lock:
            return self.requests.pop(to, None)

    def drop_all(self) -> list[Held]:
        with self._lock:
            held, self.requests = self.requests, {}
            return list(held.values())

    def flush(self, to: int) -> None:
        """Send what is deferred for a worker."""
        held = self.drop(to) if self.requests else None
        if held is not None:
            self._send(held)

    def flush_all(self) -> None:
        """Send everything that is deferred."""
        for to in list(self.requests):
            self.flush(to)

    def _is_here(self, item: tuple[int, int]) -> bool:
        """Whether a request has not been taken."""
        to, call = item
        held = self.requests.get(to)
        return held is not None and held.pending.call == call

    def _go_out(self, items: list[tuple[int, int]]) -> None:
        """Send what has not been taken: deferring it did not pay off."""
        with self._lock:
            self._streak = 0
        self.flush_all()
