"""The forks that one worker has of others' values, and the references it has sent on.

Keeps the books of `UserLedger` and what is to be said because of them (`Outbox`); `notifier.py`
does the saying. References sent in a request are accounted for by its answer. Those in a reply are
by a note of the receiver; if it does not come, or the answer leaves doubt, the receiver is asked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from .._rpc.futures import CallFuture
from ..ids import WorkerInfo
from ..locks import CheckedLock
from .adoption import Adoption
from .ledger import Holding, Transit, UserLedger
from .messages import Notes
from .owned_values import OwnedValues


class Creation(CallFuture):
    """The outcome of the call that creates a value."""

    def __init__(
        self,
        failed: Callable[[Exception], None],
        explain: Callable[[Exception], Exception],
        *args: Any,
    ) -> None:
        super().__init__(*args)
        self._failed = failed
        self._explain = explain

    def set_exception(self, result: Exception) -> None:
        super().set_exception(self._explain(result))
        self._failed(result)


class Fork:
    """This worker's hold on another worker's value."""

    __slots__ = ("_let_go", "adoption", "creation", "holding", "owner")

    def __init__(
        self,
        holding: Holding,
        owner: WorkerInfo,
        let_go: Callable[[tuple[int, int]], None],
    ) -> None:
        self.holding = holding
        self.owner = owner
        self.creation: CallFuture | None = None
        """The call that makes the value, until it is known to have been made."""
        self.adoption: Adoption | None = None
        """Its registration with the owner, if another holder made it."""
        self._let_go = let_go

    def __del__(self) -> None:
        # From any thread, in the middle of anything: this must take no lock.
        if self.adoption is not None:
            self.adoption.is_over = True
        self._let_go((self.holding.owner, self.holding.fork))

    @property
    def id(self) -> int:
        return self.holding.value

    @property
    def is_confirmed(self) -> bool:
        """Whether the owner has the value.

        Raises:
            Exception: why there will be no value.
        """
        creation = self.creation  # another thread may be here as well
        if creation is not None:
            if not creation.done():
                return False
            creation.value()
            self.creation = None
        return True

    def register(self) -> None:
        """Wait until the owner has registered this fork.

        Raises:
            StaleReferenceError: the value is gone.
            WorkerLostError: the owner is gone.
        """
        if self.adoption is not None:
            self.adoption.wait()

    @property
    def is_registered(self) -> bool:
        """Whether the owner is known to have registered this fork."""
        return self.adoption is None or self.adoption.is_over

    @property
    def state(self) -> str:
        try:
            return "confirmed" if self.is_confirmed else "pending"
        except Exception as error:  # noqa: BLE001 whatever the creating call met with
            return f"failed: {type(error).__name__}"


PATIENCE = 10.0  # seconds before the receiver of a response is asked about it


class HeldForks:
    """All forks that one worker holds.

    Handles are dropped anywhere, also while a lock is held, because Python's garbage collector runs
    anywhere. So a dropped handle is only put into `events`, a queue that may be written to at any
    point; None in it means that there are notes to send.
    """

    def __init__(self, me: int, owned_values: OwnedValues) -> None:
        self.events: SimpleQueue[tuple[int, int] | None] = SimpleQueue()
        self.watch: Callable[[], None] = lambda: None
        """Sees to it that the queue is read (`notifier.py`)."""
        self._me = me
        self._owned_values = owned_values
        self._lock = CheckedLock()
        self._ledger = UserLedger(me)
        self._outbox = Outbox()
        self._doubts: dict[int, float] = {}  # by token: when to ask
        self._expected: set[int] = set()  # tokens of what may still arrive
        self._gone: set[int] = set()

    def __repr__(self) -> str:
        return f"<HeldForks of {len(self._ledger)} forks>"

    def new_fork(self, owner: int) -> int:
        with self._lock:
            return self._ledger.new_fork(owner)

    def wake(self) -> None:
        """Wake the notifier: there are notes to send."""
        self.watch()
        self.events.put(None)

    def create(self, owner: WorkerInfo, made_at: str) -> Fork:
        """The first fork of a value that a call will create; `made_at` is a line of code."""
        self.watch()
        with self._lock:
            number = self._ledger.new_fork(owner.id)
            holding = Holding(owner.id, number, number)
            self._ledger.fork_came(holding, made_at)
        return Fork(holding, owner, self.events.put)

    def child_came(self, sender: int, token: int) -> bool:
        """Whether an arriving reference may be accepted."""
        with self._lock:
            return self._ledger.child_came(sender, token)

    def take(
        self, holding: Holding, owner: WorkerInfo, made_at: str, *, is_counted: bool
    ) -> Fork:
        """Take over a fork that arrived; whether the owner has registered it."""
        self.watch()
        with self._lock:
            if holding.owner not in self._gone:
                self._ledger.fork_came(holding, made_at, is_counted=is_counted)
        return Fork(holding, owner, self.events.put)

    def fork_counted(self, holding: Holding) -> None:
        """The owner has registered it."""
        with self._lock:
            self._ledger.fork_counted(holding.owner, holding.fork)

    def child_left(self, transit: Transit) -> int:
        """A token for a departing reference."""
        with self._lock:
            token = self._ledger.child_left(transit)
            if transit.is_reply:
                self._doubts[token] = time.monotonic() + PATIENCE
        if transit.is_reply:
            self.wake()
        return token

    def child_settled(self, token: int, arrived: bool) -> None:
        """It has arrived, or never will."""
        with self._lock:
            self._doubts.pop(token, None)
            self._expected.discard(token)
            over = self._ledger.child_settled(token, arrived)
        self._release(over)

    def child_doubted(self, token: int) -> None:
        """It is unknown whether it arrived: ask the receiver."""
        with self._lock:
            self._doubts[token] = time.monotonic()
        self.wake()

    def child_expected(self, token: int, ask_after: float) -> None:
        """The receiver says that it may still arrive: ask again."""
        with self._lock:
            if token in self._ledger.transits():  # and not settled meanwhile
                self._doubts[token] = time.monotonic() + ask_after
                self._expected.add(token)

    def child_received(self, sender: int, token: int) -> None:
        """Acknowledge a reference in a response to its sender."""
        with self._lock:
            self._outbox.add_received(sender, token)
        self.wake()

    def creation_failed(self, holding: Holding, why: str) -> None:
        """Tell the owner that the call which creates a value will not arrive."""
        with self._lock:
            self._outbox.add_failed(holding.owner, holding.value, why)
        self.wake()

    def fork_asked(
        self, asker: int, token: int, key: tuple[int, int], underway: set[int]
    ) -> bool | None:
        with self._lock:
            return self._ledger.fork_asked(asker, token, key, underway)

    def handles_dropped(self, forks: Iterable[tuple[int, int]]) -> None:
        with self._lock:
            over = [h for key in forks for h in self._ledger.handle_dropped(*key)]
        self._release(over)

    def worker_gone(self, worker: int) -> None:
        with self._lock:
            self._gone.add(worker)
            self._outbox.worker_gone(worker)
            over = self._ledger.worker_gone(worker)
            self._expected.intersection_update(self._ledger.transits())
        self._release(over)

    # For the notifier

    def take_notes(self) -> dict[int, Notes]:
        with self._lock:
            return self._outbox.take()

    def put_back(self, worker: int, notes: Notes) -> None:
        with self._lock:
            if worker not in self._gone:
                self._outbox.put_back(worker, notes)

    def take_doubts(self, until: float) -> dict[int, Transit]:
        """The references in doubt whose receivers should be asked now, by token."""
        now = time.monotonic()
        with self._lock:
            due = [
                token
                for token, when in self._doubts.items()
                if when <= (now if token in self._expected else until)
            ]
            transits = self._ledger.transits() if due else {}
            for token in due:
                del self._doubts[token]
            return {token: transits[token] for token in due if token in transits}

    @property
    def has_doubts(self) -> bool:
        return bool(self._doubts)

    @property
    def is_quiet(self) -> bool:
        """Whether all notes are sent, and only expected references are in transit."""
        with self._lock:
            return not self._outbox and self._expected.issuperset(
                self._ledger.transits()
            )

    def holdings(self) -> dict[Holding, str]:
        with self._lock:
            return self._ledger.holdings()

    def transits(self) -> list[Transit]:
        with self._lock:
            return list(self._ledger.transits().values())

    def _release(self, holdings: list[Holding]) -> None:
        own = [(h.value, h.fork) for h in holdings if h.owner == self._me]
        if own:
            self._owned_values.release(own)
        others = [h for h in holdings if h.owner != self._me]
        if others:
            with self._lock:
                for holding in others:
                    self._outbox.add_released(holding)
            self.wake()


@dataclass(slots=True)
class Outbox:
    """Notes that have not been sent yet, by worker."""

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
        """Take the notes to send now."""
        taken, self._waiting = self._waiting, {}
        return taken

    def put_back(self, worker: int, notes: Notes) -> None:
        """Put notes back that were not acknowledged."""
        again = self._for(worker)
        again.released.extend(notes.released)
        again.received.extend(notes.received)
        again.failed.extend(notes.failed)

    def worker_gone(self, worker: int) -> None:
        self._waiting.pop(worker, None)

    def _for(self, worker: int) -> Notes:
        return self._waiting.setdefault(worker, Notes([], [], []))
