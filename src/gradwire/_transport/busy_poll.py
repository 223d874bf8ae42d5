"""Polling for a short while before going to sleep.

A wake-up costs more than a small call itself, so a thread that waits for a socket may poll it
first. But polling occupies a core, and the GIL at each poll. So it is done only where it is likely
to succeed and does no harm:

* where the last wait in the same place was shorter than the polling limit; and one time in a few
  where it was not, because waits are longer when nobody polls: otherwise two workers that have once
  gone to sleep would keep doing so;
* by one thread of a worker at a time;
* for a shorter time where the workers of this host outnumber its cores: the worker waited for may
  need the core. The responses of a loop of small calls still arrive in time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

WAKE_UP = 50e-6
"""Seconds by which a wait is longer, about, if the thread sleeps."""
_CROWDED = 60e-6  # seconds to poll at most where cores are scarce
_PROBE = 8  # long waits until one is polled for anyway


class BusyPoll:
    """How long a worker polls, and whether one of its threads is polling."""

    __slots__ = ("_busy", "_long", "_seconds", "seconds")

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._seconds = seconds
        self._busy = False
        self._long = 0  # waits that took long

    def found(self, look: Callable[[], T], last_wait: float) -> T | None:
        """What `look` returns within the limit, given the last wait; otherwise None."""
        if self._busy or not self.seconds:
            return None
        if last_wait >= self.seconds:
            self._long += 1
            if self._long % _PROBE:
                return None
        try:
            self._busy = True  # two threads at once do no harm
            until = time.perf_counter() + self.seconds
            while time.perf_counter() < until:
                if found := look():
                    return found
            return None
        finally:
            self._busy = False

    def crowd(self, is_crowded: bool) -> None:
        """Whether the workers of this host outnumber its cores."""
        self.seconds = min(self._seconds, _CROWDED) if is_crowded else self._seconds
