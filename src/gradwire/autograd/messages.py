"""What workers say to each other about contexts and passes.

A message of a pass is numbers and tensors. The numbers travel as one string of bytes, the tensors
each by itself behind it, and none is missing: so both the short encoding and the one that accepts
no pickles can carry it, quickly.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from ..errors import ProtocolError
from .passes import Words

STEP, ABORT, RELEASE, OVER, DIRECT, CLAIM = 48, 49, 50, 51, 52, 53

RETAIN, CREATE, ACCUMULATE, QUIET, ANOMALY, CHECK_NAN = 1, 2, 4, 8, 16, 32
"""How a pass is run: keep the graph; make the gradients differentiable; fill `.grad` too; keep no
gradients in the context (the functional form); in anomaly mode, where gradients may not be nan."""

Delivery = tuple[int, tuple[Any, ...], int, tuple[int, ...]]
"""Gradients for one send: its id; a gradient, or None where there is none, for each of its tensors;
the id under which the gradients themselves were sent, or 0; and which of them were."""


Plain = tuple[int, Sequence[Any]]
"""The same in a direct pass: the id of the send, and a gradient or None for each of its tensors."""

Followed = tuple[Sequence[Plain], Sequence[int]]
"""The answer in a direct pass: all is done; gradients for the asker; who has parked some."""


@dataclass(slots=True)
class Step:
    """A worker → another, in a pass: here are gradients for your sends, others will get none.

    `facts`: the pass, what is said (`Words`), and what the gradients are for.
    """

    facts: bytes
    gradients: tuple[Any, ...]


@dataclass(slots=True)
class Direct:
    """A worker → another, in a direct pass: here are gradients for your sends."""

    facts: bytes
    gradients: tuple[Any, ...]


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
_NOTHING: Followed = (), ()
_NOTED, _ENGAGED = Noted(), Noted(is_engaged=True)
_SHORT = {0: _NOTED, 1: _ENGAGED}


def step(about: About, words: Words, deliveries: Sequence[Delivery]) -> Step:
    facts = [*about]
    _put_words(facts, words)
    gradients = _put_deliveries(facts, deliveries)
    return Step(array("q", facts).tobytes(), gradients)


def read_step(step: Step) -> tuple[About, Words, list[Delivery]]:
    """What a step says.

    Raises:
        ProtocolError: it makes no sense, or a gradient is missing.
    """
    with _Reading(step.facts) as facts:
        about = About(next(facts), next(facts), next(facts))
        words = _take_words(facts)
        return about, words, _take_deliveries(facts, step.gradients)


def direct(trip: Trip, deliveries: Sequence[Plain]) -> Direct:
    """What goes on from whoever got, or made, this trip."""
    facts = [*trip]
    facts[-1] += 1
    return Direct(*_put_plain(facts, deliveries))


def read_direct(direct: Direct) -> tuple[Trip, list[Plain]]:
    """What a direct message says.

    Raises:
        ProtocolError: it makes no sense, or a gradient is missing.
    """
    try:
        facts = array("q", direct.facts)
        return Trip(*facts[:5]), _take_plain(facts, 5, direct.gradients)
    except (TypeError, ValueError, IndexError) as error:
        raise ProtocolError(f"a message of a pass makes no sense: {error}") from None


def pack_followed(deliveries: Sequence[Plain], parked: Iterable[int]) -> Any:
    """An answer to a direct message, as it is sent."""
    if not deliveries and not parked:
        return None
    workers = sorted(parked)
    facts, gradients = _put_plain([len(workers), *workers], deliveries)
    return (facts, *gradients)


def unpack_followed(answer: Any) -> Followed | Failed:
    """What such an answer says.

    Raises:
        ProtocolError: nothing that makes sense.
    """
    if answer is None:
        return _NOTHING
    _check_packed(answer)
    if type(answer[0]) is int:
        return Failed(*answer[1:])
    try:
        facts = array("q", answer[0])
        end = facts[0] + 1
        if not 0 < end <= len(facts):
            raise IndexError(f"{end - 1} workers")
        return _take_plain(facts, end, answer[1:]), facts[1:end]
    except (TypeError, ValueError, IndexError) as error:
        raise ProtocolError(f"an answer of a pass makes no sense: {error}") from None


def _put_plain(
    facts: list[int], deliveries: Sequence[Plain]
) -> tuple[bytes, tuple[Any, ...]]:
    """A delivery: the send; how many tensors; for each which of the gradients, or -1 for none.

    One gradient may be that of several tensors, as those of a sum are.
    """
    flat: list[Any] = []
    places: dict[int, int] = {}
    for number, gradients in deliveries:
        facts += (number, len(gradients))
        for gradient in gradients:
            if gradient is None:
                facts.append(-1)
                continue
            place = places.get(id(gradient))
            if place is None:
                place = places[id(gradient)] = len(flat)
                flat.append(gradient)
            facts.append(place)
    return array("q", facts).tobytes(), tuple(flat)


def _take_plain(facts: Sequence[int], at: int, flat: Sequence[Any]) -> list[Plain]:
    """Each tensor gets a gradient of its own."""
    deliveries: list[Plain] = []
    taken: set[int] = set()
    while at < len(facts):
        number, end = facts[at], at + 2 + facts[at + 1]
        found: list[Any] = []
        for place in facts[at + 2 : end]:
            if place == -1:
                found.append(None)
            elif place in taken:
                found.append(flat[place].clone())
            elif 0 <= place < len(flat):
                found.append(flat[place])
                taken.add(place)
        if not found or at + 2 + len(found) != end:
            raise ProtocolError(f"send {number} lacks gradients that are not void")
        deliveries.append((number, found))
        at = end
    return deliveries


def pack(answer: Outcome | Noted) -> Any:
    """An answer to a step, as it is sent: the common ones as next to nothing."""
    if type(answer) is Failed:
        return (1, *answer)
    if type(answer) is Done:
        if not answer.deliveries:
            return None
        facts = [0]
        return _packed(facts, answer.deliveries)
    assert type(answer) is Noted
    if answer.words is None and not answer.deliveries:
        return int(answer.is_engaged)
    facts = [1, answer.is_engaged, answer.words is not None]
    if answer.words is not None:
        _put_words(facts, answer.words)
    return _packed(facts, answer.deliveries)


def unpack(answer: Any) -> Outcome | Noted:
    """What an answer says.

    Raises:
        ProtocolError: nothing that makes sense.
    """
    if answer is None:
        return _DONE
    if type(answer) is int and answer in _SHORT:
        return _SHORT[answer]
    _check_packed(answer)
    if type(answer[0]) is int:
        return Failed(*answer[1:])
    with _Reading(answer[0]) as facts:
        if not next(facts):
            return Done(_take_deliveries(facts, answer[1:]))
        is_engaged, has_words = bool(next(facts)), next(facts)
        words = _take_words(facts) if has_words else None
        return Noted(is_engaged, words, _take_deliveries(facts, answer[1:]))


def _check_packed(answer: Any) -> None:
    if type(answer) is not tuple or not answer:
        raise ProtocolError("an answer of a backward pass makes no sense")


def _packed(facts: list[int], deliveries: Sequence[Delivery]) -> Any:
    gradients = _put_deliveries(facts, deliveries)
    return (array("q", facts).tobytes(), *gradients)


class _Reading:
    """Numbers one by one. That there are too few, or senseless ones, is the sender's fault."""

    __slots__ = ("_facts",)

    def __init__(self, facts: bytes) -> None:
        self._facts = facts

    def __enter__(self) -> Iterator[int]:
        numbers = array("q")
        try:
            numbers.frombytes(self._facts)
        except (TypeError, ValueError) as error:
            raise ProtocolError(f"no numbers in a backward pass: {error}") from None
        return iter(numbers)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind in (StopIteration, ValueError):
            raise ProtocolError("a message of a backward pass ends too early") from None


def _put_words(facts: list[int], words: Words) -> None:
    voids, listed, awaiting = words
    facts += (awaiting, len(voids), *voids)
    facts += (-1,) if listed is None else (len(listed), *listed)


def _take_words(facts: Iterator[int]) -> Words:
    awaiting = next(facts)
    voids = tuple(islice(facts, next(facts)))
    count = next(facts)
    return Words(voids, None if count < 0 else tuple(islice(facts, count)), awaiting)


def _put_deliveries(
    facts: list[int], deliveries: Iterable[Delivery]
) -> tuple[Any, ...]:
    """A delivery: the send; how many tensors, which get no gradient; the link, what is linked."""
    flat: list[Any] = []
    for number, gradients, link, linked in deliveries:
        absent = [i for i, g in enumerate(gradients) if g is None]
        facts += (number, len(gradients), len(absent), *absent)
        facts += (link, len(linked), *linked)
        flat += [g for g in gradients if g is not None] if absent else gradients
    return tuple(flat)


def _take_deliveries(facts: Iterator[int], flat: Sequence[Any]) -> list[Delivery]:
    deliveries: list[Delivery] = []
    at = 0
    for number in facts:
        count, absent = next(facts), tuple(islice(facts, next(facts)))
        link, linked = next(facts), tuple(islice(facts, next(facts)))
        end = at + count - len(absent)
        gradients = list(flat[at:end])
        if len(gradients) != end - at:
            raise ProtocolError(f"send {number} lacks gradients that are not void")
        for index in absent:
            gradients.insert(index, None)
        deliveries.append((number, tuple(gradients), link, linked))
        at = end
    return deliveries
