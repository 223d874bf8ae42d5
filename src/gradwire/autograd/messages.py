"""What workers say to each other about contexts and passes.

All but the tensors are small integers, strings and tuples of them, so that every encoding can
carry them, also the one that accepts no pickles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

STEP, ABORT, RELEASE = 48, 49, 50

RETAIN, CREATE, ACCUMULATE, QUIET = 1, 2, 4, 8
"""How a pass is run: keep the graph; make the gradients differentiable; fill `.grad` too; keep no
gradients in the context (the functional form)."""

Delivery = tuple[int, tuple[Any, ...], tuple[int, ...], int, tuple[int, ...]]
"""Gradients for one send: its id; a gradient or None for each of its tensors; which of them are
void; the id under which the gradients themselves were sent, or 0; and which of them were."""


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
    deliveries: tuple[Delivery, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    """A worker → those that owe it an answer in a pass: it has failed, let go."""

    context: int
    number: int
    failed: Any
    """How: a packed `Failed`."""


@dataclass(frozen=True, slots=True)
class Release:
    """A worker → those its context knows: the context is over. Passed on by whoever has it."""

    context: int


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
    number, gradients, *rest = outcome.deliveries[0]
    if len(outcome.deliveries) == 1 and rest == [(), 0, ()]:
        return (2, number, *gradients)  # the short encoding takes it
    return 0, outcome.deliveries


def unpack(answer: Any) -> Outcome | None:
    """What an answer to a step says; None: noted."""
    if answer is None:
        return _NOTHING
    if type(answer) is int:
        return None
    kind, *fields = answer
    if kind == 2:
        number, *gradients = fields
        return Done(((number, tuple(gradients), (), 0, ()),))
    return Failed(*fields) if kind else Done(*fields)


def answer_after(outcome: Outcome | None, to_engager: bool) -> Any:
    """The answer to a message that came when all was over.

    That all is done is for the answer to the engaging message to say, which may bring gradients
    and may not have arrived yet. Others have all that is for them.
    """
    if isinstance(outcome, Failed):
        return pack(outcome)
    return NOTED if to_engager else pack(Done())
