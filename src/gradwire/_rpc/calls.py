"""Calls in flight, as known to the caller.

Pure: no I/O, no locks, no clock. `caller.py` carries out what follows and holds the lock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Pending:
    """A call that waits for its response."""

    call: int
    to: int
    timeout: float
    deadline: float
    answer: Any
    """What the driver completes."""
    freight: Sequence[Any] = ()
    """What upper layers track about the request."""


@dataclass(slots=True)
class CallsInFlight:
    """Each call leaves the table exactly once: answered, expired, or lost with its worker."""

    _pending: dict[int, Pending] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._pending)

    def __iter__(self) -> Iterator[Pending]:
        return iter(list(self._pending.values()))

    def started(self, pending: Pending) -> None:
        self._pending[pending.call] = pending

    def answered(self, call: int) -> Pending | None:
        """The call that this responds to; None if it is no longer in flight."""
        return self._pending.pop(call, None)

    def expired(self, now: float) -> list[Pending]:
        """Remove and return the calls whose deadline has passed."""
        return self._take([p for p in self._pending.values() if p.deadline <= now])

    def worker_lost(self, worker: int) -> list[Pending]:
        """Remove and return the calls in flight to a lost worker."""
        return self._take([p for p in self._pending.values() if p.to == worker])

    def next_deadline(self) -> float:
        deadlines = (p.deadline for p in self._pending.values())
        return min(deadlines, default=float("inf"))

    def _take(self, calls: list[Pending]) -> list[Pending]:
        for pending in calls:
            del self._pending[pending.call]
        return calls
