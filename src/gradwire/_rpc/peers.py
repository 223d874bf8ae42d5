"""Another worker, as an agent sees it: how to speak to it, and which calls went and came."""

from __future__ import annotations

import itertools
import threading

from .._transport.base import Card
from .._wire.codec import Manner
from .calls import Seen

_NUMBER_BITS = 40
_MOST_GAPS = 1 << 16  # requests that may overtake one of the same caller


class Peer:
    """Someone to talk to."""

    __slots__ = ("_lock", "_numbers", "_seen", "card", "id", "manner", "name")

    def __init__(self, card: Card, main: str, plain: bool) -> None:
        self.card = card
        self.id = card.id
        self.name = card.name
        same_main = bool(main) and card.main == main
        self.manner = Manner(card.plain or plain, same_main, card.id)
        self._numbers = itertools.count(1)
        self._seen = Seen(most=_MOST_GAPS)
        self._lock = threading.Lock()

    def next_call(self) -> int:
        """A number no other call of this worker has: whom it goes to, and a count."""
        return self.id << _NUMBER_BITS | next(self._numbers)

    def is_new(self, call: int) -> bool:
        """Whether a request with this number comes for the first time."""
        with self._lock:
            return self._seen.is_new(call & (1 << _NUMBER_BITS) - 1)
