"""The plain encoding: any plain data round-trip, and any bytes do no harm."""

import math
import struct
import tracemalloc
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire._wire import safe_encoding
from gradwire.errors import ProtocolError

pytestmark = pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors is in prototype:UserWarning"
)

KEYS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.text(), st.binary(), st.floats()
)
LEAVES = st.one_of(
    KEYS,
    st.text(st.characters(exclude_categories=()), max_size=5),  # surrogates too
    st.complex_numbers(),
    st.binary().map(bytearray),
    st.sampled_from([torch.float32, torch.bfloat16, torch.qint8, torch.bool]),
    st.sampled_from([torch.device("cpu"), torch.device("cuda", 3)]),
    st.lists(st.integers(0, 1 << 62)).map(torch.Size),
    st.builds(slice, KEYS, KEYS, KEYS),
    st.sets(KEYS),
    st.frozensets(KEYS),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.dictionaries(KEYS, inner),
        st.dictionaries(st.tuples(KEYS, KEYS), inner),
    ),
    max_leaves=20,
)


def same(first: Any, second: Any) -> bool:
    """Equal, of equal types all the way down, and a NaN is a NaN."""
    if type(first) is not type(second):
        return False
    if isinstance(first, float):
        return struct.pack("d", first) == struct.pack("d", second)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, dict):
        return same(list(first.items()), list(second.items()))
    if isinstance(first, (set, frozenset)):
        return same(sorted(first, key=repr), sorted(second, key=repr))
    if isinstance(first, slice):
        parts = ((s.start, s.stop, s.step) for s in (first, second))
        return same(*parts)
    if isinstance(first, complex):
        parts = ((c.real, c.imag) for c in (first, second))
        return same(*parts)
    return bool(first == second)


@given(value=VALUES)
def test_any_plain_data_arrive_as_they_were(value: Any) -> None:
    tensors: list[torch.Tensor] = []
    assert same(safe_encoding.loads(safe_encoding.dumps(value, tensors), []), value)
    assert not tensors


def test_tensors_stand_beside_in_order() -> None:
    first, second = torch.ones(2), torch.zeros(3)
    tensors: list[torch.Tensor] = []
    data = safe_encoding.dumps({"a": [first], "b": (second, first)}, tensors)
    assert all(a is b for a, b in zip(tensors, (first, second, first), strict=True))
    arrived = safe_encoding.loads(data, tensors)
    assert arrived["a"][0] is first
    assert arrived["b"][0] is second


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def test_data_may_nest_64_deep_and_no_deeper() -> None:
    assert safe_encoding.loads(safe_encoding.dumps(nested(64), []), []) == nested(64)
    with pytest.raises(TypeError, match="nested deeper than 64"):
        safe_encoding.dumps(nested(65), [])
    with pytest.raises(ProtocolError, match="nested too deep"):
        safe_encoding.loads(b"[\x01\x00\x00\x00" * 100_000, [])


def test_data_that_hold_themselves_are_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(TypeError, match="nested deeper"):
        safe_encoding.dumps(loop, [])


def loads_or_refuses(data: bytes, tensors: list[torch.Tensor]) -> None:
    try:
        safe_encoding.loads(data, tensors)
    except ProtocolError:
        pass


TAGS = b"NTFifcsbBdD[({<^z|R@"
LENGTHS = st.one_of(
    st.integers(0, 20), st.sampled_from([(1 << 32) - 1, 1 << 31, 1 << 20])
)
WORDS = st.sampled_from(
    [b"float32", b"meta", b"nested", b"device", b"coo", b"compressed", b"quantized"]
)
PIECES = st.one_of(
    st.builds(
        lambda tag, length: bytes([tag]) + struct.pack("<I", length),
        st.sampled_from(TAGS),
        LENGTHS,
    ),
    WORDS.map(lambda word: b"s" + struct.pack("<I", len(word)) + word),
    st.integers().map(lambda number: safe_encoding.dumps(number, [])),
    st.binary(max_size=9),
)


@given(data=st.one_of(st.binary(), st.lists(PIECES, max_size=12).map(b"".join)))
@settings(max_examples=5 * settings().max_examples)
def test_any_bytes_are_plain_data_or_a_protocol_error(data: bytes) -> None:
    loads_or_refuses(data, [torch.ones(3)])


@given(value=VALUES, data=st.data())
@settings(max_examples=3 * settings().max_examples)
def test_changed_bytes_are_plain_data_or_a_protocol_error(
    value: Any, data: st.DataObject
) -> None:
    sent = bytearray(safe_encoding.dumps(value, []))
    at = data.draw(st.integers(0, len(sent) - 1))
    sent[at] = data.draw(st.integers(0, 255))
    loads_or_refuses(bytes(sent), [])
    loads_or_refuses(bytes(sent[:at]), [])
    loads_or_refuses(bytes(sent + sent[:at]), [])


@pytest.mark.parametrize("tag", TAGS)
def test_a_length_is_not_believed_before_memory_is_taken(tag: int) -> None:
    data = bytes([tag]) + struct.pack("<I", (1 << 32) - 1) + bytes(100)
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            safe_encoding.loads(data, [])
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


# Tensors of other kinds


def recipe(name: Any, *parts: Any) -> tuple[bytes, list[torch.Tensor]]:
    """The bytes that say: make this kind of tensor out of these parts."""
    tensors: list[torch.Tensor] = []
    data = safe_encoding.dumps([name, parts], tensors)
    return b"R" + data[1:], tensors


ONES, MANY = torch.ones(3), torch.ones(1).expand(1 << 40)
INDEX = torch.zeros(1, 3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("no such kind", ()),
        (["coo"], ()),
        (5, ()),
        ((1 << 20_000,), ()),  # too long to be printed
        ("coo", ()),
        ("coo", (INDEX, ONES, (3,), False)),
        ("coo", (INDEX, ONES, "shape", False, False)),
        ("coo", (INDEX, ONES, (0,), False, False)),
        ("coo", (INDEX - 1, ONES, (3,), False, False)),
        ("coo", (INDEX, torch.ones(2), (3,), False, False)),
        ("coo", (INDEX.expand(1, 3), INDEX, (3,), False, True)),
        ("coo", (INDEX[:, :1].expand(1, 1 << 40), MANY, (3,), False, False)),
        ("compressed", ("torch.strided", INDEX[0], INDEX[0], ONES, (3, 3), False)),
        ("compressed", ("torch.sparse_csr", INDEX[0], INDEX[0], ONES, (9, 9), False)),
        ("compressed", ("torch.sparse_csr", MANY, MANY, MANY, (1 << 40, 3), False)),
        ("quantized", ("cpu", ONES, 0.1, 0)),
        ("quantized", ("cpu", INDEX.to(torch.int8), "scale", 0)),
        ("quantized", ("cpu", INDEX.to(torch.int8)[0, :1].expand(1 << 40), 0.1, 0)),
        ("quantized", (torch.float64, INDEX.to(torch.int8), 0.1, 0)),
        ("quantized", ("cpu", None, 0.1, 0)),
        ("meta", (torch.float32, (-1,), (1,), False)),
        ("meta", (torch.float32, (1 << 62, 1 << 62), (1, 1), False)),
        ("meta", ("float32", (1,), (1,), False)),
        ("meta", (torch.int64, (1,), (1,), True)),
        ("nested", ([ONES, 5], False)),
        ("nested", ([MANY], False)),
        ("nested", (5, False)),
        ("nested", (torch.ones(1 << 40, 0), False)),
        ("device", ("cpu", ONES, False)),
        ("device", (("no such device", True), ONES, False)),
        ("device", ((torch.float64, False), ONES, False)),
        ("device", (("cpu", False), "tensor", False)),
    ],
)
def test_a_recipe_that_makes_no_sense_is_a_protocol_error(
    name: Any, parts: tuple[Any, ...]
) -> None:
    data, tensors = recipe(name, *parts)
    with pytest.raises(ProtocolError):
        safe_encoding.loads(data, tensors)


@pytest.mark.parametrize("kind", ["nested", "quantized"])
def test_naming_a_tensor_many_times_copies_it_not_as_often(kind: str) -> None:
    stored = torch.zeros(1 << 20, dtype=torch.int8)
    there = ("cpu", False)
    parts = ([stored], False) if kind == "nested" else (there, stored, 0.1, 0)
    one, _ = recipe(kind, *parts)
    data = b"[" + struct.pack("<I", 1000) + one * 1000
    with pytest.raises(ProtocolError, match="larger than the message"):
        safe_encoding.loads(data, [stored])


def test_integers_of_any_length_arrive() -> None:
    for bits in (0, 7, 8, 63, 64, 1000, 10_000):
        for number in ((1 << bits), -(1 << bits), (1 << bits) - 1):
            assert safe_encoding.loads(safe_encoding.dumps(number, []), []) == number


def test_numbers_that_are_none_arrive() -> None:
    arrived = safe_encoding.loads(
        safe_encoding.dumps([math.nan, -math.inf, -0.0], []), []
    )
    assert math.isnan(arrived[0])
    assert arrived[1] == -math.inf
    assert math.copysign(1, arrived[2]) == -1
