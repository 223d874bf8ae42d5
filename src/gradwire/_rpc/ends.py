"""How a call ends for those who have an interest in it besides its caller."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .._transport.base import NotConnected
from .._wire.frames import Frame, Freight
from .._wire.functions import describe
from ..errors import CallTimeout
from .calls import Pending


def after(frame: Frame, value: Any) -> Any:
    """The value of a frame, when all that has to come before is done."""
    for wait in frame.waits:
        wait.wait()
    return value


def account(freights: Iterable[Freight], *, arrived: bool) -> None:
    """Tell those who keep books what became of a request."""
    for freight in freights:
        if arrived:
            freight.delivered()
        else:
            freight.in_doubt()


def fail(pending: Pending, error: Exception) -> None:
    """No answer came."""
    account(pending.freight, arrived=False)
    pending.answer.set_exception(error)


def why_not_connected(error: TimeoutError) -> str:
    """What kept a request from being sent; nothing, if it was."""
    return str(error) if isinstance(error, NotConnected) else ""


def too_late(
    pending: Pending, kind: type[CallTimeout], reason: str = ""
) -> CallTimeout:
    """What a call ends with that was not answered in time."""
    fate = pending.answer.fate
    return kind(describe(fate.what), fate.worker, pending.timeout, reason)
