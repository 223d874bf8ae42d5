"""The codec gives back what it found in a message, for those who keep track of it."""

from typing import Any

import pytest
import torch

from gradwire._wire.codec import Codec, Manner
from gradwire._wire.frames import Limits
from gradwire._wire.messages import Call
from tests.wire.round_trip import LIMITS, PICKLE, PLAIN, assert_same

A = torch.arange(6.0).reshape(2, 3)
X, Y = A.clone().requires_grad_(), (A + 1).requires_grad_()


class Thing:
    """An object for which a number travels."""

    def __init__(self, number: int) -> None:
        self.number = number


class Special(Thing):
    """Not one: it is another type."""


class Sent:
    """What stands for things in one message that leaves."""

    def __init__(self, to: int, is_reply: bool) -> None:
        self.about = to, is_reply
        self.freight: list[Any] = []
        self.was_taken_back = False

    def __call__(self, thing: Thing) -> tuple[int, ...]:
        self.freight.append(thing)
        return thing.number, 7

    def take_back(self) -> None:
        self.was_taken_back = True


class Got:
    """What makes things of their numbers in one message that arrived."""

    def __init__(self, sender: int) -> None:
        self.sender = sender
        self.waits: list[Any] = []

    def __call__(self, number: int, seven: int) -> Thing:
        assert seven == 7
        self.waits.append(number)
        return Thing(number)


def codec(limits: Limits = LIMITS) -> Codec:
    made = Codec(limits)
    made.replace((Thing,), Sent, Got)
    return made


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ((A, 1), []),
        ((X, A, Y), [X, Y]),
        ([A, {"deep": (Y, X)}], [Y, X]),
    ],
    ids="none two nested".split(),
)
@pytest.mark.parametrize("manner", [PICKLE, PLAIN], ids=["pickle", "plain"])
def test_tensors_that_require_grad_are_given_back_at_both_ends(
    value: Any, found: list[Any], manner: Manner
) -> None:
    for sent in (value, (value, {1, 2})):  # a set is not compiled
        parcel, traced, _ = codec().result(sent, manner, is_traced=True)
        assert list(map(id, traced)) == list(map(id, found))
        frame = parcel.arrive(1)
        frame.scope = frame.mark = 1
        result, arrived, _ = codec().open(frame)
        assert len(arrived) == len(found)
        for got, ours in zip(arrived, found, strict=True):
            assert_same(got.detach(), ours.detach())
        there = {id(t) for t in tensors_in(result.value)}
        assert {id(tensor) for tensor in arrived} <= there


def test_a_tensor_that_is_there_twice_is_found_once() -> None:
    for sent in ((X, A, X), (X, {1, 2}, X)):
        parcel, traced, _ = codec().result(sent, PICKLE, is_traced=True)
        assert list(map(id, traced)) == [id(X)]
        frame = parcel.arrive(1)
        frame.scope = frame.mark = 1
        result, (arrived,), _ = codec().open(frame)
        assert result.value[0] is result.value[2] is arrived


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value
    if not isinstance(value, (list, tuple, dict)):
        return []
    return [tensor for item in items for tensor in tensors_in(item)]


def test_numbers_travel_for_objects_of_exactly_these_types() -> None:
    things = [Thing(3), Special(4), {"deep": Thing(5)}]
    manner = Manner(to=9)
    _, _, sent = codec().result(things, manner)
    parcel, _, called = codec().call(Call(print, (things,), {}, None), manner)
    assert isinstance(sent, Sent)
    assert isinstance(called, Sent)
    assert (sent.about, called.about) == ((9, True), (9, False))
    assert sent.freight == [things[0], things[2]["deep"]]
    call, _, got = codec().open(parcel.arrive(1), 8)
    assert isinstance(got, Got)
    assert (got.sender, got.waits) == (8, [3, 5])
    first, second, third = call.args[0]
    assert [first.number, second.number, third["deep"].number] == [3, 4, 5]
    assert [type(first), type(second)] == [Thing, Special]


def test_what_was_found_is_taken_back_if_the_message_cannot_be_sent() -> None:
    made: list[Sent] = []

    def begin(to: int, is_reply: bool) -> Sent:
        made.append(Sent(to, is_reply))
        return made[-1]

    sending = Codec(Limits(1000, 1000))
    sending.replace((Thing,), begin, Got)
    for value in ("x" * 2000, torch.zeros(100_000), (i for i in range(3))):
        with pytest.raises((ValueError, TypeError)):
            sending.result([Thing(1), value], PICKLE)
        assert made.pop().was_taken_back


def test_nothing_is_begun_for_messages_that_are_compiled() -> None:
    for value in (None, A, (X, 1, "x"), {"a": [A]}):
        parcel, _, sent = codec().result(value, PICKLE)
        assert sent is None
        assert codec().open(parcel.arrive(1))[2] is None
