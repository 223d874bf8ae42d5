"""The messages about contexts and passes.

A request of a pass, and most responses, are numbers and tensors: `TensorMessage`s. A missing
gradient is None among the tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, NamedTuple

from .._wire.messages import TensorMessage
from ..errors import ProtocolError
from .pass_state import Step

PASS, ABORT, RELEASE, CLAIM = 48, 49, 50, 53

RETAIN, CREATE, ACCUMULATE, QUIET, ANOMALY, CHECK_NAN = 1, 2, 4, 8, 16, 32
"""How a pass is run: keep the graph; make the gradients differentiable; fill `.grad` too; keep no
gradients in the context (the functional form); in anomaly mode, where gradients may not be nan."""


class PassRequest(TensorMessage):
    """A worker → another, in a pass: gradients and announcements; the response is sent when all
    that follows is done. See `pass_state.py`.
    """

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Abort:
    """A worker → those that owe it a response in a pass, or have parked something: it failed."""

    context: int
    number: int
    failed: Any
    """How: a packed `Failed`."""


@dataclass(frozen=True, slots=True)
class Release:
    """A worker → those its contexts know: these have ended. Passed on by each receiver."""

    contexts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Claim:
    """A worker → the one that began contexts: their other source is lost. Which have ended?"""

    contexts: tuple[int, ...]


class Header(NamedTuple):
    """Which pass a request belongs to, how that runs, and what is requested."""

    context: int
    number: int
    """Of the pass: the worker that leads it and a count."""
    flags: int
    since: int
    """Whoever leads has ended all its passes of this context before this one."""
    step: int = Step.RUN
    depth: int = 0
    """How many workers wait for what follows."""


class Delivery(NamedTuple):
    """The gradients for one message."""

    send: int
    gradients: Sequence[Any]
    """For each of its tensors one, or None where there is none."""
    link: int = 0
    """The id under which the gradients themselves were sent, to be differentiated, or 0."""
    linked: Sequence[int] = ()
    """Which of them were."""


class Load:
    """What a request brings to a worker, or a response to the requester."""

    __slots__ = ("deliveries", "slots", "voids")

    def __init__(
        self,
        deliveries: Sequence[Delivery] = (),
        voids: Sequence[int] = (),
        slots: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.deliveries = [*deliveries]
        self.voids = [*voids]
        """Messages that no gradients will come for, though they were announced."""
        self.slots = [*slots]
        """Tensors of messages that gradients will come for, as message and index."""

    def __bool__(self) -> bool:
        return bool(self.deliveries or self.voids or self.slots)

    def add(self, other: Load) -> None:
        self.deliveries += other.deliveries
        self.voids += other.voids
        self.slots += other.slots


class Answer(NamedTuple):
    """The response to a request: everything is done."""

    load: Load
    parked: Mapping[int, int] = {}
    """By how much the number of parked messages has changed, by worker."""


class Failed(NamedTuple):
    """What went wrong in a pass, and on which worker: as text, and pickled where possible."""

    worker: int
    type_name: str
    message: str
    trace: str
    pickled: bytes | None
    tensors: tuple[Any, ...]


_HEADER = len(Header._fields)


def request(header: Header, load: Load) -> PassRequest:
    """What goes on from whoever got this header, or made it."""
    facts = [*header]
    facts[-1] += 1
    return PassRequest(facts, _put(facts, load, header.flags))


def read_request(request: PassRequest) -> tuple[Header, Load]:
    """Decode a request.

    Raises:
        ProtocolError: it is malformed, or a gradient is missing.
    """
    facts = request.numbers
    if len(facts) < _HEADER or not 0 <= facts[_HEADER - 2] < len(Step):
        raise ProtocolError("malformed request of a backward pass")
    header = Header(*facts[:_HEADER])
    return header, _take(facts, _HEADER, request.tensors, header.flags)


def pack(answer: Answer, flags: int) -> Any:
    """Encode a response; an empty one as None."""
    load, parked = answer
    if not load and not parked:
        return None
    facts = [len(parked), *chain(*parked.items())]
    return TensorMessage(facts, _put(facts, load, flags))


def unpack(answer: Any, flags: int) -> Answer | Failed:
    """Decode a response.

    Raises:
        ProtocolError: it is malformed.
    """
    if answer is None:
        return Answer(Load())
    if type(answer) is not TensorMessage:
        return read_failed(answer)
    facts = answer.numbers
    count = facts[0] if facts else -1
    end = 1 + 2 * count
    if not 0 < end <= len(facts):
        raise ProtocolError("malformed response of a backward pass")
    load = _take(facts, end, answer.tensors, flags)
    return Answer(load, dict(zip(facts[1:end:2], facts[2:end:2], strict=True)))


def pack_failed(failed: Failed) -> tuple[Any, ...]:
    return tuple(failed)


def read_failed(packed: Any) -> Failed:
    """Decode an error.

    Raises:
        ProtocolError: it is malformed.
    """
    is_any = type(packed) is tuple and len(packed) == len(Failed._fields)
    if not is_any or type(packed[0]) is not int:
        raise ProtocolError("malformed response of a backward pass")
    return Failed(*packed)


def _put(facts: list[int], load: Load, flags: int) -> list[Any]:
    """Add what a load is to the facts; its tensors. Links are there if gradients have histories."""
    voids, slots = load.voids, load.slots
    facts += (len(voids), len(slots))
    if voids or slots:
        facts += (*voids, *chain(*slots))
    flat: list[Any] = []
    for send, gradients, link, linked in load.deliveries:
        facts += (send, len(gradients))
        if flags & CREATE:
            facts += (link, len(linked), *linked)
        flat += gradients
    return flat


def _take(facts: Sequence[int], at: int, flat: Sequence[Any], flags: int) -> Load:
    """What a load is, by the facts from there on."""
    is_one = len(facts) == at + 4 and facts[-1] == len(flat) > 0  # the usual case
    if is_one and not (facts[at] or facts[at + 1]):
        return Load([Delivery(facts[-2], flat)])
    rest = iter(facts[at:])
    load = Load()
    try:
        n_voids, n_slots = next(rest), next(rest)
        if n_voids:
            load.voids = _some(rest, n_voids)
        if n_slots:
            pairs = _some(rest, 2 * n_slots)
            load.slots = [*zip(pairs[::2], pairs[1::2], strict=True)]
        begin = 0
        for send in rest:
            count = next(rest)
            end = begin + count
            link, linked = 0, []
            if flags & CREATE:
                link = next(rest)
                linked = _some(rest, next(rest))
            if not begin < end <= len(flat) or not all(0 <= i < count for i in linked):
                raise ProtocolError(f"send {send} lacks gradients that are not void")
            load.deliveries.append(Delivery(send, flat[begin:end], link, linked))
            begin = end
    except StopIteration:
        raise ProtocolError("truncated message of a backward pass") from None
    if begin != len(flat):
        raise ProtocolError("message of a backward pass with surplus gradients")
    return load


def _some(rest: Iterator[int], count: int) -> list[int]:
    found = [*islice(rest, min(max(count, 0), sys.maxsize))]
    if len(found) != count:
        raise ProtocolError("truncated message of a backward pass")
    return found
