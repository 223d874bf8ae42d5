"""Restores the terminal, as an attached worker may be killed at a prompt."""

from __future__ import annotations

import os
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def terminal_kept() -> Iterator[None]:
    """Restore the terminal's settings, if there is a terminal, at the end of the block."""
    try:
        terminal = sys.stdin.fileno()
        before = termios.tcgetattr(terminal)
    except (AttributeError, OSError, ValueError, termios.error):
        yield  # no terminal
        return
    try:
        yield
    finally:
        if _may_set(terminal):
            termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _may_set(terminal: int) -> bool:
    """Whether this process may set it: one in the background would be stopped."""
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:  # not the terminal of this session, which asks no such thing
        return True
