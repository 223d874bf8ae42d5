"""Barrier and all-gather over workers, and quiescence detection at the end of a world.

The worker with the lowest id is the collector. Each worker sends it a part and gets all parts as
the response once they have arrived. Lost workers are not waited for; if the collector is lost, the
call fails, except at the end of the world, where the next one takes over.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch

from ..errors import CallTimeout, WorkerLostError
from ..ids import WorkerInfo
from ..locks import CheckedLock
from .agent import Agent
from .function_runner import Later
from .messages import GATHER, Gather

_LEAST = 0.001  # seconds: 0 would be no limit


@dataclass(slots=True)
class Gathering:
    """One all-gather in progress."""

    expected: set[int]
    parts: dict[int, Any] = field(default_factory=dict)
    waiting: list[Any] = field(default_factory=list)
    """What the driver answers when it is complete."""

    @property
    def is_complete(self) -> bool:
        return self.expected <= set(self.parts)


@dataclass(slots=True)
class Gatherings:
    """The all-gathers in progress at this worker."""

    _open: dict[str, Gathering] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._open)

    def part_came(
        self, key: str, worker: int, value: Any, *, expected: set[int], waiter: Any
    ) -> Gathering | None:
        """Add a part; returns the gathering if that completes it."""
        gathering = self._open.setdefault(key, Gathering(set(expected)))
        gathering.parts[worker] = value
        gathering.waiting.append(waiter)
        return self._close_if_complete(key)

    def worker_gone(self, worker: int) -> list[Gathering]:
        """The gatherings that the loss of a worker completes."""
        done = []
        for key, gathering in list(self._open.items()):
            gathering.expected.discard(worker)
            if gathering.parts and self._close_if_complete(key):
                done.append(gathering)
        return done

    def _close_if_complete(self, key: str) -> Gathering | None:
        return self._open.pop(key) if self._open[key].is_complete else None


class Party(Protocol):
    """One kind of work in flight from a worker, such as its calls."""

    @property
    def started(self) -> int:
        """How many have been started so far."""

    def wait_quiet(self, deadline: float | None = None) -> bool:
        """Wait until all have completed; False if not before the deadline."""


class Collectives:
    """This worker's side of collective operations."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._gatherings = Gatherings()
        self._lock = CheckedLock()
        self._numbers = itertools.count()
        agent.handle(GATHER, Gather, self._part_came, may_be_last=True)
        agent.gone.subscribe(self._worker_gone)

    def all_gather(self, value: Any, timeout: float | None = None) -> dict[str, Any]:
        """The `value` of every worker, by name. All workers call it, in the same order."""
        key = f"user/{next(self._numbers)}"
        return self._gather(self._collector(), key, value, timeout)

    def barrier(self, timeout: float | None = None) -> None:
        """Wait until all workers have called it."""
        self.all_gather(None, timeout)

    def settle(self, parties: Sequence[Party], timeout: float | None) -> None:
        """Wait until all workers are ready to leave and nothing is in flight anywhere.

        That holds once each worker was quiet in two rounds and started nothing in between. The
        count is taken before waiting for quiet: everything that it includes has then completed.

        Raises:
            CallTimeout: it did not hold in time.
        """
        deadline = time.monotonic() + timeout if timeout else None
        before: dict[str, int] = {}
        rounds: Counter[int] = Counter()  # by collector: each starts anew, for all
        while True:
            started = sum(party.started for party in parties)
            self.wait_quiet(parties, deadline, timeout)
            collector = self._collector()
            key = f"end/{collector}/{rounds[collector]}"
            rounds[collector] += 1
            try:
                left = max(deadline - time.monotonic(), _LEAST) if deadline else 0.0
                now = self._gather(collector, key, started, left)
            except WorkerLostError:
                now = {}  # another collects next time
            except CallTimeout:
                raise self._late(
                    timeout, "not all workers have come to the end"
                ) from None
            if now and now == before:
                return
            before = now

    def wait_quiet(
        self, parties: Sequence[Party], deadline: float | None, timeout: float | None
    ) -> None:
        """Wait until nothing that was started here is in flight.

        Raises:
            CallTimeout: not before the deadline.
        """
        for party in parties:
            if not party.wait_quiet(deadline):
                raise self._late(
                    timeout, "calls or notes from here are still in flight"
                )

    def _late(self, timeout: float | None, why: str) -> CallTimeout:
        return CallTimeout("shutdown", self._agent.me.name, timeout or 0.0, why)

    def _collector(self) -> int:
        return self._agent.members.cards()[0].id

    def _gather(
        self, collector: int, key: str, value: Any, timeout: float | None
    ) -> dict[str, Any]:
        message = Gather(key, value)
        parts = self._agent.request(collector, message, timeout).wait()
        return {self._agent.members.name(worker): part for worker, part in parts}

    def _part_came(self, sender: int, message: Gather) -> Later:
        future: torch.futures.Future[Any] = torch.futures.Future()
        own = sender == self._agent.me.id
        with self._lock:  # also for the members: `_worker_gone` runs before or after
            expected = {card.id for card in self._agent.members.cards()}
            complete = self._gatherings.part_came(
                message.key,
                sender,
                message.value,
                expected=expected,
                waiter=(own, future),
            )
        if complete is not None:
            # When this one gets its response as well: it may leave right after its own.
            return Later(future, partial(_answer, complete))
        if own:
            self._agent.watch_over_all()  # one that died long ago is not reported
        return Later(future)

    def _worker_gone(self, worker: WorkerInfo) -> None:
        with self._lock:
            complete = self._gatherings.worker_gone(worker.id)
        for gathering in complete:
            _answer(gathering)


def _answer(gathering: Gathering) -> None:
    parts = sorted(gathering.parts.items())
    # Its own part last: this worker may leave right after it.
    for _, future in sorted(gathering.waiting, key=lambda waiter: waiter[0]):
        future.set_result(parts)
