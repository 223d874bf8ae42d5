"""Notes to other workers that can wait a moment, so that many go in one message.

Pure. Notes that were not answered are put back; saying them twice does no harm.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .ledger import Holding
from .messages import Notes


@dataclass(slots=True)
class Outbox:
    """What is still to be said, by worker."""

    _waiting: dict[int, Notes] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._waiting)

    def add_released(self, holding: Holding) -> None:
        self._for(holding.owner).released.append((holding.value, holding.fork))

    def add_received(self, sender: int, token: int) -> None:
        self._for(sender).received.append(token)

    def add_failed(self, owner: int, value: int, why: str) -> None:
        self._for(owner).failed.append((value, why))

    def take(self) -> dict[int, Notes]:
        """What is to be said now."""
        taken, self._waiting = self._waiting, {}
        return taken

    def put_back(self, worker: int, notes: Notes) -> None:
        """It was not answered."""
        again = self._for(worker)
        again.released.extend(notes.released)
        again.received.extend(notes.received)
        again.failed.extend(notes.failed)

    def worker_gone(self, worker: int) -> None:
        self._waiting.pop(worker, None)

    def _for(self, worker: int) -> Notes:
        return self._waiting.setdefault(worker, Notes([], [], []))
