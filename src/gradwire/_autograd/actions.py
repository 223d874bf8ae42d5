"""What a worker brings to a backward pass, what is said in it, and what there is to be done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Slot = tuple[int, int]
"""One tensor of a message that was sent or received: the message's number, and which of those of
its tensors that require grad."""

Arrived = tuple[int, tuple[int, ...]]
"""Gradients came for a send: its number, and which of its slots got one. The others get none."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What a pass must know of a segment: its sends, by creation, and its recvs."""

    sends: tuple[Slot, ...] = ()
    recvs: tuple[Slot, ...] = ()
    has_roots: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """What a worker brings to a pass."""

    pieces: Sequence[Piece]
    sends: Mapping[Slot, int]
    """All sends of the context, and to whom."""
    recvs: Mapping[Slot, int]
    """All recvs, and from whom."""


class Run(NamedTuple):
    """Run a piece from its roots and these sends; the others are void."""

    piece: int
    sends: tuple[Slot, ...]
    may_wait: bool
    """Not all of the sends have their gradients yet."""


class Narrow(NamedTuple):
    """Find out which recvs these sends of a piece reach, and say `narrowed`: others are void."""

    piece: int
    sends: tuple[Slot, ...]


class Reach(NamedTuple):
    """Find out which recvs these sends of a piece reach, with its roots, and say `reached`."""

    piece: int
    sends: tuple[Slot, ...]


class Words(NamedTuple):
    """What a message or an answer says beside gradients."""

    voids: tuple[Slot, ...]
    """Those that no gradients will come for."""
    listed: tuple[int, ...] | None
    """The messages that arrived, the first time that anything is said."""
    awaiting: int
    """How many slots of messages to that worker are part of the pass."""
    confirmed: tuple[Slot, ...] = ()
    """Those that gradients will come for."""
    asks: bool = False
    """Whether to say which are, as soon as it is known."""


class Answer(NamedTuple):
    """The answer to one of our messages."""

    arrived: Sequence[Arrived] = ()
    """Gradients that it brought for sends of ours."""
    words: Words | None = None
    is_done: bool = False
    is_engaged: bool = False
    """We brought it into the pass, and it will tell us when it is done."""


class Tell(NamedTuple):
    """Send a message without gradients; it is owed an answer."""

    to: int
    words: Words


class Wake(NamedTuple):
    """It is known what becomes of a message that may be waited for."""

    send: int


class Abort(NamedTuple):
    """Tell a worker that owes us an answer, or its end, that the pass has failed."""

    to: int


class Finish(NamedTuple):
    """All is done here: tell the engager; or return, where the pass began."""


Action = Run | Narrow | Reach | Tell | Wake | Abort | Finish
