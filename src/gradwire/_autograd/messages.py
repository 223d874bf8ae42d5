"""What workers say to each other about contexts and passes.

A message of a pass is numbers and tensors, and so are most answers to it: they are
`TensorMessage`s. A gradient that is missing is None among the tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from types import MappingProxyType
from typing import Any, NamedTuple

from .._wire.messages import TensorMessage, are_numbers_and_tensors
from ..errors import ProtocolError
from .actions import Slot, Words

STEP, ABORT, RELEASE, OVER, DIRECT, CLAIM = 48, 49, 50, 51, 52, 53

RETAIN, CREATE, ACCUMULATE, QUIET, ANOMALY, CHECK_NAN = 1, 2, 4, 8, 16, 32
"""How a pass is run: keep the graph; make the gradients differentiable; fill `.grad` too; keep no
gradients in the context (the functional form); in anomaly mode, where gradients may not be nan."""

Delivery = tuple[int, tuple[Any, ...], int, tuple[int, ...]]
"""Gradients for one send: its id; a gradient, or None where there is none, for each of its tensors;
the id under which the gradients themselves were sent, or 0; and which of them were."""


Plain = tuple[int, Sequence[Any]]
"""The same in a direct pass: the id of the send, and a gradient or None for each of its tensors."""

Shortcuts = Mapping[int, int]
"""Sends of the asker that go back to whom it asks, with what came from there as it came: each with
the send that it came by. So gradients for the first are gradients for the second."""

Followed = tuple[list[Plain], Sequence[int], Sequence[int]]
"""The answer in a direct pass: all is done; gradients for the asker; who has parked some; which
shortcuts were taken."""


NO_SHORTCUTS: Shortcuts = MappingProxyType({})


class Step(TensorMessage):
    """A worker → another, in a pass: here are gradients for your sends, others will get none.

    The numbers: the pass, what is said (`Words`), and what the gradients are for.
    """

    __slots__ = ()


class Direct(TensorMessage):
    """A worker → another, in a direct pass: here are gradients for your sends.

    The numbers: those of the trip, the shortcuts, and what the gradients are for.
    """

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Over:
    """A worker → its engager, in a pass: it has ended here. As an answer to a step is."""

    context: int
    number: int
    outcome: Any


@dataclass(frozen=True, slots=True)
class Abort:
    """A worker → those that owe it an answer or their end in a pass: it has failed, let go."""

    context: int
    number: int
    failed: Any
    """How: a packed `Failed`."""


@dataclass(frozen=True, slots=True)
class Release:
    """A worker → those its contexts know: these are over. Passed on by whoever has one."""

    contexts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Claim:
    """A worker → the one that began contexts: who told me of them is lost. Those that are over?"""

    contexts: tuple[int, ...]


class About(NamedTuple):
    """Which pass, and how it is run."""

    context: int
    number: int
    """Of the pass: the worker that began it and a count."""
    flags: int


class Trip(NamedTuple):
    """A message of a direct pass, without the gradients."""

    context: int
    number: int
    flags: int
    since: int
    """Whoever leads has ended all its passes of this context before this one."""
    depth: int = 0
    """How many workers wait for what follows."""

    @property
    def about(self) -> About:
        return About(*self[:3])


class Failed(NamedTuple):
    """What went wrong in a pass, and on which worker: as text, and pickled where possible."""

    worker: int
    type_name: str
    message: str
    trace: str
    pickled: bytes | None
    tensors: tuple[Any, ...]


class Done(NamedTuple):
    """All is done on a worker, and these are its last gradients for whom it tells."""

    deliveries: Sequence[Delivery] = ()


class Noted(NamedTuple):
    """There is still something to do. `is_engaged`: the end will be told."""

    is_engaged: bool = False
    words: Words | None = None
    deliveries: Sequence[Delivery] = ()


Outcome = Done | Failed

_DONE = Done()
_NOTED, _ENGAGED = Noted(), Noted(is_engaged=True)
_SHORT = {0: _NOTED, 1: _ENGAGED}
_TRIP = len(Trip._fields)
_COUNTS = 2  # at the beginning of an answer
_FAILED = 1 + len(Failed._fields)


def step(about: About, words: Words, deliveries: Sequence[Delivery]) -> Step:
    facts = [*about]
    _put_words(facts, words)
    return Step(facts, _put_deliveries(facts, deliveries))


def read_step(step: Step) -> tuple[About, Words, list[Delivery]]:
    """What a step says.

    Raises:
        ProtocolError: it makes no sense, or a gradient is missing.
    """
    with _Reading(step.numbers) as facts:
        about = About(next(facts), next(facts), next(facts))
        words = _take_words(facts)
        return about, words, _take_deliveries(facts, step.tensors)


def direct(
    trip: Trip, deliveries: Sequence[Plain], shortcuts: Shortcuts = NO_SHORTCUTS
) -> Direct:
    """What goes on from whoever got, or made, this trip."""
    context, number, flags, since, depth = trip
    facts = [context, number, flags, since, depth + 1, len(shortcuts)]
    if shortcuts:
        facts += [*shortcuts, *shortcuts.values()]
    return Direct(facts, _put_plain(facts, deliveries))


def read_direct(direct: Direct) -> tuple[Trip, list[Plain], Shortcuts]:
    """What a direct message says.

    Raises:
        ProtocolError: it makes no sense, or a gradient is missing.
    """
    facts, gradients = direct.numbers, direct.tensors
    if len(facts) <= _TRIP:
        raise ProtocolError("a message of a pass ends too early")
    trip, count = Trip(*facts[:_TRIP]), facts[_TRIP]
    at = _TRIP + 1
    if not count:  # as mostly
        return trip, _take_plain(facts, at, gradients), NO_SHORTCUTS
    middle, end = at + count, at + 2 * count
    if not at < middle < end <= len(facts):
        raise ProtocolError("a message of a pass ends too early")
    shortcuts = dict(zip(facts[at:middle], facts[middle:end], strict=True))
    return trip, _take_plain(facts, end, gradients), shortcuts


def pack_followed(
    deliveries: Sequence[Plain], parked: Collection[int], taken: Collection[int] = ()
) -> Any:
    """An answer to a direct message, as it is sent."""
    if not (deliveries or parked or taken):
        return None
    facts = [len(parked), len(taken), *parked, *taken]
    return TensorMessage(facts, _put_plain(facts, deliveries))


def unpack_followed(answer: Any) -> Followed | Failed:
    """What such an answer says.

    Raises:
        ProtocolError: nothing that makes sense.
    """
    if answer is None:
        return [], (), ()
    message = _tensors_or_failed(answer)
    if isinstance(message, Failed):
        return message
    facts, gradients = message.numbers, message.tensors
    if len(facts) < _COUNTS:
        raise ProtocolError("an answer of a pass ends too early")
    middle = _COUNTS + facts[0]
    end = middle + facts[1]
    if not _COUNTS <= middle <= end <= len(facts):
        raise ProtocolError("an answer of a pass ends too early")
    found = _take_plain(facts, end, gradients)
    return found, facts[_COUNTS:middle], facts[middle:end]


def _put_plain(facts: list[int], deliveries: Sequence[Plain]) -> list[Any]:
    """A delivery: the send, how many tensors. The gradients of all."""
    flat: list[Any] = []
    for number, gradients in deliveries:
        facts += (number, len(gradients))
        flat += gradients
    return flat


def _take_plain(facts: Sequence[int], at: int, flat: Sequence[Any]) -> list[Plain]:
    count = len(facts)
    if count == at + 2 and facts[-1] == len(flat) > 0:  # as most are
        return [(facts[at], flat)]
    deliveries: list[Plain] = []
    begin = 0
    while at + 1 < count:
        end = begin + facts[at + 1]
        if not begin < end <= len(flat):
            raise ProtocolError(f"send {facts[at]} lacks gradients that are not void")
        deliveries.append((facts[at], flat[begin:end]))
        begin, at = end, at + 2
    if at != count or begin != len(flat):
        raise ProtocolError("a message of a pass has numbers or gradients for nothing")
    return deliveries


def pack(answer: Outcome | Noted) -> Any:
    """An answer to a step, as it is sent: the common ones as next to nothing."""
    if type(answer) is Failed:
        return (1, *answer)
    if type(answer) is Done:
        if not answer.deliveries:
            return None
        facts = [0]
        return TensorMessage(facts, _put_deliveries(facts, answer.deliveries))
    assert type(answer) is Noted
    if answer.words is None and not answer.deliveries:
        return int(answer.is_engaged)
    facts = [1, answer.is_engaged, answer.words is not None]
    if answer.words is not None:
        _put_words(facts, answer.words)
    return TensorMessage(facts, _put_deliveries(facts, answer.deliveries))


def unpack(answer: Any) -> Outcome | Noted:
    """What an answer says.

    Raises:
        ProtocolError: nothing that makes sense.
    """
    if answer is None:
        return _DONE
    if type(answer) is int and answer in _SHORT:
        return _SHORT[answer]
    message = _tensors_or_failed(answer)
    if isinstance(message, Failed):
        return message
    with _Reading(message.numbers) as facts:
        if not next(facts):
            return Done(_take_deliveries(facts, message.tensors))
        is_engaged, has_words = bool(next(facts)), next(facts)
        words = _take_words(facts) if has_words else None
        return Noted(is_engaged, words, _take_deliveries(facts, message.tensors))


def over(context: int, number: int, outcome: Outcome) -> Over:
    """That a pass has ended here, for the engager."""
    packed = pack(outcome)
    is_message = type(packed) is TensorMessage
    return Over(context, number, packed.unshared() if is_message else packed)


def _tensors_or_failed(answer: Any) -> TensorMessage | Failed:
    if type(answer) is TensorMessage:
        return answer
    if are_numbers_and_tensors(answer):  # it came in an `Over`
        return TensorMessage(*answer)
    if type(answer) is tuple and len(answer) == _FAILED and type(answer[0]) is int:
        return Failed(*answer[1:])
    raise ProtocolError("an answer of a backward pass makes no sense")


class _Reading:
    """Numbers one by one. That there are too few is the sender's fault."""

    __slots__ = ("_facts",)

    def __init__(self, facts: Sequence[int]) -> None:
        self._facts = facts

    def __enter__(self) -> Iterator[int]:
        return iter(self._facts)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind in (StopIteration, ValueError):
            raise ProtocolError("a message of a backward pass ends too early") from None


def _put_words(facts: list[int], words: Words) -> None:
    voids, listed, awaiting, confirmed, asks = words
    facts += (awaiting, asks, len(voids), *chain(*voids))
    facts += (len(confirmed), *chain(*confirmed))
    facts += (-1,) if listed is None else (len(listed), *listed)


def _take_words(facts: Iterator[int]) -> Words:
    awaiting, asks = next(facts), bool(next(facts))
    voids, confirmed = _take_slots(facts), _take_slots(facts)
    count = next(facts)
    listed = None if count < 0 else tuple(islice(facts, count))
    return Words(voids, listed, awaiting, confirmed, asks)


def _take_slots(facts: Iterator[int]) -> tuple[Slot, ...]:
    return tuple([(next(facts), next(facts)) for _ in range(next(facts))])


def _put_deliveries(facts: list[int], deliveries: Iterable[Delivery]) -> list[Any]:
    """A delivery: the send, how many tensors; the link, what is linked. The gradients of all."""
    flat: list[Any] = []
    for number, gradients, link, linked in deliveries:
        facts += (number, len(gradients), link, len(linked), *linked)
        flat += gradients
    return flat


def _take_deliveries(facts: Iterator[int], flat: Sequence[Any]) -> list[Delivery]:
    deliveries: list[Delivery] = []
    at = 0
    for number in facts:
        end = at + next(facts)
        link, linked = next(facts), tuple(islice(facts, next(facts)))
        if not at < end <= len(flat):
            raise ProtocolError(f"send {number} lacks gradients that are not void")
        deliveries.append((number, tuple(flat[at:end]), link, linked))
        at = end
    return deliveries
