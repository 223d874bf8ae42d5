"""Restores the terminal, as an attached worker may be killed at a prompt."""

from __future__ import annotations

import os
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def terminal_kept() -> Iterator[None]:
    """After the block the terminal, if there is one, echoes and edits as it did before."""
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
    """Whether setting it would not stop this process, as it does one in the background."""
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:  # not the terminal of this session, which asks no such thing
        return True
