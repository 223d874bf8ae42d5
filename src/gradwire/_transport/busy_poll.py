"""Polling for a short while before going to sleep.

To be woken costs more than a small call itself, so whoever waits for a socket may first look at it
again and again. But polling takes a core, and the GIL with each look. So it is done only where it
is likely to succeed and to harm nobody:

* where the last wait in the same place was shorter than the time that polling may take;
* by one thread of a worker at a time;
* not at all where the workers of this host outnumber its cores: the one waited for needs the core.
"""

from __future__ import annotations

import time


class BusyPoll:
    """How long a worker polls, and whether one of its threads does."""

    __slots__ = ("_busy", "is_crowded", "seconds")

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.is_crowded = False
        self._busy = False

    def begin(self, last_wait: float) -> float:
        """Until when to poll in a place where the last wait took so long; 0 for not at all.

        After anything but 0, `end` must be called.
        """
        if self._busy or self.is_crowded or last_wait >= self.seconds:
            return 0.0
        self._busy = True  # two threads at once do no harm
        return time.perf_counter() + self.seconds

    def end(self) -> None:
        self._busy = False
