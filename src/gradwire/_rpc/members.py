"""The members of the world, as far as this worker knows, and which requests each has sent.

Pure but for its locks and a clock. Ids are never reused; a name can be, once its worker is gone.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field

from .._transport.base import Card
from .._wire.codec import Manner
from .._wire.device_maps import between
from ..errors import WorkerLostError
from ..ids import WorkerInfo
from ..locks import CheckedLock


class Members:
    """The workers that are alive, and why the others are gone."""

    def __init__(self) -> None:
        self._lock = CheckedLock()
        self._cards: dict[int, Card] = {}
        self._by_name: dict[str, Card] = {}
        self._gone: dict[int, tuple[str, str]] = {}

    def __repr__(self) -> str:
        return f"<Members: {[card.name for card in self.cards()]}>"

    def add(self, card: Card) -> bool:
        """Add a worker; whether it is new."""
        with self._lock:
            if card.id in self._cards or card.id in self._gone:
                return False
            self._cards[card.id] = card
            self._by_name[card.name] = card
            return True

    def remove(self, worker: int, reason: str) -> Card | None:
        """Remove a worker; its card, or None if it was not there."""
        with self._lock:
            card = self._cards.pop(worker, None)
            if card is not None:
                self._gone[worker] = (card.name, reason)
                if self._by_name.get(card.name) is card:
                    del self._by_name[card.name]
            return card

    def find(self, to: object) -> Card:
        """The card of a worker by name, id or info.

        Raises:
            WorkerLostError: it is gone; says why.
            ValueError: there never was one; lists the members.
            TypeError: not a valid way to name a worker.
        """
        if isinstance(to, str):
            card = self._by_name.get(to)
        elif isinstance(to, int) and not isinstance(to, bool):
            card = self._cards.get(to)
        elif isinstance(to, WorkerInfo):
            card = self._cards.get(to.id)
        else:
            raise TypeError(
                f"{to!r} is not a worker: give a name, an id or a WorkerInfo"
            )
        if card is None:
            raise self._unknown(to)
        return card

    def get(self, worker: int) -> Card | None:
        return self._cards.get(worker)

    def name(self, worker: int) -> str:
        """A name for error messages."""
        card = self._cards.get(worker)
        if card is not None:
            return card.name
        return self._gone.get(worker, (f"id {worker}", ""))[0]

    def cards(self) -> list[Card]:
        with self._lock:
            return sorted(self._cards.values(), key=lambda card: card.id)

    def _unknown(self, to: object) -> Exception:
        for number, (name, reason) in reversed(self._gone.items()):
            if to in (number, name, (name, number)):
                return WorkerLostError(name, reason)
        there = [card.name for card in self.cards()]
        return ValueError(f"there is no worker {to!r}; there are {there}")


_NUMBER_BITS = 40
_MOST_GAPS = 1 << 16  # by how much requests of one caller may be reordered
_QUOTA_INTERVAL = 10.0  # seconds


@dataclass(slots=True)
class Seen:
    """Which request numbers have arrived. Only the gaps below the highest one are stored.

    With `most`, at most that many are kept above the lowest gap: older ones count as arrived. Some
    numbers never arrive, for instance of requests that could not be sent; so many are discarded at
    a time, or each arrival would have to search for the oldest.
    """

    _below: int = 1
    """All numbers below this one have come."""
    _above: set[int] = field(default_factory=set)
    most: int | None = None

    def __contains__(self, call: int) -> bool:
        return call < self._below or call in self._above

    def is_new(self, call: int) -> bool:
        """Whether this number is new; records it."""
        if call < self._below or call in self._above:
            return False
        if call != self._below:
            self._above.add(call)
            if self.most is None or len(self._above) <= self.most:
                return True
            kept = sorted(self._above)
            kept = kept[len(kept) // 16 :]
            self._above = set(kept)
            self._below = kept[0] - 1  # what has not arrived never will
        self._below += 1
        while self._below in self._above:
            self._above.remove(self._below)
            self._below += 1
        return True


class Peer:
    """Another worker, as this one sees it."""

    __slots__ = (
        "_lock",
        "_numbers",
        "_seen",
        "_silent_until",
        "card",
        "id",
        "manner",
        "name",
    )

    def __init__(self, card: Card, me: Card, plain: bool, no_map: str = "") -> None:
        self.card = card
        self.id = card.id
        self.name = card.name
        same_main = bool(me.main) and card.main == me.main
        mine, theirs = me.device_maps.get(card.name), card.device_maps.get(me.name)
        devices = between(
            me.name,
            mine or {},
            card.name,
            theirs or {},
            "" if card.id == me.id else no_map,
        )
        self.manner = Manner(card.plain or plain, same_main, card.id, devices)
        self._numbers = itertools.count(1)
        self._seen = Seen(most=_MOST_GAPS)
        self._silent_until = 0.0
        self._lock = CheckedLock()

    def next_call(self) -> int:
        """A number for a call, unique to this worker: the callee's id and a counter."""
        return self.id << _NUMBER_BITS | next(self._numbers)

    def may_tell_of_quota(self) -> bool:
        """Whether to tell that it is over its quota: once in an interval, for floods."""
        now = time.monotonic()
        with self._lock:
            tells = now >= self._silent_until
            if tells:
                self._silent_until = now + _QUOTA_INTERVAL
        return tells

    def is_new(self, call: int) -> bool:
        """Whether this is the first request with this number."""
        with self._lock:
            return self._seen.is_new(call & (1 << _NUMBER_BITS) - 1)
