"""Dense tensors and views arrive as they were, bit for bit, in both encodings.

The worker that opens what came in the plain encoding accepts nothing else.
"""

import ctypes
import struct
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwire._wire.codec import Manner
from gradwire._wire.dense_tensors import DTYPE_CODES, INLINE, pack, unpack
from gradwire.errors import ProtocolError
from tests.wire.round_trip import (
    LARGE,
    PICKLE,
    PLAIN,
    assert_same,
    opened,
    packed,
    random_tensor,
    round_trip,
    same_memory,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:ComplexHalf support is experimental:UserWarning"
)


# Dense


@pytest.mark.parametrize("count", [3, LARGE], ids=["inline", "bulk"])
@pytest.mark.parametrize("dtype", DTYPE_CODES, ids=str)
def test_every_dtype_arrives_bit_for_bit(
    dtype: torch.dtype, count: int, manner: Manner
) -> None:
    sent = random_tensor(dtype, count)
    assert_same(round_trip(sent, manner), sent)  # the short way
    assert_same(round_trip([sent], manner)[0], sent)  # the general way


def test_the_table_of_dtypes_is_that_of_the_protocol() -> None:
    names = [str(dtype).removeprefix("torch.") for dtype in DTYPE_CODES]
    assert names[:10] == (
        "float32 float64 float16 bfloat16 int64 int32 int16 int8 uint8 bool".split()
    )
    assert {"complex32", "uint64", "float8_e4m3fn", "float8_e5m2"} <= set(names)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1, 1), (2, 3, 4), (1,) * 20])
def test_every_shape_arrives(shape: tuple[int, ...], manner: Manner) -> None:
    sent = random_tensor(torch.float32, *shape)
    assert_same(round_trip(sent, manner), sent)
    assert_same(round_trip([sent], manner)[0], sent)


@pytest.mark.parametrize("length", range(INLINE - 1, INLINE + 2))
def test_only_what_is_longer_than_the_bound_goes_to_the_bulk_area(
    length: int, manner: Manner
) -> None:
    sent = random_tensor(torch.uint8, length)
    for value in (sent, [sent]):
        parcel = packed(value, manner)
        assert bool(parcel.bulk) == (length > INLINE)
        arrived = opened(parcel.arrive(1), manner)
        assert_same(arrived[0] if type(value) is list else arrived, sent)


def test_nan_payloads_and_signed_zeros_arrive(manner: Manner) -> None:
    patterns = [0x7FF8_0000_0000_1234, -1, -(1 << 63), 0x7FF0_0000_0000_0001]
    sent = torch.tensor(patterns).view(torch.float64)
    assert_same(round_trip(sent, manner), sent)


# Views

GRID = torch.arange(6000.0).reshape(60, 100)
PICTURE = torch.randn(2, 3, 4, 5)
DENSE_VIEWS = {
    "transposed": GRID[:5, :].T,
    "large transposed": random_tensor(torch.int64, 90, 100).T,
    "permuted": PICTURE.permute(3, 0, 2, 1),
    "channels_last": PICTURE.to(memory_format=torch.channels_last),
    "expanded": torch.arange(3.0).expand(4, 3),
    "expanded in the middle": torch.arange(6.0).reshape(2, 1, 3).expand(2, 50000, 3),
    "expanded scalar": torch.tensor(7).expand(1000, 1000),
    "overlapping windows": torch.arange(100.0).unfold(0, 10, 1),
    "rows": GRID[10:20],
    "tail": torch.arange(20000)[10000:],
}
GAPPED_VIEWS = {
    "every other": torch.arange(20)[::2],
    "column": GRID[:, 7],
    "block": GRID[5:10, 5:10],
    "large block": random_tensor(torch.int64, 200, 200)[:150, :150],
    "diagonal": GRID.diagonal(),
    "steps both ways": GRID[::7, 3::11].T,
    "real parts": random_tensor(torch.complex64, 20).real,
}


@pytest.mark.parametrize("view", DENSE_VIEWS.values(), ids=DENSE_VIEWS)
def test_a_view_without_gaps_keeps_its_strides(
    view: torch.Tensor, manner: Manner
) -> None:
    arrived = round_trip([view], manner)[0]
    assert_same(arrived, view)
    assert arrived.stride() == view.stride()
    assert_same(round_trip(view, manner), view)


@pytest.mark.parametrize("view", GAPPED_VIEWS.values(), ids=GAPPED_VIEWS)
def test_a_view_with_gaps_arrives_without_them(
    view: torch.Tensor, manner: Manner
) -> None:
    parcel = packed(view, manner)
    assert parcel.bulk_length < view.nbytes + 64
    arrived = opened(parcel.arrive(1), manner)
    assert_same(arrived, view)
    assert arrived.is_contiguous()


@pytest.mark.parametrize("count", [1, 3, LARGE])
def test_conjugate_and_negative_views_arrive_resolved(
    count: int, manner: Manner
) -> None:
    number = torch.randn(count, dtype=torch.complex64)
    conjugate, negative = number.conj(), number.conj().imag
    assert conjugate.is_conj()
    assert negative.is_neg()
    for view in (conjugate, negative, conjugate[0], negative[0]):
        arrived = round_trip(view, manner)
        assert torch.equal(arrived, view)
        assert not arrived.is_conj()
        assert not arrived.is_neg()


@st.composite
def views(draw: st.DrawFn, memory: torch.Tensor) -> torch.Tensor:
    """Any view that fits into this memory, in any dtype."""
    dtypes = sorted(
        DTYPE_CODES.keys() - {torch.bool}, key=str
    )  # whose bits are not any
    dtype = draw(st.sampled_from(dtypes))
    flat = memory.view(dtype)
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    strides = [draw(st.integers(0, 9)) for _ in shape]
    span = sum(
        max(size - 1, 0) * step for size, step in zip(shape, strides, strict=True)
    )
    offset = draw(st.integers(0, flat.numel() - span - 1))
    return flat.as_strided(shape, strides, offset)


@given(data=st.data())
@pytest.mark.parametrize("way", [PICKLE, PLAIN], ids=["pickle", "plain"])
def test_any_views_of_one_memory_arrive_bit_for_bit(
    data: st.DataObject, way: Manner
) -> None:
    memory = random_tensor(torch.uint8, 4096)
    sent = data.draw(st.lists(views(memory), min_size=1, max_size=5))
    for arrived, view in zip(round_trip(sent, way), sent, strict=True):
        assert_same(arrived, view)


@given(data=st.data())
def test_overlapping_slices_stay_as_far_apart_as_they_were(data: st.DataObject) -> None:
    memory = torch.arange(20000)
    cuts = st.integers(0, 19999)
    pairs = data.draw(st.lists(st.tuples(cuts, cuts), min_size=2, max_size=6))
    spans = [(min(p), max(p) + 1) for p in pairs]
    sent = [memory[low:high] for low, high in spans]
    arrived = round_trip(sent, PICKLE)
    for (i, (low, high)), (j, (start, end)) in _pairs(spans):
        if low < end and start < high:
            distance = arrived[j].data_ptr() - arrived[i].data_ptr()
            assert distance == sent[j].data_ptr() - sent[i].data_ptr()


def _pairs(spans: list[tuple[int, int]]) -> list[Any]:
    numbered = list(enumerate(spans))
    return [(a, b) for a in numbered for b in numbered]


# Grad


@pytest.mark.parametrize("count", [3, LARGE])
def test_requires_grad_is_kept_and_what_arrives_is_a_leaf(
    count: int, manner: Manner
) -> None:
    leaf = torch.randn(count, requires_grad=True)
    for sent in (leaf, leaf * 2, leaf.detach(), (leaf * 2)[::2], leaf.expand(2, -1)):
        assert_same(round_trip(sent, manner), sent)
        assert_same(round_trip([sent], manner)[0], sent)


def test_requires_grad_is_kept_where_gradients_are_off(manner: Manner) -> None:
    sent = torch.randn(3, requires_grad=True)
    with torch.no_grad():
        assert_same(round_trip(sent, manner), sent)
    parcel = packed([sent], manner)
    with torch.inference_mode():
        arrived = opened(parcel.arrive(1), manner)[0]
    assert arrived.requires_grad


# Shared storages


def test_overlapping_tensors_share_one_storage(manner: Manner) -> None:
    memory = torch.arange(100.0)
    first, second = round_trip([memory[:60], memory[50:]], manner)
    second[0] = -1
    assert first[50] == -1


def test_rows_that_fill_half_the_span_share_it(manner: Manner) -> None:
    memory = torch.arange(400.0).reshape(4, 100)
    first, second = round_trip([memory[0], memory[3]], manner)
    assert same_memory(first, second)
    assert second.data_ptr() - first.data_ptr() == 3 * 400


@pytest.mark.parametrize("large", [1, 100])
def test_rows_picked_from_a_table_do_not_drag_it_along(
    large: int, manner: Manner
) -> None:
    table = torch.zeros(1000, 100 * large)
    rows = [table[5], table[500], table[995]]
    parcel = packed(rows, manner)
    assert len(parcel.body) + parcel.bulk_length < 3 * rows[0].nbytes + 1000
    arrived = opened(parcel.arrive(1), manner)
    assert not same_memory(arrived[0], arrived[1])


def test_columns_picked_from_a_table_do_not_drag_it_along(manner: Manner) -> None:
    table = torch.zeros(1000, 1000)
    parcel = packed([table[:, 0], table[:, 1]], manner)
    assert len(parcel.body) + parcel.bulk_length < 10_000


def test_a_view_with_gaps_shares_what_it_lies_in(manner: Manner) -> None:
    memory = torch.zeros(10, 10)
    whole, column, step = round_trip([memory, memory[:, 3], memory[::2]], manner)
    whole += 1
    assert column.tolist() == [1] * 10
    assert step.tolist() == [[1] * 10] * 5


def test_views_of_other_dtypes_share_the_storage(manner: Manner) -> None:
    memory = torch.arange(64, dtype=torch.uint8)
    sent = [memory[1:], memory.view(torch.int64)[1:], memory.view(torch.complex64)[3:]]
    arrived = round_trip(sent, manner)
    for ours, theirs in zip(arrived, sent, strict=True):
        assert_same(ours, theirs)
    arrived[1].zero_()
    assert arrived[0][7:].count_nonzero() == 0
    assert arrived[2].count_nonzero() == 0


def test_the_same_tensor_twice_is_one_object() -> None:
    for sent in (torch.randn(3), torch.randn(LARGE), torch.eye(3).to_sparse()):
        first, second = round_trip((sent, sent), PICKLE)
        assert first is second
        first, (second,) = round_trip([sent, [sent]], PICKLE)
        assert first is second


def test_the_same_tensor_twice_is_one_memory_in_the_plain_encoding() -> None:
    sent = torch.randn(LARGE)
    parcel = packed((sent, sent), PLAIN)
    assert len(parcel.bulk) == 1
    assert same_memory(*opened(parcel.arrive(1), PLAIN))


def test_empty_tensors_share_nothing(manner: Manner) -> None:
    memory = torch.zeros(1000, 1000)
    sent = [memory[:0], memory[999:999], torch.empty(0), memory[998]]
    parcel = packed(sent, manner)
    assert not parcel.bulk
    shapes = [t.shape for t in opened(parcel.arrive(1), manner)]
    assert shapes == [t.shape for t in sent]


def test_arrays_of_one_buffer_may_end_apart(manner: Manner) -> None:
    buffer = numpy.arange(100.0)
    sent = [torch.from_numpy(buffer[:10]), torch.from_numpy(buffer)]
    first, second = round_trip(sent, manner)
    assert_same(first, sent[0])
    assert_same(second, sent[1])
    assert same_memory(first, second)


# Copies


def test_large_tensors_are_sent_from_where_they_are(manner: Manner) -> None:
    memory = torch.zeros(100, 300)
    for value in (memory, [memory], [memory.T], [memory[:40], memory[30:90]]):
        (piece,) = packed(value, manner).bulk
        start = memory.data_ptr()
        assert start <= piece.tensor.data_ptr() < start + memory.nbytes


def test_large_tensors_live_in_the_area_they_arrived_in(manner: Manner) -> None:
    memory = torch.zeros(100, 300)
    for value in ((memory,), [memory.T], [memory[:40], memory[30:]]):
        frame = packed(value, manner).arrive(1)
        start = ctypes.addressof(frame.area)
        end = start + ctypes.sizeof(frame.area)
        for tensor in opened(frame, manner):
            assert start <= tensor.data_ptr() < tensor.data_ptr() + tensor.nbytes <= end
            tensor.fill_(1)  # it is ours to write to
        assert bytes(frame.area)[:4] == b"\x00\x00\x80\x3f"


def test_every_large_tensor_starts_at_a_multiple_of_64_bytes(manner: Manner) -> None:
    sent = [torch.zeros(INLINE + 1 + i, dtype=torch.uint8) for i in range(5)]
    for value in (sent, tuple(sent)):
        parcel = packed(value, manner)
        assert [piece.offset % 64 for piece in parcel.bulk] == [0] * 5


# Tables that lie


def table(
    lengths: list[int], *entries: tuple[tuple[int, ...], list[int]], rest: int = 0
) -> memoryview:
    """A table of tensors: per tensor block, dtype, flags, dimensions, offset, and numbers."""
    data = struct.pack(f"<II{len(lengths)}Q", len(entries), len(lengths), *lengths)
    for head, numbers in entries:
        data += struct.pack(f"<IBBHQ{len(numbers)}q", *head, *numbers)
    return memoryview(data + bytes(rest))


ONE = ((0, 0, 0, 1, 0), [1])  # one float32, in block 0
HUGE = 1 << 62


@pytest.mark.parametrize(
    "lies",
    [
        memoryview(b""),
        memoryview(struct.pack("<II", 1 << 31, 0)),
        memoryview(struct.pack("<II", 0, 1 << 31)),
        table([4], ONE),  # no bytes follow
        table([HUGE], ONE),
        table([INLINE], ONE, rest=INLINE),  # more bytes than the tensor has room for
        table([4], ((0, 0, 0, 1, 0), [0]), rest=4),  # and for none
        table([4], ((0, 0, 0, 1, 0), [2]), rest=4),
        table([4], ((0, 0, 0, 1, 4), [1]), rest=4),
        table([8], ((0, 0, 2, 1, 2), [1, 1]), rest=8),  # between two elements
        table([4], ((1, 0, 0, 1, 0), [1]), rest=4),  # no such block
        table([4], ((0, 200, 0, 1, 0), [1]), rest=4),  # no such dtype
        table([8], ((0, 4, 1, 1, 0), [1]), rest=8),  # integers have no gradients
        table([4], ((0, 0, 0, 65535, 0), [1]), rest=4),
        table([4], ((0, 0, 0, 1, 0), [-1]), rest=4),
        table([4], ((0, 0, 2, 1, 0), [1, -1]), rest=4),
        table([4], ((0, 0, 2, 1, 0), [HUGE, 0]), rest=4),  # more than can be counted
        table([4], ((0, 0, 2, 2, 0), [HUGE, HUGE, 0, 0]), rest=4),
        table([4], ((0, 0, 0, 3, 0), [0, HUGE, HUGE]), ONE, rest=4),
    ],
)
def test_a_table_that_lies_is_a_protocol_error(lies: memoryview) -> None:
    with pytest.raises(ProtocolError):
        unpack(lies, None)


def test_small_views_keep_their_gaps_where_asked() -> None:
    view = torch.arange(25.0).view(5, 5).narrow(1, 2, 2)
    for keep_gaps, stride in ((False, (2, 1)), (True, (5, 1))):
        packed = pack([view], keep_gaps=keep_gaps)
        (came,), _ = unpack(memoryview(b"".join(packed.head)), None)
        assert torch.equal(came, view)
        assert came.stride() == stride


def test_large_views_do_not_drag_their_gaps_along() -> None:
    view = torch.zeros(1000, 100).narrow(1, 2, 2)
    packed = pack([view], keep_gaps=True)
    assert sum(map(len, packed.head)) + packed.bulk_length < 2 * view.nbytes
