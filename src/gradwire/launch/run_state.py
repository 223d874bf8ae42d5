"""The state of a run of several workers, up to its end. Pure: no processes, no clock.

It ends when no worker runs. A worker that fails stops the others, first with one signal and after a
while with a stronger one. Users want to see the first failure. A worker that fails because it lost
another one (an *echo*) indicates that the other failed, but may exit first, so the other one is
given a moment to report why.

With restarts, a failed worker is restarted instead, up to a limit; after that some workers may be
spared: the others continue without them.
"""

from __future__ import annotations

import signal
from collections import Counter
from dataclasses import dataclass, field

TIMED_OUT = 124  # the exit status of `timeout`, which people know

_PATIENCE = 5.0  # seconds until the next, stronger signal
_SHORT_PATIENCE = 0.8  # after Ctrl-C, which somebody waits for
_ECHO = (
    10.0  # seconds for the one that an echo speaks of; closing a busy worker takes 5
)


@dataclass(slots=True)
class RunState:
    """Which workers run, by number, and why the run ends, once it does."""

    running: set[int]
    culprit: int | None = None
    """The worker that failed first."""
    status: int = 0
    """What the launcher's exit status will be."""
    deadline: float | None = None
    """When to call `elapsed`."""
    most_restarts: int = 0
    """How often each worker may be started again."""
    spare: int = 0
    """How many workers may fail for good."""
    spared: set[int] = field(default_factory=set)
    """Those that have."""
    restarts: Counter[int] = field(default_factory=Counter)
    """How often each worker was started again."""
    _suspect: tuple[int, int] | None = None
    _signals: list[signal.Signals] = field(default_factory=list)
    """The ones still to be sent."""
    _is_ending: bool = False
    _patience: float = _PATIENCE

    @property
    def is_over(self) -> bool:
        return not self.running

    def restarts_now(self, worker: int, status: int) -> bool:
        """Whether to restart a worker that has exited; counts the restart."""
        if status == 0 or self._is_ending:
            return False
        if self.restarts[worker] >= self.most_restarts:
            return False
        self.restarts[worker] += 1
        return True

    def ended(
        self, worker: int, status: int, now: float, *, is_echo: bool
    ) -> signal.Signals | None:
        """A worker has exited for good; the signal for those that still run."""
        self.running.discard(worker)
        if self._is_ending:
            return None
        if status != 0 and self.spare > 0:
            self.spare -= 1
            self.spared.add(worker)
            return None
        if status != 0 and is_echo and self._suspect is None:
            self._suspect = worker, status
            self.deadline = now + _ECHO
        elif status != 0 and not is_echo:
            return self._blame(worker, status, now)
        if self.is_over and self._suspect is not None:
            return self._blame(*self._suspect, now)
        return None

    def interrupted(self, number: int, now: float) -> signal.Signals | None:
        """The launcher got a signal; the one to send to the workers: the second time, SIGKILL."""
        if self._is_ending:
            return self._end(now, signal.SIGKILL)
        self.status = 128 + number
        if number == signal.SIGINT:
            self._patience = _SHORT_PATIENCE
            # SIGABRT, as one that is in a long C call does not get to its KeyboardInterrupt.
            return self._end(now, signal.SIGINT, signal.SIGABRT, signal.SIGKILL)
        return self._end(now, signal.SIGTERM, signal.SIGTERM, signal.SIGKILL)

    def timed_out(self, now: float) -> signal.Signals | None:
        """The run timed out. On SIGABRT, Python's fault handler prints all stacks."""
        if self._is_ending:
            return None
        self.status = TIMED_OUT
        return self._end(now, signal.SIGABRT, signal.SIGKILL)

    def failed_elsewhere(self, status: int, now: float) -> signal.Signals | None:
        """A worker of another node failed."""
        if self._is_ending:
            return None
        self.status = status
        return self._end(now, signal.SIGTERM, signal.SIGKILL)

    def elapsed(self, now: float) -> signal.Signals | None:
        """The deadline has passed; the signal for workers that still run."""
        if not self._is_ending and self._suspect is not None:
            return self._blame(*self._suspect, now)
        return self._next(now)

    def _blame(self, worker: int, status: int, now: float) -> signal.Signals | None:
        self.culprit, self.status = worker, status
        return self._end(now, signal.SIGTERM, signal.SIGKILL)

    def _end(self, now: float, *signals: signal.Signals) -> signal.Signals | None:
        self._is_ending = True
        self._signals = list(signals)
        return self._next(now)

    def _next(self, now: float) -> signal.Signals | None:
        if not self._signals:
            self.deadline = None  # SIGKILL was sent: the kernel does the rest
            return None
        self.deadline = now + self._patience
        return self._signals.pop(0)
