"""All-gathers, as known to the worker that collects them.

Pure: no I/O, no locks. Everyone sends its part under a key; when all that are expected have come or
are lost, the gathering is complete and everyone is answered.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Gathering:
    """One all-gather under way."""

    expected: set[int]
    parts: dict[int, Any] = field(default_factory=dict)
    waiting: list[Any] = field(default_factory=list)
    """What the driver answers when it is complete."""

    @property
    def is_complete(self) -> bool:
        return self.expected <= set(self.parts)


@dataclass(slots=True)
class Gatherings:
    """Those under way at this worker."""

    _open: dict[str, Gathering] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._open)

    def part_came(
        self, key: str, worker: int, value: Any, *, expected: set[int], waiter: Any
    ) -> Gathering | None:
        """The gathering, if this part completed it."""
        gathering = self._open.setdefault(key, Gathering(set(expected)))
        gathering.parts[worker] = value
        gathering.waiting.append(waiter)
        return self._close_if_complete(key)

    def worker_gone(self, worker: int) -> list[Gathering]:
        """The gatherings that were waiting for no one else."""
        done = []
        for key, gathering in list(self._open.items()):
            gathering.expected.discard(worker)
            if gathering.parts and self._close_if_complete(key):
                done.append(gathering)
        return done

    def _close_if_complete(self, key: str) -> Gathering | None:
        return self._open.pop(key) if self._open[key].is_complete else None
