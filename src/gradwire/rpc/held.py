"""Requests that are held back for a moment, because what follows decides how they best travel.

At most one per worker. It goes out before the next message to that worker, when someone waits, or
`_HOLD` seconds later; unless whoever holds it takes it back, to send it in another way.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from ..threads import Executor
from ..wire.frames import Parcel
from .calls import Pending
from .peers import Peer

_HOLD = 0.002


class Held(NamedTuple):
    """A request that has not been sent yet."""

    peer: Peer
    parcel: Parcel
    pending: Pending


class HeldBack:
    """The requests of one worker that wait for the next; true if there are any."""

    def __init__(self, executor: Executor, send: Callable[[Held], None]) -> None:
        self._executor = executor
        self._send = send
        self._lock = threading.Lock()
        self._held: dict[int, Held] = {}
        self._flush_due = False

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, held: Held) -> None:
        """Keep a request back; the one before it goes out."""
        with self._lock:
            before = self._held.get(held.peer.id)
            self._held[held.peer.id] = held
            wake, self._flush_due = not self._flush_due, True
        if before is not None:
            before.parcel.can_wait = True
            self._send(before)
        if wake:
            self._executor.call_at(time.monotonic() + _HOLD, self._flush_late)

    def take(self, to: int, call: int) -> Held | None:
        """A call's request, if it has not gone out; then it does not."""
        with self._lock:
            held = self._held.get(to)
            if held is None or held.pending.call != call:
                return None
            return self._held.pop(to)

    def drop(self, to: int) -> Held | None:
        """What is held back for a worker that is no more."""
        with self._lock:
            return self._held.pop(to, None)

    def drop_all(self) -> list[Held]:
        with self._lock:
            held, self._held = self._held, {}
            return list(held.values())

    def flush(self, to: int) -> None:
        """Send what is held back for a worker."""
        held = self.drop(to)
        if held is not None:
            self._send(held)

    def flush_all(self) -> None:
        """Send all that is held back."""
        for to in list(self._held):
            self.flush(to)

    def _flush_late(self) -> None:
        self._flush_due = False
        self.flush_all()
