"""Looking again and again for a short while before going to sleep.

Being woken costs more than looking, often by far. But looking costs processor time and the GIL,
so at most one thread of a worker does it at a time, and each place where it is tried keeps count
of whether it pays there (`Patience`): where it does not, it is tried ever more rarely.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Spin:
    """A worker's permission to spin."""

    __slots__ = ("_busy", "_seconds", "is_allowed")

    def __init__(self, seconds: float) -> None:
        self.is_allowed = seconds > 0
        self._seconds = seconds
        self._busy = False

    def look(self, attempt: Callable[[], T], times: int = 1) -> T | None:
        """What `attempt` finds within a short while; None if nothing, or if another spins.

        It is called as it is, for what wraps it would make each look longer: when there is
        nothing, it may return nothing or raise BlockingIOError.
        `times`: how many times as long to look as usual.
        """
        if self._busy or not self.is_allowed:
            return None
        self._busy = True
        now = time.perf_counter
        end = now() + self._seconds * times
        try:
            while True:
                try:
                    if found := attempt():
                        return found
                except BlockingIOError:
                    pass
                if now() > end:
                    return None
        finally:
            self._busy = False


class Patience:
    """Whether to try spinning in one place."""

    __slots__ = ("_credit", "_next_skips", "_skips")
    _MOST_SKIPS = 64
    _MOST_CREDIT = 8
    # A failure costs as many successes: where processes share a core, it pays once in a while.
    _PRICE = 4

    def __init__(self) -> None:
        self._skips = 0
        self._next_skips = 0
        self._credit = 0

    @property
    def pays(self) -> bool:
        """Whether it has paid lately, or it is time to try again."""
        return not self._skips

    def look(self, spin: Spin, attempt: Callable[[], T], times: int = 1) -> T | None:
        """What spinning finds; None at once where it has not paid lately."""
        if self._skips:
            self._skips -= 1
            return None
        found = spin.look(attempt, times)
        if found is not None:
            if self._credit < self._MOST_CREDIT:
                self._credit += 1
                if self._credit == self._PRICE:
                    self._next_skips = 0
        elif self._credit >= self._PRICE:
            self._credit -= self._PRICE
        else:
            self._credit = 0
            self._next_skips = min(2 * self._next_skips + 1, self._MOST_SKIPS)
            self._skips = self._next_skips
        return found
