"""Requests that are deferred for a moment, so that the next one can travel in the same message.

At most one per worker. It goes out before the next message to that worker, when someone waits, or
`_HOLD` seconds later; unless whoever holds it takes it back, to send it in another way. It is only
done where it pays: after a few requests in a row that would have been taken back, until one is not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from .._wire.frames import Parcel
from ..locks import CheckedLock
from ..threads import Executor
from .calls import Pending
from .members import Peer

_HOLD = 0.01
_CONVINCING = 3


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
        self._executor = executor
        self._send = send
        self._clock = clock  # by which the executor's timers go
        self._lock = CheckedLock()
        self.requests: dict[int, Held] = {}  # by the worker they go to
        self._since: dict[int, float] = {}  # by worker
        self._last = 0  # the last request that could be held back
        self._streak = 0  # requests in a row of which it was worth it
        self._is_watched = False

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
                self._since[held.peer.id] = self._clock()
            watch = pays and not self._is_watched
            self._is_watched |= pays
        if before is not None:
            self._send(before)
        if not pays:
            self._send(held)
        if watch:
            self._executor.look_at(self._clock() + _HOLD, self._look)

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

    def _look(self) -> None:
        """A timer while requests are deferred: sends those that no one has taken."""
        now = self._clock()
        with self._lock:
            self._is_watched = bool(self._since)
            late = any(now - self._since[to] >= _HOLD for to in self.requests)
            self._since = {
                to: when for to, when in self._since.items() if to in self.requests
            }
            if late:
                self._streak = 0
        if late:
            self._executor.submit(self.flush_all)
        if self._is_watched:
            self._executor.look_at(now + _HOLD, self._look)
