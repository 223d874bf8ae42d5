"""What a whole program is to the bench: who takes part, one step of it, and the right result."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Step = Callable[[], float]
"""One step, timed; returns what `check` wants to see, such as the loss."""


def _nothing() -> None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A world of `clients` workers that take steps, and after them `servers` that are called."""

    name: str
    begin: Callable[[int], Step]
    """Called with the rank of each client: prepares its steps."""
    check: Callable[[Sequence[float]], str]
    """What is wrong with the results of one client's steps; nothing: an empty string."""
    steps: int
    warm_up: int
    """Steps before the clock starts."""
    seconds: float = math.inf
    """Take no more steps after that long: callers that compete should do so until the end."""
    clients: int = 1
    servers: int = 1
    serve: Callable[[], None] = _nothing
    """Called in each server before any client begins."""
    pause: Callable[[], None] = _nothing
    """Before each step, not timed."""
    goal: float | None = None
    """The promise: this ratio to torch RPC, with either number of threads."""
    default_threads_goal: float | None = None
    """Another one with torch's default threads."""
    p90_goal: float | None = None
    group: str = ""
    """Programs with the same one run one after another in the same processes."""

    @property
    def workers(self) -> int:
        return self.clients + self.servers

    @property
    def processes(self) -> str:
        """What names the processes that it runs in."""
        return self.group or self.name

    @property
    def goal_figure(self) -> str:
        """Which ratio the promise is about: with several clients, how much is done in all."""
        return "median" if self.clients == 1 else "mean"

    def goal_with(self, threads: str) -> float | None:
        """The promise in this thread setting."""
        if threads == "default" and self.default_threads_goal is not None:
            return self.default_threads_goal
        return self.goal


def fell(losses: Sequence[float]) -> str:
    """The last loss is below the first."""
    if losses[-1] < losses[0]:
        return ""
    return f"the loss went from {losses[0]:.6g} to {losses[-1]:.6g}"


def always(expected: float) -> Callable[[Sequence[float]], str]:
    """Every step gave this."""

    def check(results: Sequence[float]) -> str:
        wrong = [result for result in results if result != expected]
        return f"{wrong[0]:.6g} instead of {expected:.6g}" if wrong else ""

    return check
