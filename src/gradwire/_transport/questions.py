"""What a thread waits for at one end of a lane, and how long."""

from __future__ import annotations

import threading
import time
from typing import Any

from .._wire.frames import Frame
from .._wire.messages import FAILURE, RESULT
from ..threads import Bell
from .base import NAP, IsOver

MOMENT = 0.001
"""Seconds for another thread to finish what it just does."""


ANSWERS = (RESULT, FAILURE)
"""The kinds of frames that are answers."""


class Question:
    """What a thread has asked by a lane, and waits for."""

    number = 0  # none: it is not sent
    answer: Frame | None = None
    jobs = 0  # requests that came while it read, and are being run
    was_called_back = False  # there was such a request
    duty: Any = None  # of its stand-in, until that has looked or is dismissed

    def __init__(self) -> None:
        self.depth = here.depth
        # Most questions need none. Who rings or waits first makes one, in a single step,
        # so that both have the same, and what is rung before anybody waits is not lost.
        self._bells: dict[str, Bell] = {}

    @property
    def bell(self) -> Bell:
        """Rung when there may be something for its thread to do."""
        return self._bells.get("bell") or self._bells.setdefault("bell", Bell())


class Limit:
    """How long a wait may last."""

    __slots__ = ("_deadline", "_is_over")

    def __init__(self, deadline: float | None, is_over: IsOver | None) -> None:
        self._deadline = deadline
        self._is_over = is_over

    def next(self) -> float | None:
        """Until when to read, and then `check`."""
        if self._is_over is None:
            return self._deadline
        return time.monotonic() + self.nap()

    def nap(self) -> float:
        """How long to sleep, and then `check`."""
        if self._deadline is None:
            return NAP
        return min(NAP, self._deadline - time.monotonic())

    def check(self) -> None:
        """See whether there is still a reason to wait.

        Raises:
            TimeoutError: it is time to go.
        """
        if self._is_over is not None and self._is_over():
            raise TimeoutError
        if self._deadline is not None and time.monotonic() >= self._deadline:
            raise TimeoutError


class Here(threading.local):
    """What this thread runs: a request of this lane, by which it may ask back."""

    lane: Any = None  # a `LaneEnd`
    depth = 0  # how many threads of this end wait for it, one for the other


here = Here()
