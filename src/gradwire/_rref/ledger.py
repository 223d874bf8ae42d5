"""The ledgers of references: who holds what, and when a value may be dropped.

Pure: no I/O, no locks, no clock. Events come in as method calls, what must follow goes out as
return values, which `service.py` carries out. Two invariants, from docs/protocol.md:

G1  The owner counts a fork in before it counts it out, in whatever order the messages arrive.
G2  A value is dropped exactly once, when its last holder has released it or is gone.

The owner keeps G1 by remembering which forks are over; since every fork is over eventually, `Seen`
makes that a few numbers per worker. A fork that arrives after its own release is not counted in at
all. The holders keep G2: one that has passed a reference on does not release its own before the
other is counted in, or is known never to be. That is known when the receiver has answered that the
reference is not there; from then on the receiver rejects it, should it arrive after all.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from .._rpc.members import Seen
from .messages import fork_id, maker_of, number_of


class Holding(NamedTuple):
    """A fork of a value, as its holder and its owner know it."""

    owner: int
    value: int
    fork: int


class Transit(NamedTuple):
    """A reference in transit to another worker."""

    child: Holding
    """What the receiver will have; fork 0 if it is the owner, who needs none."""
    parent: int
    """The sender's own fork; 0 if the sender is the owner."""
    to: int
    is_reply: bool


@dataclass(slots=True)
class OwnerLedger:
    """Who holds the values of one worker."""

    _holders: dict[int, dict[int, int]] = field(default_factory=dict)
    """By value: its forks, and who has each."""
    _over: dict[int, Seen] = field(default_factory=lambda: defaultdict(Seen))
    """By maker: the forks that are over."""
    _gone: set[int] = field(default_factory=set)

    def __len__(self) -> int:
        return len(self._holders)

    def holders(self, value: int) -> dict[int, int]:
        """The forks of a value, and the holder of each."""
        return dict(self._holders.get(value, {}))

    def is_over(self, fork: int) -> bool:
        """Whether a fork has been released; a first fork's value is not created again."""
        return number_of(fork) in self._over[maker_of(fork)]

    def was_given(self, value: int, fork: int, worker: int) -> bool:
        """Whether a worker has this fork; 0 for any. A value's creator may ask earlier."""
        holders = self._holders.get(value, {})
        if maker_of(value) == worker and fork in (0, value):
            return not self.is_over(value) or worker in holders.values()
        return holders.get(fork) == worker if fork else worker in holders.values()

    def can_pass_on(self, value: int, worker: int) -> bool:
        """Whether a worker may have created a fork for another: it has one, or is gone."""
        return worker in self._gone or self.was_given(value, 0, worker)

    def may_release(self, value: int, fork: int, worker: int) -> bool:
        """Whether this worker may release a fork: its own, or one that it created."""
        holder = self._holders.get(value, {}).get(fork, worker)
        return worker in (holder, maker_of(fork))

    def may_come(self, value: int) -> bool:
        """Whether a missing value may still be created by its creator's call."""
        return maker_of(value) not in self._gone and not self.is_over(value)

    def fork_added(self, value: int, fork: int, holder: int) -> bool:
        """Register a fork; whether it counts, as the value exists or may still come."""
        if holder in self._gone or self.is_over(fork):
            return False
        self._holders.setdefault(value, {})[fork] = holder
        return True

    def fork_released(self, value: int, fork: int) -> bool:
        """Release a fork; whether it was the last one, so that the value must be dropped."""
        if not self._over[maker_of(fork)].is_new(number_of(fork)):
            return False
        holders = self._holders.get(value)
        if holders is None:
            return False  # it was never counted in, and will not be
        holders.pop(fork, None)
        if not holders:
            del self._holders[value]
        return not holders

    def worker_gone(self, worker: int) -> list[int]:
        """Remove a lost worker; the values to drop, which only it held."""
        self._gone.add(worker)
        forks = [
            (value, fork)
            for value, holders in self._holders.items()
            for fork, holder in holders.items()
            if holder == worker
        ]
        return [value for value, fork in forks if self.fork_released(value, fork)]


@dataclass(slots=True)
class _Held:
    """A fork that this worker has."""

    holding: Holding
    made_at: str
    """The line of code, for people."""
    is_counted: bool
    """Its owner knows of it."""
    in_use: bool = True
    """There is a handle to it."""
    children: int = 0
    """References made of it that are on their way."""


@dataclass(slots=True)
class UserLedger:
    """The forks one worker has of the values of others, and the references it has sent."""

    me: int
    _held: dict[tuple[int, int], _Held] = field(default_factory=dict)
    """By owner and fork."""
    _transits: dict[int, Transit] = field(default_factory=dict)
    _tokens: dict[int, Iterator[int]] = field(default_factory=dict)
    """By receiver."""
    _numbers: dict[int, Iterator[int]] = field(default_factory=dict)
    """By owner."""
    _came: dict[int, Seen] = field(default_factory=lambda: defaultdict(Seen))
    """By sender: the tokens of references that came, or are refused if they do."""
    _asked: dict[tuple[int, int], set[int]] = field(default_factory=dict)
    """By asker and token: calls whose answers may bring what was asked for."""
    _gone: set[int] = field(default_factory=set)

    def __len__(self) -> int:
        return len(self._held)

    def new_fork(self, owner: int) -> int:
        """A fork id that has never been used."""
        numbers = self._numbers.setdefault(owner, itertools.count(1))
        return fork_id(self.me, next(numbers))

    def holdings(self) -> dict[Holding, str]:
        """All forks with live handles, and where these were made."""
        return {h.holding: h.made_at for h in self._held.values() if h.in_use}

    def transits(self) -> dict[int, Transit]:
        """The references in transit, by token."""
        return dict(self._transits)

    def child_came(self, sender: int, token: int) -> bool:
        """Whether an arriving reference is valid; not if its sender was told that it is missing."""
        self._asked.pop((sender, token), None)
        return self._came[sender].is_new(number_of(token))

    def fork_came(
        self, holding: Holding, made_at: str = "", *, is_counted: bool = True
    ) -> None:
        """A fork has a handle now."""
        self._held[holding.owner, holding.fork] = _Held(holding, made_at, is_counted)

    def fork_counted(self, owner: int, fork: int) -> None:
        """The owner has registered a fork."""
        held = self._held.get((owner, fork))
        if held is not None:
            held.is_counted = True

    def handle_dropped(self, owner: int, fork: int) -> list[Holding]:
        """The last handle of a fork is gone; the forks to release now."""
        held = self._held.get((owner, fork))
        if held is None:
            return []
        held.in_use = False
        return self._let_go(held)

    def child_left(self, transit: Transit) -> int:
        """A token for a departing reference. Its parent is kept until the token is settled.

        Like the id of a fork: the receiver, and a counter of what was sent there.
        """
        tokens = self._tokens.setdefault(transit.to, itertools.count(1))
        token = fork_id(transit.to, next(tokens))
        self._transits[token] = transit
        parent = self._held.get((transit.child.owner, transit.parent))
        if parent is not None:
            parent.children += 1
        return token

    def child_settled(self, token: int, arrived: bool) -> list[Holding]:
        """The outcome of a reference in transit is known; the forks to release now."""
        transit = self._transits.pop(token, None)
        if transit is None:
            return []
        child = transit.child
        over = [child] if child.fork and not arrived else []
        parent = self._held.get((child.owner, transit.parent))
        if parent is not None:
            parent.children -= 1
            over += self._let_go(parent)
        return over

    def fork_asked(
        self, asker: int, token: int, key: tuple[int, int], underway: set[int]
    ) -> bool | None:
        """Whether a fork of this owner has arrived; None if it may still do so, or be registered.

        It may come in the answer to a call to the asker that was under way when it first asked.
        """
        if key in self._held:
            return True if self._held[key].is_counted else None
        if number_of(token) in self._came[asker] or {asker, key[0]} & self._gone:
            return False  # it is gone, or is refused
        if self._asked.setdefault((asker, token), underway) & underway:
            return None
        self.child_came(asker, token)  # so that it is refused
        return False

    def worker_gone(self, worker: int) -> list[Holding]:
        """The forks to release: references in transit to a lost worker, and their parents."""
        self._gone.add(worker)
        self._held = {k: h for k, h in self._held.items() if k[0] != worker}
        self._asked.clear()  # a worker that still wants to know asks again
        over: list[Holding] = []
        for token, transit in self.transits().items():
            if worker in (transit.to, transit.child.owner):
                over += self.child_settled(token, arrived=False)
        return [holding for holding in over if holding.owner != worker]

    def _let_go(self, held: _Held) -> list[Holding]:
        if held.in_use or held.children:
            return []
        del self._held[held.holding.owner, held.holding.fork]
        return [held.holding]
