"""The last lines of a worker's standard error, which tell why it failed. Pure."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from pathlib import Path

_KEPT = 400  # lines
_SHOWN = 20  # of them, where no traceback is among them
_BEGINS = "Traceback (most recent call last):"
_CAUSE = "gradwire.errors.RemoteError: on worker '"  # before one on another worker
_ECHO = "lost worker '"  # how `WorkerLostError` begins
_FRAME = re.compile(r'  File "(.*)", line (\d+),? in (.*)')
_DUMP = "Fatal Python error: Aborted"  # how the fault handler begins
_THREAD = re.compile(r"(Thread|Current thread) 0x.* \(most recent call first\):")
_OURS = str(Path(__file__).parents[1])
_LIBRARY = re.compile(r".*/lib/python3\.\d+/|<frozen ")


def place_of(lines: Sequence[str]) -> str | None:
    """The last line of the user's program in the last traceback among these lines.

    A frame outside of Gradwire, and outside of libraries if there is one.
    """
    if _BEGINS not in lines:
        return None
    start = len(lines) - 1 - list(reversed(lines)).index(_BEGINS)
    return _place_in(lines[start:])


def place_in_dump(dump: Sequence[str]) -> str | None:
    """The same for the main thread in the fault handler's dump: the last thread in it."""
    starts = [number for number, line in enumerate(dump) if _THREAD.match(line)]
    return _place_in(dump[: starts[-1] : -1]) if starts else None


def cut_dump(lines: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """The lines before the dump of the fault handler, and the dump."""
    end = lines.index(_DUMP) if _DUMP in lines else len(lines)
    return lines[:end], lines[end:]


def _place_in(lines: Sequence[str]) -> str | None:
    frames = [found for line in lines if (found := _FRAME.match(line))]
    others = [found for found in frames if not found[1].startswith(_OURS)] or frames
    users = [found for found in others if not _LIBRARY.match(found[1])] or others
    if not users:
        return None
    path, number, function = users[-1].groups()
    return f"{path}, line {number}, in {function}"


def ends_by_interrupt(lines: Sequence[str]) -> bool:
    """Whether these lines end with an uncaught KeyboardInterrupt."""
    return bool(lines) and lines[-1] == "KeyboardInterrupt"


class StderrTail:
    """The last lines of one worker."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=_KEPT)

    def add(self, line: str) -> None:
        self._lines.append(line)

    @property
    def is_echo(self) -> bool:
        """Whether it failed only because it lost another worker."""
        return any(_ECHO in line for line in self._error())

    def lines(self) -> list[str]:
        """The traceback, with those that led to it; without one the last lines."""
        lines = list(self._lines)
        for number, line in enumerate(lines):
            if line == _BEGINS or line.startswith(_CAUSE):
                return lines[number:]
        return lines[-_SHOWN:]

    def _error(self) -> list[str]:
        """The lines after the frames of the last traceback: the error's type and message."""
        lines = self.lines()
        while _BEGINS in lines:
            lines = lines[lines.index(_BEGINS) + 1 :]
        return [line for line in lines if not line.startswith(" ")]
