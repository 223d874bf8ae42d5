"""Messages about references. docs/protocol.md draws the flows.

A fork is one worker's hold on a value of another. Its id is a number: the worker that created it,
and a counter of the forks that this worker created for this owner. A value created by `remote` has
the id of its first fork. All messages but the calls are idempotent, and retried until acknowledged.
"""

from __future__ import annotations

from dataclasses import dataclass

from .._wire.messages import Call
from ..errors import StaleReferenceError

CREATE, INVOKE, FETCH, ADOPT, NOTES, RECALL, CREATE_NOW = 32, 33, 34, 35, 36, 37, 38

_BITS = 40


def fork_id(maker: int, number: int) -> int:
    return maker << _BITS | number


def maker_of(fork: int) -> int:
    """The worker that created a fork."""
    return fork >> _BITS


def number_of(fork: int) -> int:
    """Which of its creator's forks for this owner it is."""
    return fork & (1 << _BITS) - 1


def freed(value: int) -> StaleReferenceError:
    """The error for a fork that its owner does not register."""
    return StaleReferenceError(
        f"value {spell(value)} has been freed: the worker that passed the reference on has "
        "died, or released it too early"
    )


def spell(fork: int) -> str:
    """A fork id as people read it: maker.number."""
    return f"{maker_of(fork)}.{number_of(fork)}"


@dataclass(slots=True)
class Create(Call):
    """Creator → owner: call this and keep the result. Acknowledged when the function has returned.

    ids: the value, and if the function is the name of a method, the value and fork it belongs to.
    """


@dataclass(slots=True)
class CreateNow(Create):
    """Creator → owner: the same, but answered with the result, or what the function raised."""


@dataclass(slots=True)
class Invoke(Call):
    """Holder → owner: call this method of a value; ids: the value, the sender's fork."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """Holder → owner: request a value (or its type), once it exists."""

    value: int
    fork: int
    part: str
    adopts: bool = False
    """As `Adopt`, first."""


@dataclass(frozen=True, slots=True)
class Adopt:
    """New holder → owner: register a fork from another holder. The response: whether it counts."""

    value: int
    fork: int


@dataclass(frozen=True, slots=True)
class Notes:
    """Any worker → another: notes that can wait for a moment, in one batch."""

    released: list[tuple[int, int]]
    """Holder → owner: values and forks of them that are held no more."""
    received: list[int]
    """Receiver of a reply → its sender: references in transit that have come."""
    failed: list[tuple[int, str]]
    """Creator → owner: values whose call failed, and why. If it has not come, it never will."""


@dataclass(frozen=True, slots=True)
class Recall:
    """Sender → receiver: a fork was in transit to you; has it arrived?

    The response is yes, no, or None: it may still arrive, ask again.
    """

    owner: int
    fork: int
    token: int
