"""What workers say to each other: a dataclass each.

Codes below 16 are for this layer and the transports; upper layers register theirs from 16 on
(`Codec.register`). Every message but `Result`, `Failure` and the notes is a request, and is
answered by one `Result` or `Failure` with the same call number. Those of every call are not frozen:
making a frozen one takes three times as long.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

CALL, RESULT, FAILURE, PING, PONG, GOODBYE, LETTERS = 1, 2, 3, 4, 5, 6, 7
NOTES = frozenset((PING, PONG, GOODBYE, LETTERS))
"""Said on a link by the transport itself, without a body, and never answered."""
FIRST_UPPER = 16


@dataclass(slots=True)
class Call:
    """Caller → callee: run this function and send back what it returns."""

    function: Any
    """The function, or its name."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    modes: tuple[Any, ...] | None
    """The caller's grad mode and autocast, if not the usual ones (`_rpc/torch_modes.py`)."""
    ids: tuple[int, ...] = ()
    """Numbers for an upper layer, whose messages that are calls too extend this class."""


@dataclass(slots=True)
class Result:
    """Callee → caller: it returned this."""

    value: Any


@dataclass(frozen=True, slots=True)
class Failure:
    """Callee → caller: it raised this."""

    type_name: str
    message: str
    trace: str
    pickled: bytes | None
    """The exception itself, if it could be pickled and the caller accepts pickles."""
    tensors: list[Any]
    """Those that the pickle refers to."""
