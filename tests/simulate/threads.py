"""Simulated threads: generators, which others may overtake wherever they yield.

`yield` alone is a place where the thread may be preempted. `yield bell.wait(deadline)` sleeps until
the bell is rung, or the deadline; it evaluates to whether it was rung. What does not yield is
atomic: so is in a model what happens under a lock.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from .simulation import Simulation

Steps = Generator["Wait | None", "bool | None", Any]
Wait = Callable[[Callable[[bool], None]], None]
"""Calls what it is given, once: with True when what is waited for is there, False if too late."""


class Threads:
    """The threads of one simulated process."""

    def __init__(self, simulation: Simulation) -> None:
        self.alive: dict[str, None] = {}
        self.current = ""
        self._simulation = simulation

    def start(self, name: str, steps: Steps) -> None:
        self.alive[name] = None
        self._simulation.soon(lambda: self._go_on(name, steps, None))

    def _go_on(self, name: str, steps: Steps, came: bool | None) -> None:
        soon = self._simulation.soon
        self.current = name
        try:
            wait = steps.send(came)
        except StopIteration:
            del self.alive[name]
            return
        if wait is None:
            soon(lambda: self._go_on(name, steps, None))
        else:
            wait(lambda came: soon(lambda: self._go_on(name, steps, came)))


class Bell:
    """One sleeper, one waker, as `gradwire.threads.Bell`."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._was_rung = False
        self._wake: Callable[[bool], None] | None = None

    def ring(self) -> None:
        wake, self._wake = self._wake, None
        if wake is None:
            self._was_rung = True
        else:
            wake(True)

    def wait(self, deadline: float | None) -> Wait:
        def sleep(wake: Callable[[bool], None]) -> None:
            if self._was_rung:
                self._was_rung = False
                wake(True)
                return
            self._wake = wake
            if deadline is not None:
                left = max(0.0, deadline - self._simulation.now)
                self._simulation.after(left, lambda: self._too_late(wake))

        return sleep

    def _too_late(self, wake: Callable[[bool], None]) -> None:
        if self._wake is wake:
            self._wake = None
            wake(False)
