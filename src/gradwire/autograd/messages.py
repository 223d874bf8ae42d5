"""What workers say to each other about contexts and passes.

All but the tensors are small integers, strings and tuples of them, so that every encoding can
carry them, also the one that accepts no pickles. Tensors stand by themselves at the end, and none
is missing, so that the short encoding can.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ProtocolError

STEP, ABORT, RELEASE = 48, 49, 50

RETAIN, CREATE, ACCUMULATE, QUIET = 1, 2, 4, 8
"""How a pass is run: keep the graph; make the gradients differentiable; fill `.grad` too; keep no
gradients in the context (the functional form)."""

Delivery = tuple[int, tuple[Any, ...], int, tuple[int, ...]]
"""Gradients for one send: its id; a gradient, or None where there is none, for each of its tensors;
the id under which the gradients themselves were sent, or 0; and which of them were."""

Head = tuple[int, int, tuple[int, ...], int, tuple[int, ...]]
"""A delivery as it is said: the id; how many tensors, and which of them get no gradient; and the
rest. The gradients follow."""


@dataclass(frozen=True, slots=True)
class Step:
    """A worker → another, in a pass: here are gradients for your sends, others will get none.

    The first one engages the receiver: it is answered when all that follows from it is done. Later
    ones are answered at once.
    """

    context: int
    number: int
    """Of the pass: the worker that began it and a count."""
    flags: int
    voids: tuple[int, ...]
    """Sends that get no gradient."""
    listed: tuple[int, ...] | None
    """All sends that arrived here and may get one; None if that was said before. Those in neither
    list never arrived: they are void too."""
    awaiting: int
    """How many sends to the receiver there are here; it says so if it did not get as many."""
    heads: tuple[Head, ...]
    gradients: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    """A worker → those that owe it an answer in a pass: it has failed, let go."""

    context: int
    number: int
    failed: Any
    """How: a packed `Failed`."""


@dataclass(frozen=True, slots=True)
class Release:
    """A worker → those its contexts know: these are over. Passed on by whoever has one."""

    contexts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Failed:
    """What went wrong in a pass, and on which worker: as text, and pickled where possible."""

    worker: int
    type_name: str
    message: str
    trace: str
    pickled: bytes | None
    tensors: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Done:
    """The answer to a step: all is done here, and these are the last gradients for the asker."""

    deliveries: tuple[Delivery, ...] = ()


Outcome = Done | Failed

NOTED = 0
"""The answer to a step while there is still something to do."""
_NOTHING = Done()


def pack(outcome: Outcome) -> Any:
    """An outcome as the answer to a step; None for the most common one."""
    if isinstance(outcome, Failed):
        return (
            1,
            outcome.worker,
            outcome.type_name,
            outcome.message,
            outcome.trace,
            outcome.pickled,
            outcome.tensors,
        )
    if not outcome.deliveries:
        return None
    heads, gradients = flatten(outcome.deliveries)
    return (0, heads, *gradients)


def unpack(answer: Any) -> Outcome | None:
    """What an answer to a step says; None: noted."""
    if answer is None:
        return _NOTHING
    if type(answer) is int:
        return None
    kind, *fields = answer
    return Failed(*fields) if kind else Done(unflatten(fields[0], fields[1:]))


def flatten(
    deliveries: Iterable[Delivery],
) -> tuple[tuple[Head, ...], tuple[Any, ...]]:
    """Deliveries as they are said."""
    heads: list[Head] = []
    flat: list[Any] = []
    for number, gradients, link, linked in deliveries:
        absent = tuple([i for i, g in enumerate(gradients) if g is None])
        heads.append((number, len(gradients), absent, link, linked))
        flat += [g for g in gradients if g is not None] if absent else gradients
    return tuple(heads), tuple(flat)


def unflatten(heads: Iterable[Head], flat: Sequence[Any]) -> tuple[Delivery, ...]:
    """What was said.

    Raises:
        ProtocolError: a gradient is missing.
    """
    deliveries = []
    at = 0
    for number, count, absent, link, linked in heads:
        end = at + count - len(absent)
        gradients = list(flat[at:end])
        if len(gradients) != end - at:
            raise ProtocolError(f"send {number} lacks gradients that are not void")
        for index in absent:
            gradients.insert(index, None)
        deliveries.append((number, tuple(gradients), link, tuple(linked)))
        at = end
    return tuple(deliveries)


def answer_after(outcome: Outcome | None, to_engager: bool) -> Any:
    """The answer to a message that came when all was over.

    That all is done is for the answer to the engaging message to say, which may bring gradients
    and may not have arrived yet. Others have all that is for them.
    """
    if isinstance(outcome, Failed):
        return pack(outcome)
    return NOTED if to_engager else pack(Done())
