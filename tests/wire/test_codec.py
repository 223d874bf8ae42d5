"""Messages become parcels, and frames messages: signatures, serializers, limits."""

import enum
import itertools
import pickle
import socket
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwire._transport.frame_reader import FrameReader
from gradwire._transport.shared_memory import Recycler
from gradwire._wire import safe_encoding
from gradwire._wire.codec import (
    COMPILED,
    CUSTOM,
    PICKLED,
    SAFE,
    SAFE_COMPILED,
    Manner,
)
from gradwire._wire.frames import HEADER, Frame, Limits, Parcel
from gradwire._wire.messages import CALL, FAILURE, RESULT, Call, Result
from gradwire._wire.pickling import PickleSerializer
from gradwire._wire.signature_decoder import Decoder, load_safely
from gradwire._wire.signature_encoder import Encoder, Subject, dump_safely
from gradwire.errors import NotAllowedError, ProtocolError
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


@pytest.fixture(params=[PICKLE, PLAIN], ids=["pickle", "plain"])
def manner(request: pytest.FixtureRequest) -> Manner:
    return request.param


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
        parcel, _ = encoder.encode(CALL, subject, ()) or pytest.fail("not compiled")
        call, _ = decoder.decode(parcel.arrive(1))
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


# Messages


@dataclass(frozen=True, slots=True)
class Note:
    """A message of an upper layer."""

    title: str
    content: Any


def note_codec(manner: Manner = PICKLE) -> Codec:
    codec = Codec(LIMITS, plain_only=manner.plain)
    codec.register(16, Note)
    return codec


def test_a_message_of_an_upper_layer_arrives(manner: Manner) -> None:
    frame = note_codec().message(Note("t", [A, 1]), manner).arrive(5)
    assert (frame.kind, frame.call, frame.scope) == (16, 5, 0)
    arrived = note_codec(manner).open(frame)
    assert type(arrived) is Note
    assert arrived.title == "t"
    assert_same(arrived.content[0], A)


@pytest.mark.parametrize("kind", [0, CALL, 15, 16, 256])
def test_a_code_can_be_registered_once_and_from_16_on(kind: int) -> None:
    with pytest.raises(ValueError, match="taken or not between 16 and 255"):
        note_codec().register(kind, Call)


ENDLESS = torch.empty(1 << 40, device="meta")  # more items than fit in memory


def plain_frame(kind: int, data: Any) -> Frame:
    return Frame(kind, SAFE, 1, bytes(8) + safe_encoding.dumps(data, []))


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (16, ("only one",)),
        (16, 5),
        (17, ("a", "b")),  # nobody has registered it
        (RESULT, (1, 2)),
        (FAILURE, (1, 2, 3, None, [])),
        (FAILURE, ("only one",)),
        (FAILURE, ENDLESS),
        (RESULT, ()),
        (CALL, ("a:b", ENDLESS, {}, None)),
        (CALL, ("a:b", (), ENDLESS, None)),
        (CALL, ("a:b", (), {}, ENDLESS)),
    ],
)
def test_a_message_with_wrong_fields_is_a_protocol_error(
    kind: int, fields: Any
) -> None:
    with pytest.raises(ProtocolError):
        note_codec().open(plain_frame(kind, fields))


def compiled_frame(kind: int, subject: Any, specs: Any, rest: bytes = b"") -> Frame:
    specs = tuple(specs) if type(specs) is list else specs
    signature = safe_encoding.dumps((*subject, specs), [])
    body = len(signature).to_bytes(4, "little") + signature + rest
    return Frame(kind, SAFE_COMPILED, 1, body)


ABOUT_CALL = ("a:b", (), None)
ABOUT_RESULT = (None, (), None)


def nested(depth: int) -> Any:
    return ("(", (nested(depth - 1),)) if depth else None


@pytest.mark.parametrize(
    ("kind", "subject", "specs"),
    [
        (FAILURE, ABOUT_CALL, []),
        (FAILURE, ABOUT_RESULT, ["d", "d", "d", None, "d"]),
        (RESULT, ABOUT_CALL, [None]),
        (RESULT, ABOUT_RESULT, []),  # not one value
        (RESULT, ABOUT_RESULT, [None, None]),
        (CALL, ABOUT_RESULT, []),
        (CALL, ABOUT_RESULT, ["d", "d", "d", None]),
        (17, ABOUT_RESULT, []),  # nobody has registered it
        (CALL, ("a:b", ("x",), None), []),  # a keyword without a value
        (CALL, ("a:b", (5,), None), [None]),
        (CALL, ("a:b", 5, None), []),
        (CALL, (5, (), None), []),
        (CALL, ("a:b", (), "modes"), []),
        (CALL, ("a:b", ()), 5),
        (CALL, (), []),
        (CALL, (ENDLESS,), []),
        (CALL, ABOUT_CALL, ENDLESS),
        (CALL, ABOUT_CALL, [ENDLESS]),
        (CALL, ABOUT_CALL, [(0, ENDLESS, False, -1)]),
        (CALL, ABOUT_CALL, ["d"]),  # no data follow
        (CALL, ABOUT_CALL, ["x"]),
        (CALL, ABOUT_CALL, [0]),  # no tensor 0
        (CALL, ABOUT_CALL, [True]),
        (CALL, ABOUT_CALL, [1.5]),
        (CALL, ABOUT_CALL, [()]),
        (CALL, ABOUT_CALL, [("[",)]),
        (CALL, ABOUT_CALL, [("[", ENDLESS)]),
        (CALL, ABOUT_CALL, [("<", ())]),
        (CALL, ABOUT_CALL, [("{", (), (None,))]),
        (CALL, ABOUT_CALL, [("{", (ENDLESS,), (None,))]),
        (CALL, ABOUT_CALL, [nested(5)]),
        (CALL, ABOUT_CALL, [(0, (2,), False, -1)]),  # no bytes follow
        (CALL, ABOUT_CALL, [(0, (), False)]),
        (CALL, ABOUT_CALL, [(99, (), False, -1)]),
        (CALL, ABOUT_CALL, [(-1, (), False, -1)]),
        (CALL, ABOUT_CALL, [(0, (-1,), False, -1)]),
        (CALL, ABOUT_CALL, [(0, (0.0,), False, -1)]),
        (CALL, ABOUT_CALL, [(0, (1 << 32, 1 << 32), False, -1)]),
        (CALL, ABOUT_CALL, [(0, (0, 1 << 62, 1 << 62), False, -1)]),
        (CALL, ABOUT_CALL, [(0, (0, 1 << 100), False, -1)]),
        (CALL, ABOUT_CALL, [(0, (1 << 14,), False, -1)]),  # too large to be small
        (CALL, ABOUT_CALL, [(0, (1 << 14,), False, 0)]),  # no area
        (CALL, ABOUT_CALL, [(0, (1 << 14,), False, 1)]),
        (CALL, ABOUT_CALL, [(4, (0,), True, -1)]),  # integers have no gradients
    ],
)
def test_a_signature_that_makes_no_sense_is_a_protocol_error(
    kind: int, subject: Any, specs: Any
) -> None:
    frame = compiled_frame(kind, subject, specs)
    with pytest.raises(ProtocolError):
        Codec(LIMITS).open(frame)


@pytest.mark.parametrize("data", [{}, {"a": 1}, 5, None, [], "", ([],), [1], [1, 2, 3]])
def test_data_that_do_not_fit_their_signature_are_a_protocol_error(data: Any) -> None:
    frame = compiled_frame(CALL, ABOUT_CALL, ("d", "d"), safe_encoding.dumps(data, []))
    with pytest.raises(ProtocolError, match="data does not fit"):
        Codec(LIMITS).open(frame)


# Serializers


class Point:
    """Sent with a reducer."""

    def __init__(self, x: int) -> None:
        self.x = x


class Point3(Point):
    """Not sent with that reducer: it is another type."""


def test_objects_of_exactly_that_type_are_sent_with_their_reducer() -> None:
    codec = Codec(LIMITS)
    codec.register_reducer(Point, lambda point: (Point, (point.x + 100,)))
    value = [Point(1), Point3(1), {"deep": Point(2)}]
    first, second, third = codec.open(codec.result(value, PICKLE).arrive(1)).value
    assert [first.x, second.x, third["deep"].x] == [101, 1, 102]
    assert type(second) is Point3


class Backwards:
    """A user's own serializer."""

    def dumps(self, obj: Any, tensors: list[torch.Tensor]) -> bytes:
        def shelve(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                tensors.append(value)
                return {"tensor": len(tensors) - 1}
            return list(map(shelve, value)) if isinstance(value, tuple) else value

        return repr(shelve(obj)).encode()[::-1]

    def loads(self, data: bytes | memoryview, tensors: list[torch.Tensor]) -> Any:
        def unshelve(value: Any) -> Any:
            if isinstance(value, dict) and "tensor" in value:
                return tensors[value["tensor"]]
            return tuple(map(unshelve, value)) if isinstance(value, list) else value

        return unshelve(eval(bytes(data)[::-1]))


def test_a_custom_serializer_takes_the_place_of_pickle() -> None:
    codec = Codec(LIMITS, custom=Backwards())
    large = torch.arange(float(LARGE))
    parcel = codec.call(call_of(double, A, large, 5), PICKLE)
    assert parcel.encoding == CUSTOM
    assert len(parcel.bulk) == 1
    arrived = codec.open(parcel.arrive(1))
    assert arrived.function == "tests.wire.test_codec:double"
    assert_same(arrived.args[0], A)
    assert_same(arrived.args[1], large)
    assert codec.open(codec.result(7, PICKLE).arrive(1)) == Result(7)


def test_a_custom_serializer_is_not_used_with_an_allow_list() -> None:
    parcel = Codec(LIMITS, custom=Backwards()).result(7, PLAIN)
    assert parcel.encoding == SAFE
    assert received(parcel, PLAIN) == Result(7)


def test_a_worker_without_the_serializer_says_so() -> None:
    parcel = Codec(LIMITS, custom=Backwards()).result(7, PICKLE)
    with pytest.raises(ProtocolError, match="serializer that this worker lacks"):
        received(parcel)


def test_a_custom_serializer_may_put_only_dense_tensors_beside() -> None:
    codec = Codec(LIMITS, custom=Backwards())
    with pytest.raises(TypeError, match="only dense CPU tensors"):
        codec.result((torch.eye(3).to_sparse(),), PICKLE)


# The plain encoding


class Pair(NamedTuple):
    """Not plain: only its own type can be made of its bytes."""

    x: int


@pytest.mark.parametrize(
    "value",
    [object(), Point(1), Pair(1), enum.IntEnum("Number", "ONE")(1), range(3), double],
    ids=lambda value: type(value).__name__,
)
def test_what_is_not_plain_is_refused_by_name(value: Any) -> None:
    name = type(value).__qualname__
    for sent in (value, [value], {"key": value}):
        with pytest.raises(TypeError, match=rf"{name}: in allow-list mode only"):
            Codec(LIMITS).result(sent, PLAIN)


def test_a_worker_with_an_allow_list_never_unpickles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pickles = [
        Codec(LIMITS).result("short", PICKLE),
        Codec(LIMITS).result({1, 2}, PICKLE),
        Codec(LIMITS).call(call_of(lambda: 0), PICKLE),
        Codec(LIMITS).failure(ValueError("x"), PICKLE),
        Codec(LIMITS, custom=Backwards()).result(1, PICKLE),
    ]
    plains = [Codec(LIMITS).result(v, PLAIN) for v in ("short", {1, 2}, A.T)]
    monkeypatch.setattr(pickle, "loads", None)
    monkeypatch.setattr(PickleSerializer, "loads", None)
    codec = Codec(LIMITS, plain_only=True, custom=Backwards())
    for parcel in pickles:
        with pytest.raises(NotAllowedError, match="accepts no pickles"):
            codec.open(parcel.arrive(1))
    for parcel in plains:
        codec.open(parcel.arrive(1))


# Limits and headers


def test_a_message_as_long_as_the_limits_may_be_sent(manner: Manner) -> None:
    parcel = Codec(LIMITS).result((torch.zeros(LARGE), "x"), manner)
    exact = Limits(len(parcel.body), parcel.bulk_length)
    Codec(exact).result((torch.zeros(LARGE), "x"), manner)


@pytest.mark.parametrize(
    "value",
    ["x" * 10_000, ["x"] * 5000, torch.zeros(LARGE), [torch.zeros(LARGE)]],
    ids="text list tensor listed".split(),
)
def test_a_longer_message_is_refused_where_it_is_sent(
    value: Any, manner: Manner
) -> None:
    codec = Codec(Limits(9000, LARGE))
    with pytest.raises(ValueError, match="max_body=9000, max_bulk=65536; raise them"):
        codec.result(value, manner)
    with pytest.raises(ValueError, match="larger than"):
        codec.call(call_of(double, value), manner)


def test_a_header_says_what_the_parcel_is() -> None:
    parcel = Parcel(7, 5, b"body").with_bulk((), 1000)
    parcel.scope, parcel.mark, parcel.over = 3, 8, 6
    header = HEADER.unpack(parcel.header(11, segment=9))
    assert header == (1, 7, 5, 4, 11, 3, 8, 1000, 9, 6)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ((2, 7, 5, 4, 0, 0, 0, 0, 0, 0), "version 2"),
        ((1, 7, 5, 5, 0, 0, 0, 0, 0, 0), "body of 5 bytes, the limit is 4"),
        ((1, 7, 5, 4, 0, 0, 0, 11, 0, 0), "bulk of 11 bytes, the limit is 10"),
        ((1, 7, 5, 4, 0, 0, 0, (1 << 64) - 1, 0, 0), "the limit is 10"),
    ],
)
def test_a_header_that_announces_too_much_is_refused(
    fields: tuple[int, ...], complaint: str
) -> None:
    ours, other = socket.socketpair()
    with ours, other:
        other.send(HEADER.pack(*fields))
        reader = FrameReader(ours, Limits(4, 10), Recycler())
        with pytest.raises(ProtocolError, match=complaint):
            reader.pull()


def test_an_unknown_encoding_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError, match="unknown encoding 77"):
        Codec(LIMITS).open(Frame(RESULT, 77, 1, b""))
