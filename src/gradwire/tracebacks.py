"""Tracebacks without Gradwire's own frames, which tell a user nothing.

`GRADWIRE_DEBUG=1` keeps them all. Knows no errors of ours: `_wire/failures.py` does.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FrameType, TracebackType

import torch.futures

CallStack = Sequence[tuple[CodeType, int]]
"""Functions and lines, outermost first."""

_HIDDEN = (str(Path(__file__).parent) + os.sep, torch.futures.__file__)
"""Where hidden frames come from; our futures call torch's."""


def shows_all() -> bool:
    """Whether the user wants to see our frames, too."""
    return os.environ.get("GRADWIRE_DEBUG", "0") not in ("", "0")


def hide_frames(error: BaseException) -> None:
    """Drop our frames from a traceback, except for the one that this is called from.

    To be called where an error leaves a public function: `except Exception as error:
    hide_frames(error); raise`. It changes the list of frames in place, since the exception that
    goes on its way in Python 3.10 is another list with the same frames.
    """
    if error.__traceback__ is None or shows_all():
        return
    error.__traceback__.tb_next = _without_ours(error.__traceback__.tb_next)
    seen = {id(error)}
    linked = _leading_to(error)
    while linked is not None and id(linked) not in seen:
        seen.add(id(linked))
        linked.__traceback__ = _without_ours(linked.__traceback__)
        linked = _leading_to(linked)


def _leading_to(error: BaseException) -> BaseException | None:
    return error.__context__ if error.__cause__ is None else error.__cause__


def call_stack() -> CallStack:
    """Where this was called, to be formatted only if needed: that takes far longer."""
    found: list[tuple[CodeType, int]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        found.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return found[::-1]


def lines_of(stack: CallStack) -> list[str]:
    """As `traceback.format_stack`."""
    entries = [(code.co_filename, line, code.co_name, None) for code, line in stack]
    return traceback.StackSummary.from_list(entries).format()


def has_other_frames(error: BaseException) -> bool:
    """Whether an error went through code that is not ours."""
    return not all(map(_is_ours, _frames(error.__traceback__)))


def _without_ours(first: TracebackType | None) -> TracebackType | None:
    """The frames of others in a list of frames, linked anew."""
    kept = [frame for frame in _frames(first) if not _is_ours(frame)]
    following = None
    for frame in reversed(kept):
        frame.tb_next = following
        following = frame
    return following


def _frames(first: TracebackType | None) -> list[TracebackType]:
    found = []
    while first is not None:
        found.append(first)
        first = first.tb_next
    return found


def _is_ours(frame: TracebackType) -> bool:
    return frame.tb_frame.f_code.co_filename.startswith(_HIDDEN)


class _HiddenFrames:
    """`with hidden_frames:` around what a public function does; has no state."""

    def __enter__(self) -> None:
        return

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None:
            hide_frames(error)


hidden_frames = _HiddenFrames()


def text_of(error: BaseException) -> str:
    """A traceback, with those of its causes, as Python prints it but for our frames.

    Where an exception has no others, the innermost is kept.
    """
    printed = traceback.TracebackException.from_exception(error)
    if not shows_all():
        _strip(printed, set())
    return "".join(printed.format()).rstrip()


def _strip(printed: traceback.TracebackException, seen: set[int]) -> None:
    if id(printed) in seen:
        return
    seen.add(id(printed))
    frames = [f for f in printed.stack if not f.filename.startswith(_HIDDEN)]
    printed.stack[:] = frames or printed.stack[-1:]
    for linked in (printed.__cause__, printed.__context__):
        if linked is not None:
            _strip(linked, seen)
    for part in getattr(printed, "exceptions", None) or ():  # of a group
        _strip(part, seen)
