"""Messages become parcels, and frames messages: message types, serializers, limits."""

import enum
import pickle
import socket
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

from gradwire._transport.framed_socket import FrameReader
from gradwire._transport.shared_memory import Recycler
from gradwire._wire import safe_encoding
from gradwire._wire.codec import (
    CUSTOM,
    SAFE,
    SAFE_COMPILED,
    Manner,
)
from gradwire._wire.frames import HEADER, Frame, Limits, Parcel
from gradwire._wire.messages import CALL, FAILURE, RESULT, Call, Result
from gradwire._wire.pickling import PickleSerializer
from gradwire.errors import NotAllowedError, ProtocolError
from tests.wire.round_trip import (
    LARGE,
    LIMITS,
    PICKLE,
    PLAIN,
    Codec,
    assert_same,
    call_of,
    received,
)

A = torch.randn(2, 3)


def double(x: Any) -> Any:
    return x * 2


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
    with pytest.raises(ValueError, match="already used or not in"):
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
