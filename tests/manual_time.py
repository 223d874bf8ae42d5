"""Time that a test moves by hand, for what it checks to be certain however slow the machine is."""

import heapq
import itertools
from collections.abc import Callable


class ManualExecutor:
    """An executor that runs what is due in the thread that moves its clock."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._timers: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()

    @property
    def is_idle(self) -> bool:
        """Whether no timer is set."""
        return not self._timers

    def clock(self) -> float:
        return self.now

    def submit(self, task: Callable[[], object]) -> None:
        task()

    def call_at(self, when: float, task: Callable[[], object]) -> None:
        heapq.heappush(self._timers, (when, next(self._order), task))

    look_at = call_at

    def advance(self, seconds: float) -> None:
        """Move the clock from timer to timer, up to so many seconds."""
        end = self.now + seconds
        while self._timers and self._timers[0][0] <= end:
            when, _, task = heapq.heappop(self._timers)
            self.now = max(self.now, when)
            task()
        self.now = end
