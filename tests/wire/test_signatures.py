"""Calls and results by their signatures: compiled once, and all values arrive as they left."""

import enum
import itertools
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwire._wire import safe_encoding
from gradwire._wire.codec import (
    COMPILED,
    PICKLED,
    SAFE,
    SAFE_COMPILED,
    Manner,
)
from gradwire._wire.messages import CALL, Call, Result
from gradwire._wire.signature_decoder import Decoder, load_safely
from gradwire._wire.signature_encoder import Encoder, Subject, dump_safely
from gradwire.errors import ProtocolError
from tests.wire.round_trip import (
    LARGE,
    LIMITS,
    PICKLE,
    PLAIN,
    Codec,
    assert_same,
    call_of,
    called,
    received,
)


def double(x: Any) -> Any:
    return x * 2


# Signatures

A, B = torch.randn(2, 3), torch.randn(4)


@pytest.mark.parametrize(
    ("value", "is_short"),
    [
        (None, True),
        (5, True),
        ("text", True),
        (b"bytes", True),
        (1 << 100, True),
        (float("inf"), True),
        ((), True),
        ((None, 1), True),
        (((1,),), True),
        ([1, (2, {"a": None})], True),
        ([[[[[1]]]]], False),  # deep
        ((1,) * 100, True),
        ((1 << 63, 1), False),
        (list(range(100)), False),  # long
        ({(1, 2): 3}, False),
        ({1, 2}, False),
        (1j, False),
    ],
)
def test_common_results_go_the_short_way(
    value: Any, is_short: bool, manner: Manner
) -> None:
    parcel = Codec(LIMITS).result(value, manner)
    short = SAFE_COMPILED if manner.plain else COMPILED
    assert (parcel.encoding == short) is is_short
    arrived = received(parcel, manner)
    assert arrived == Result(value)
    assert type(arrived.value) is type(value)


def test_tensors_go_the_short_way_alone_or_in_a_tuple(manner: Manner) -> None:
    parcel = Codec(LIMITS).result((A, None, B, "x"), manner)
    assert parcel.encoding in (COMPILED, SAFE_COMPILED)
    first, nothing, second, text = received(parcel, manner).value
    assert_same(first, A)
    assert_same(second, B)
    assert (nothing, text) == (None, "x")


def test_a_call_arrives_with_arguments_keywords_and_modes(manner: Manner) -> None:
    modes = (False, True, True, (("cpu", "bfloat16"),))
    call = Call(torch.add, (A, 1, None), {"alpha": 2, "other": B}, modes)
    parcel = Codec(LIMITS).call(call, manner)
    assert parcel.encoding in (COMPILED, SAFE_COMPILED)
    arrived = received(parcel, manner)
    assert arrived.function == "torch:add"
    assert arrived.args[1:] == (1, None)
    assert_same(arrived.args[0], A)
    assert list(arrived.kwargs) == ["alpha", "other"]
    assert arrived.kwargs["alpha"] == 2
    assert_same(arrived.kwargs["other"], B)
    assert arrived.modes == modes


class Few(enum.IntEnum):
    ONE = 1


EXACT = [
    0,
    -1,
    (1 << 63) - 1,
    -1 << 63,
    1 << 63,
    -1 << 80,
    1.5,
    -0.0,
    float("inf"),
    True,
]


@pytest.mark.parametrize(
    ("number", "manner"),
    [
        *itertools.product(EXACT, (PICKLE, PLAIN)),
        (Few.ONE, PICKLE),
        (numpy.float64(2.5), PICKLE),
    ],
)
def test_numbers_arrive_as_they_left_among_other_values(
    number: Any, manner: Manner
) -> None:
    large = torch.ones(LARGE, dtype=torch.uint8)
    values = (number, A, "text", number, None, B, 7, 0.5, large)
    arrived = called(call_of(double, *values), manner).args
    for got, sent in zip(arrived, values, strict=True):
        if isinstance(sent, torch.Tensor):
            assert_same(got, sent)
        else:
            assert type(got) is type(sent)
            assert repr(got) == repr(sent)


def test_the_general_way_keeps_keywords_and_modes_too(manner: Manner) -> None:
    call = Call(double, (A.T,), {"key": {1: A.T}}, (True, False, True, ()))
    arrived = called(call, manner)
    assert arrived.modes == call.modes
    assert_same(arrived.args[0], A.T)
    assert_same(arrived.kwargs["key"][1], A.T)


def test_the_same_call_is_the_same_bytes_again(manner: Manner) -> None:
    codec = Codec(LIMITS)
    bodies = [codec.call(call_of(double, A, x=3), manner).body for _ in range(3)]
    assert len(set(bodies)) == 1
    other = codec.call(call_of(double, A.reshape(3, 2), x=3), manner).body
    assert other != bodies[0]


def test_a_signature_is_understood_once_and_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    codec = Codec(LIMITS)
    frame = codec.call(call_of(double, A), PICKLE).arrive(1)
    codec.open(frame)
    monkeypatch.setattr(safe_encoding, "loads", None)
    assert_same(codec.open(frame).args[0], A)


def test_tensors_that_share_memory_go_the_general_way(manner: Manner) -> None:
    parcel = Codec(LIMITS).call(call_of(double, A, A[0]), manner)
    assert parcel.encoding in (PICKLED, SAFE)


SQUARE = torch.arange(9.0).reshape(3, 3)
PAIR = torch.arange(18.0).reshape(2, 3, 3)
ONES = {
    "usual": (SQUARE, SQUARE + 1),
    "twice the same": (SQUARE, SQUARE),
    "of one storage": (PAIR[0], PAIR[1]),
    "at an offset": (PAIR[1], SQUARE),
    "transposed": (SQUARE, (SQUARE + 1).T),
    "expanded": (torch.tensor(2.0).expand(3, 3), SQUARE),
}


@pytest.mark.parametrize("name", ONES)
def test_tensors_of_a_known_signature_are_looked_at_all_the_same(
    name: str, manner: Manner
) -> None:
    codec = Codec(LIMITS)
    for values in (ONES["usual"], ONES["usual"], ONES[name], ONES[name]):
        parcel = codec.result(values, manner)
        first, second = received(parcel, manner).value
        assert_same(first, values[0])
        assert_same(second, values[1])
    is_shared = name in ("twice the same", "of one storage")
    storages = {t.untyped_storage().data_ptr() for t in (first, second)}
    assert len(storages) == (1 if is_shared else 2)


@pytest.mark.parametrize("grad", [False, True])
def test_a_tensor_that_is_there_twice_arrives_as_one(
    grad: bool, manner: Manner
) -> None:
    x, large = A.clone().requires_grad_(grad), torch.zeros(LARGE)
    for values in ((x, x), (B, x, large, x, large), (torch.ones(0),) * 2):
        parcel = Codec(LIMITS).call(call_of(double, *values, key=values[1]), manner)
        assert parcel.encoding in (COMPILED, SAFE_COMPILED)
        arrived = received(parcel, manner)
        there = [*arrived.args, arrived.kwargs["key"]]
        here = [*values, values[1]]
        for got, sent in zip(there, here, strict=True):
            assert_same(got, sent)
        assert _repeats(there) == _repeats(here)


def _repeats(values: list[Any]) -> list[int]:
    """For each value, the place of the first that is the same object."""
    ids = [id(value) for value in values]
    return [ids.index(each) for each in ids]


NESTED: list[Any] = [
    [A, B],
    (A, (B, None, [A + 1])),
    {"weight": A, "more": {"bias": B, "numbers": (1, 2.5)}, "text": "x", "none": None},
    [(A, 1), (B, 2), {"deep": [(A * 2,)]}],
    [[A], "x", [1, 2], (1, 2), {"a": 1}],
    [torch.zeros(LARGE), A],
]


@pytest.mark.parametrize("value", NESTED, ids=range(len(NESTED)))
def test_tensors_in_lists_tuples_and_dicts_are_compiled(
    value: Any, manner: Manner
) -> None:
    parcel = Codec(LIMITS).result(value, manner)
    assert parcel.encoding in (COMPILED, SAFE_COMPILED)
    assert_alike(received(parcel, manner).value, value)
    arrived = called(call_of(double, value, key=value), manner)
    assert_alike([*arrived.args, arrived.kwargs["key"]], [value, value])


def assert_alike(got: Any, sent: Any) -> None:
    assert type(got) is type(sent)
    if isinstance(sent, torch.Tensor):
        assert_same(got, sent)
    elif isinstance(sent, dict):
        assert list(got) == list(sent)
        assert_alike(list(got.values()), list(sent.values()))
    elif isinstance(sent, (list, tuple)):
        for each, other in zip(got, sent, strict=True):
            assert_alike(each, other)
    else:
        assert got == sent


@pytest.mark.parametrize(
    "value", [[A], {"a": A}, [list(range(50))], [1, [2]], [[0] * 40, A]]
)
def test_a_list_or_dict_that_is_there_twice_stays_one(value: Any) -> None:
    first, second = called(call_of(double, value, value)).args
    assert first is second
    assert_alike(first, value)
    inside, outside = called(call_of(double, [value, A], value)).args
    assert inside[0] is outside


def test_keys_that_are_equal_and_not_the_same_are_kept(manner: Manner) -> None:
    codec = Codec(LIMITS)
    for key in (1, True, 1.0, "1"):
        (got,) = received(codec.result({key: A}, manner), manner).value
        assert type(got) is type(key)


def test_one_that_is_negative_is_sent_as_what_it_means(manner: Manner) -> None:
    codec = Codec(LIMITS)
    codec.result(torch.ones(1), manner)
    negative = torch.tensor([1 + 2j]).conj().imag
    assert negative.is_neg()
    assert received(codec.result(negative, manner), manner).value.tolist() == [-2]


def test_a_long_signature_goes_the_general_way(manner: Manner) -> None:
    codec = Codec(LIMITS)
    tensors = tuple(torch.full((1,), float(i)) for i in range(500))
    for _ in range(2):  # also when it is known to be long
        parcel = codec.result(tensors, manner)
        assert parcel.encoding in (PICKLED, SAFE)
        assert torch.cat(received(parcel, manner).value).tolist() == list(range(500))


@pytest.mark.parametrize("value", [None, A, 5, (A, None)])
def test_a_known_signature_that_is_cut_off_is_refused(value: Any) -> None:
    codec = Codec(LIMITS)
    frame = codec.result(value, PICKLE).arrive(1)
    codec.open(frame)
    length = int.from_bytes(frame.body[:4], "little")
    frame.body = (length + 1).to_bytes(4, "little") + frame.body[4 : 4 + length]
    with pytest.raises(ProtocolError):
        codec.open(frame)


def test_the_signatures_remembered_are_bounded() -> None:
    encoder = Encoder(SAFE_COMPILED, dump_safely, LIMITS)
    decoder = Decoder(load_safely, {CALL: Call}, LIMITS)
    for number in range(1000):
        subject: Subject = (f"module:{number}" + "x" * 3000, (), None)
        encoded = encoder.encode(CALL, subject, ())
        assert encoded is not None
        parcel = encoded[0]
        call, *_ = decoder.decode(parcel.arrive(1))
        assert call == Call(subject[0], (), {}, None)
    assert sum(len(signature) for _, signature in decoder._known) <= 1 << 20


SMALL_TENSORS = st.tuples(
    st.sampled_from([torch.float32, torch.int64, torch.bool]),
    st.lists(st.integers(0, 3), max_size=3),
).map(lambda spec: torch.ones(spec[1], dtype=spec[0]))
ARGUMENTS = st.one_of(
    st.none(),
    st.integers(),
    st.text(max_size=5),
    st.lists(st.booleans(), max_size=3),
    st.sampled_from([torch.zeros(LARGE), torch.zeros(LARGE // 2, 2)]),
    SMALL_TENSORS,
)


@pytest.mark.parametrize("way", [PICKLE, PLAIN], ids=["pickle", "plain"])
@given(args=st.lists(ARGUMENTS), kwargs=st.dictionaries(st.text(), ARGUMENTS))
def test_any_arguments_arrive_in_their_places(
    way: Manner, args: list[Any], kwargs: dict[str, Any]
) -> None:
    arrived = called(Call(double, tuple(args), kwargs, None), way)
    assert list(arrived.kwargs) == list(kwargs)
    ours = [*args, *kwargs.values()]
    theirs = [*arrived.args, *arrived.kwargs.values()]
    for sent, value in zip(ours, theirs, strict=True):
        if isinstance(sent, torch.Tensor):
            assert_same(value, sent)
        else:
            assert value == sent
