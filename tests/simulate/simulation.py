"""Simulated time: one thread, one seed, and whatever happens, one event after the other.

What happens next is what is due next, and when an event is due is drawn from the seed: so the seed
decides on every delay and on who runs before whom, and the same seed does the same again. Nothing
here may depend on a real clock, on addresses of objects or on the order of a set of strings.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable

Event = Callable[[], object]

_MOST_STEPS = 20_000


class Wrong(AssertionError):
    """What must not happen."""


class Simulation:
    """The clock, and the events that are still to come."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.now = 0.0
        self.steps = 0
        self.at_step: dict[int, Event] = {}
        """What goes wrong before a step, by the step's number."""
        self.trace: list[str] | None = None
        """What happened, where somebody wants to know."""
        self._events: list[tuple[float, int, Event]] = []
        self._order = itertools.count()

    def __repr__(self) -> str:
        return f"<Simulation at {self.now:.6f} s, {len(self._events)} events to come>"

    def after(self, seconds: float, event: Event) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), event))

    def soon(self, event: Event) -> None:
        """Within some microseconds: before or after others that are to happen soon."""
        self.after(self.chance.random() * 1e-5, event)

    def run(self) -> None:
        """Until nothing more is to come.

        Raises:
            Wrong: that never happens; or one of the events raised it.
        """
        while self._events:
            self.step()

    def step(self) -> None:
        """The next event."""
        if self.steps in self.at_step:
            self.at_step.pop(self.steps)()
        self.steps += 1
        if self.steps > _MOST_STEPS:
            raise Wrong("it never comes to an end")
        self.now, _, event = heapq.heappop(self._events)
        event()

    def note(self, *what: object) -> None:
        """Write down what happens, if that is wanted."""
        if self.trace is not None:
            self.trace.append(" ".join([f"{self.now:12.6f} ", *map(str, what)]))
