"""What the user sees: the lines of all workers, each with its worker's name."""

from __future__ import annotations

import sys
from collections.abc import Iterable

_COLOURS = (36, 33, 35, 32, 34, 31)  # of a terminal, one worker after the other


class Console:
    """Prints to standard output and standard error."""

    def __init__(self, names: list[str]) -> None:
        width = max(map(len, names))
        self._prefixes = [f"[{name}]".ljust(width + 3) for name in names]

    def show(self, worker: int, line: str, *, is_error: bool) -> None:
        """A line of a worker."""
        stream = sys.stderr if is_error else sys.stdout
        prefix = self._prefixes[worker]
        if stream.isatty():
            prefix = f"\x1b[{_COLOURS[worker % len(_COLOURS)]}m{prefix}\x1b[0m"
        print(prefix + line, file=stream, flush=True)

    def say(self, text: str, lines: Iterable[str] = ()) -> None:
        """Something of the launcher's own, and lines as they are."""
        print("\n".join([f"gradwire launch: {text}", *lines]), file=sys.stderr)
