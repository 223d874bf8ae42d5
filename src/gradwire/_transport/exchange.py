"""A thread that waits for the response to one request, which another thread may read."""

from __future__ import annotations

from collections.abc import Callable

from .._wire.frames import Frame


class Exchange:
    """The response once it has arrived, or the reason why it will not. An `Answer` (`base.py`)."""

    __slots__ = ("_wake", "frame", "reason")

    def __init__(self) -> None:
        self.frame: Frame | None = None
        self.reason: str | None = None
        """Why there will be no response."""
        self._wake: Callable[[], None] | None = None

    def done(self) -> bool:
        return self.frame is not None or self.reason is not None

    def on_done(self, wake: Callable[[], None]) -> None:
        """As `Answer.on_done`. Only the thread that waits calls it."""
        self._wake = wake
        if self.done():
            wake()

    def complete(self, frame: Frame) -> None:
        self.frame = frame
        self._ring()

    def fail(self, reason: str) -> None:
        if self.reason is None:  # the first reason is the one that matters
            self.reason = reason
            self._ring()

    def _ring(self) -> None:
        if self._wake is not None:
            self._wake()
