"""Calls in flight, as known to the caller, and requests seen, as known to the callee.

Pure: no I/O, no locks, no clock. `agent.py` carries out what follows and holds the lock.
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
    """What upper layers keep books about in the request."""


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


@dataclass(slots=True)
class Seen:
    """Which request numbers have arrived. Only the gaps below the highest one are stored.

    With `most`, no more than so many are kept above the lowest gap: older ones count as come. Some
    numbers never come, say of what could not be sent; so they go many at a time, or each that
    comes would have to look for the oldest.
    """

    _below: int = 1
    """All numbers below this one have come."""
    _above: set[int] = field(default_factory=set)
    most: int | None = None

    def __contains__(self, call: int) -> bool:
        return call < self._below or call in self._above

    def is_new(self, call: int) -> bool:
        """Whether this number is new; records it."""
        if call in self:
            return False
        if call != self._below:
            self._above.add(call)
            if self.most is None or len(self._above) <= self.most:
                return True
            kept = sorted(self._above)
            kept = kept[len(kept) // 16 :]
            self._above = set(kept)
            self._below = kept[0] - 1  # what never came will not come any more
        self._below += 1
        while self._below in self._above:
            self._above.remove(self._below)
            self._below += 1
        return True
