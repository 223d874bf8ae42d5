"""The codec gives back what it found in a message, for those who keep track of it."""

from typing import Any

import pytest
import torch

from gradwire._wire.codec import COMPILED, PICKLED, Codec, Manner
from gradwire._wire.frames import Limits
from gradwire._wire.messages import Call
from gradwire.errors import ProtocolError
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
    made.replace((Thing,), 2, Sent, Got)
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


def test_objects_beside_tensors_are_replaced_in_compiled_messages_too() -> None:
    one, two = Thing(3), Thing(5)
    manner = Manner(to=9)
    for args in ((one, 7, X), (X, {"deep": [Y, one]}, two), (one,)):
        call = Call("print", args, {"last": two}, None)
        parcel, traced, sent = codec().call(call, manner, is_traced=True)
        if two in args:  # the same one twice: only a pickle keeps that
            assert parcel.encoding == PICKLED
        else:
            assert parcel.encoding == COMPILED
        assert isinstance(sent, Sent)
        assert sent.about == (9, False)
        assert sent.freight == [thing for thing in (one, two) if thing in sent.freight]
        frame = parcel.arrive(1)
        frame.scope = frame.mark = 1
        there, arrived, got = codec().open(frame, 8)
        assert isinstance(got, Got)
        assert (got.sender, got.waits) == (8, [3, 5])
        assert there.kwargs["last"].number == 5
        assert len(arrived) == len(traced)
        for theirs, ours in zip(arrived, traced, strict=True):
            assert_same(theirs.detach(), ours.detach())


def test_a_result_that_is_replaced_is_compiled() -> None:
    parcel, _, sent = codec().result(Thing(4), Manner(to=9))
    assert isinstance(sent, Sent)
    assert (parcel.encoding, sent.about) == (COMPILED, (9, True))
    assert codec().open(parcel.arrive(1))[0].value.number == 4


def test_an_object_of_the_wrong_number_of_numbers_is_refused() -> None:
    parcel, *_ = codec().result(Thing(4), PICKLE)
    for width in (1, 3):
        other = Codec(LIMITS)
        other.replace((Thing,), width, Sent, Got)
        with pytest.raises(ProtocolError, match="object of 2 numbers"):
            other.open(parcel.arrive(1))
    with pytest.raises(ProtocolError, match="object of 2 numbers"):
        Codec(LIMITS).open(parcel.arrive(1))


def test_what_was_found_is_taken_back_if_the_message_cannot_be_sent() -> None:
    made: list[Sent] = []

    def begin(to: int, is_reply: bool) -> Sent:
        made.append(Sent(to, is_reply))
        return made[-1]

    sending = Codec(Limits(1000, 1000))
    sending.replace((Thing,), 2, begin, Got)
    for value in ("x" * 2000, torch.zeros(100_000), (i for i in range(3))):
        with pytest.raises((ValueError, TypeError)):
            sending.result([{1, 2}, Thing(1), value], PICKLE)
        assert made.pop().was_taken_back
    with pytest.raises(ValueError, match="larger than"):
        sending.result([Thing(1), torch.zeros(100_000)], PICKLE)
    assert not made, "the compiled way knows before"


def test_what_was_found_is_taken_back_if_another_object_cannot_be_replaced() -> None:
    made: list[Sent] = []

    class Once(Sent):
        def __call__(self, thing: Thing) -> tuple[int, ...]:
            if self.freight:
                raise LookupError("no more")
            return super().__call__(thing)

    def begin(to: int, is_reply: bool) -> Sent:
        made.append(Once(to, is_reply))
        return made[-1]

    sending = Codec(LIMITS)
    sending.replace((Thing,), 2, begin, Got)
    with pytest.raises(LookupError):
        sending.call(Call("print", (Thing(1), Thing(2)), {}, None), PICKLE)
    assert made.pop().was_taken_back
    assert not made


def test_nothing_is_begun_for_messages_that_are_compiled() -> None:
    for value in (None, A, (X, 1, "x"), {"a": [A]}):
        parcel, _, sent = codec().result(value, PICKLE)
        assert sent is None
        assert codec().open(parcel.arrive(1))[2] is None
