"""A message's tensors: one table that says what they are, and blocks that hold their bytes.

Only strided tensors come here; `tensor_kinds.py` takes the others apart into such. Rules:

* A tensor is sent as the span of memory it covers, with its strides, if that is no longer than its
  elements (so a transposed or an expanded tensor arrives as it was); else as its elements in order.
* Tensors of one message that share a storage share one on arrival, if they overlap or if together
  they fill at least half of the span between them. (Rows picked from a large table do not drag the
  table along.) One with gaps, such as every other row, shares if all it spans is sent anyway.
* With `keep_gaps`, as torch's RPC: a tensor with gaps keeps its strides if it spans little memory,
  and the bytes between its elements go along.
* Blocks up to `INLINE` bytes are copied into the body; larger ones go to the bulk area, in place.
* A tensor of a device has a block of its own, in the bulk area behind those of the CPU: how it is
  moved is the transport's business (`frames.py`).

    table    count u32, blocks u32, then per block its length u64 (bit 63: of a device), then per
             tensor:
             block u32, dtype u8, flags u8, ndim u16, offset in the block u64,
             shape i64 each, strides i64 each if flagged
    body     table, then the inline blocks one after the other

Nothing in a table is believed before it is checked: it may come from anyone who knows the key.
"""

from __future__ import annotations

import math
import struct
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..errors import GradwireError, ProtocolError
from . import raw_bytes
from .frames import OnDevice, Piece, aligned

INLINE = 32768

# The order is part of the protocol: add at the end. A name this torch lacks stays a gap.
_NAMES = (
    "float32 float64 float16 bfloat16 int64 int32 int16 int8 uint8 bool "
    "complex64 complex128 complex32 uint16 uint32 uint64 "
    "float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"
).split()
DTYPES: list[torch.dtype | None] = [getattr(torch, name, None) for name in _NAMES]
DTYPE_CODES = {dtype: code for code, dtype in enumerate(DTYPES) if dtype is not None}

_COUNTS = struct.Struct("<II")
_ENTRY = struct.Struct("<IBBHQ")
_GRAD, _STRIDES = 1, 2
_OF_DEVICE = 1 << 63
_LITTLE = (
    8192  # bytes, that torch's RPC sends with gaps; or twice what the elements need
)
_MAX_DIMS = 64
_MAX_BYTES = 1 << 63  # expanded tensors may claim much, but what torch can count


@dataclass(slots=True)
class Packed:
    """The table and inline blocks as bytes, and the blocks for the bulk area."""

    head: list[bytes]
    bulk: list[Piece] = field(default_factory=list)
    bulk_length: int = 0
    device_at: int = -1
    """Where the tensors of devices begin there, if there are some."""

    def add(self, block: torch.Tensor, length: int) -> None:
        """A block more in the bulk area."""
        self.bulk.append(Piece(self.bulk_length, block))
        self.bulk_length = aligned(self.bulk_length + length)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor can go into a table as it is."""
    return (
        tensor.layout is torch.strided
        and tensor.is_cpu
        and tensor.dtype in DTYPE_CODES
        and not tensor.is_nested
    )


def pack(tensors: Sequence[torch.Tensor], *, keep_gaps: bool = False) -> Packed:
    """The table of these tensors, and their bytes."""
    entries: list[bytes] = []
    lengths: list[int] = []
    blocks: list[tuple[torch.Tensor, int]] = []
    sources = [_Source(t, keep_gaps) for t in tensors]
    for index, (group, span) in enumerate(_groups(sources)):
        block, length = _block(group, span)
        blocks.append((block, length))
        lengths.append(length)
        for source in group:
            source.block = index
    entries = [source.entry() for source in sources]
    counts = _COUNTS.pack(len(sources), len(blocks))
    marks = [_OF_DEVICE * _stays_there(*block) for block in blocks]
    sizes = struct.pack(f"<{len(marks)}Q", *map(int.__or__, marks, lengths))
    packed = Packed([counts, sizes, *entries])
    of_devices: list[tuple[torch.Tensor, int]] = []
    for (block, length), mark in zip(blocks, marks, strict=True):
        if mark:
            of_devices.append((block, length))
        elif length <= INLINE:
            packed.head.append(raw_bytes.read(block, length))
        else:
            packed.add(block, length)
    if of_devices:
        packed.device_at = packed.bulk_length
        for block, length in of_devices:
            packed.add(block, length)
    return packed


def _stays_there(block: torch.Tensor, length: int) -> bool:
    """Whether its bytes are on a device, if there are any."""
    return length > 0 and not block.is_cpu


class _Source:
    """An outgoing tensor: where its bytes are, and how it will be described."""

    __slots__ = (
        "_keep_gaps",
        "block",
        "high",
        "low",
        "offset",
        "requires_grad",
        "strided",
        "tensor",
    )

    def __init__(self, tensor: torch.Tensor, keep_gaps: bool) -> None:
        self._keep_gaps = keep_gaps
        self.requires_grad = tensor.requires_grad
        self._hold(tensor.detach().resolve_conj().resolve_neg())
        self.offset = 0
        self.block = 0

    def _hold(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.strided = not tensor.is_contiguous()
        self.low = int(tensor.storage_offset()) * tensor.itemsize
        self.high = self.low + _span(tensor)

    @property
    def has_gaps(self) -> bool:
        """Whether it has gaps that are not sent."""
        span, needed = self.high - self.low, self.tensor.nbytes
        if not self.strided or span <= needed:
            return False
        return not (self._keep_gaps and span <= max(_LITTLE, 2 * needed))

    def close_gaps(self) -> None:
        self._hold(self.tensor.contiguous())

    def entry(self) -> bytes:
        t = self.tensor
        flags = _GRAD * self.requires_grad | _STRIDES * self.strided
        numbers = (*t.shape, *t.stride()) if self.strided else tuple(t.shape)
        head = _ENTRY.pack(
            self.block, DTYPE_CODES[t.dtype], flags, t.dim(), self.offset
        )
        return head + struct.pack(f"<{len(numbers)}q", *numbers)


def _span(tensor: torch.Tensor) -> int:
    """Bytes from the tensor's first element to the end of its last."""
    if not tensor.numel():
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * step for size, step in steps)) * tensor.itemsize


def _groups(sources: list[_Source]) -> list[tuple[list[_Source], tuple[int, int]]]:
    """Which tensors share a block, and the span of storage that it covers."""
    by_storage: dict[int, list[_Source]] = {}
    for source in sources:
        key = id(source)
        if source.high > source.low and source.tensor.is_cpu:
            key = source.tensor.untyped_storage().data_ptr()
            if not key:
                raise TypeError("cannot send a tensor whose memory has been freed")
        by_storage.setdefault(key, []).append(source)
    groups: list[list[_Source]] = []
    for members in by_storage.values():
        if len(members) == 1 and not members[0].has_gaps:
            groups.append(members)
            continue
        dense = _dense_groups([m for m in members if not m.has_gaps])
        spans = [_extent(group) for group in dense]  # in order, and disjoint
        for member in (m for m in members if m.has_gaps):
            at = bisect(spans, (member.low, math.inf)) - 1
            if at >= 0 and member.high <= spans[at][1]:
                dense[at].append(member)
            else:
                member.close_gaps()
                groups.append([member])
        groups += dense
    return [(group, _extent(group)) for group in groups]


def _dense_groups(members: list[_Source]) -> list[list[_Source]]:
    if len(members) < 2:
        return [members] if members else []
    low, high = _extent(members)
    if sum(m.high - m.low for m in members) * 2 >= high - low:
        return [members]
    return _overlapping(members)


def _extent(members: list[_Source]) -> tuple[int, int]:
    if len(members) == 1:
        return members[0].low, members[0].high
    low = min(m.low for m in members) // 16 * 16  # keeps every dtype aligned
    return low, max(m.high for m in members)


def _overlapping(members: list[_Source]) -> list[list[_Source]]:
    parts: list[list[_Source]] = []
    end = -1
    for member in sorted(members, key=lambda m: m.low):
        if member.low < end:
            parts[-1].append(member)
        else:
            parts.append([member])
        end = max(end, member.high)
    return parts


def _block(group: list[_Source], span: tuple[int, int]) -> tuple[torch.Tensor, int]:
    """The flat tensor over the span that a group covers."""
    low, high = span
    if len(group) == 1:
        t = group[0].tensor
        if not group[0].strided:
            return t.view(-1) if t.dim() != 1 else t, high - low
        count = (high - low) // t.itemsize
        return t.as_strided((count,), (1,), t.storage_offset()), high - low
    for member in group:
        member.offset = member.low - low
    # Storages made from one buffer may begin together and end apart: take the longest.
    longest = max(group, key=lambda m: m.high).tensor
    flat = torch.empty(0, dtype=torch.uint8, device=raw_bytes.CPU)
    flat.set_(longest.untyped_storage(), low, (high - low,), (1,))
    return flat, high - low


def unpack(
    body: memoryview,
    area: Any,
    most: int = _MAX_BYTES,
    on_device: OnDevice | None = None,
) -> tuple[list[torch.Tensor], int]:
    """The tensors described at the start of `body`, and how many bytes that took.

    Expanded tensors may claim `most` bytes in total: operations on them take that much.

    Raises:
        ProtocolError: the table does not match the bytes.
        torch.OutOfMemoryError: the device that they came to has no room.
    """
    try:
        if on_device is not None and not on_device.begin():
            on_device = None
        table = _Table(body, area, most, on_device)
        tensors, at = table.build()
        table.fill()
    except (struct.error, ValueError, TypeError, RuntimeError, OverflowError) as error:
        if isinstance(error, GradwireError | torch.OutOfMemoryError):
            raise
        raise ProtocolError(f"invalid table of tensors: {error}") from error
    return tensors, at


class _Place(NamedTuple):
    """Where the bytes of a block are."""

    where: int
    at: int
    length: int


_IN_BODY, _IN_AREA, _ON_DEVICE = range(3)


class _Table:
    """An incoming table."""

    def __init__(
        self, body: memoryview, area: Any, most: int, on_device: OnDevice | None
    ) -> None:
        self._body = body
        self._area = area
        self._most = most
        self._on_device = on_device
        self._targets: list[Piece] = []  # what is to be filled on the device
        self._expanded = 0
        self._at = 0

    def build(self) -> tuple[list[torch.Tensor], int]:
        count, blocks = self._take(_COUNTS)
        if count * _ENTRY.size + blocks * 8 > len(self._body):
            raise ProtocolError(f"table of {count} tensors in {blocks} blocks is cut")
        lengths = self._numbers(blocks, "Q")
        entries = [self._entry() for _ in range(count)]
        members = [0] * blocks
        for block, *_ in entries:
            if block >= blocks:
                raise ProtocolError(f"tensor in block {block} of {blocks}")
            members[block] += 1
        places = self._places(lengths)
        shared = {i: self._storage(places[i]) for i in range(blocks) if members[i] > 1}
        return [self._tensor(e, places, shared) for e in entries], self._at

    def _take(self, layout: struct.Struct) -> tuple[int, ...]:
        values = layout.unpack_from(self._body, self._at)
        self._at += layout.size
        return values

    def _numbers(self, count: int, code: str) -> tuple[int, ...]:
        return self._take(struct.Struct(f"<{count}{code}"))

    def _entry(self) -> tuple[int, torch.dtype, int, tuple[int, ...], Any, int]:
        block, code, flags, dims, offset = self._take(_ENTRY)
        dtype = DTYPES[code] if code < len(DTYPES) else None
        if dtype is None:
            raise ProtocolError(
                f"tensor of a dtype unknown to this torch (code {code})"
            )
        if dims > _MAX_DIMS:
            raise ProtocolError(f"tensor of {dims} dimensions")
        shape = self._numbers(dims, "q")
        strides = self._numbers(dims, "q") if flags & _STRIDES else None
        if any(n < 0 for n in shape + (strides or ())) or (
            strides is not None and math.prod(shape) * dtype.itemsize >= _MAX_BYTES
        ):
            raise ProtocolError(f"tensor of shape {shape} with strides {strides}")
        return block, dtype, flags, shape, strides, offset

    def _places(self, lengths: Sequence[int]) -> list[_Place]:
        """For each block."""
        places: list[_Place] = []
        bulk = 0
        of_devices: list[int] = []
        for index, length in enumerate(lengths):
            if length & _OF_DEVICE:
                of_devices.append(index)
                places.append(_Place(_IN_AREA, 0, length ^ _OF_DEVICE))
            elif length <= INLINE:
                places.append(_Place(_IN_BODY, self._at, length))
                self._at += length
            else:
                places.append(_Place(_IN_AREA, bulk, length))
                bulk = aligned(bulk + length)
        where, at, most = _IN_AREA, bulk, _MAX_BYTES
        if self._on_device is not None:
            where, at, most = _ON_DEVICE, 0, self._on_device.room
        for index in of_devices:
            places[index] = place = _Place(where, at, places[index].length)
            if at + place.length > most:
                raise ProtocolError(f"tensors of a device in {most} bytes are longer")
            at = aligned(at + place.length)
        bulk = at if where == _IN_AREA else bulk
        room = 0 if self._area is None else memoryview(self._area).nbytes
        if self._at > len(self._body) or bulk > aligned(room):
            raise ProtocolError("tensors are longer than the message")
        return places

    def _storage(self, place: _Place) -> torch.UntypedStorage:
        where, at, length = place
        if where == _IN_AREA:
            flat = torch.frombuffer(
                self._area, dtype=torch.uint8, count=length, offset=at
            )
        elif where == _IN_BODY:
            flat = torch.empty(length, dtype=torch.uint8, device=raw_bytes.CPU)
            raw_bytes.write(flat, self._body[at : at + length])
        else:
            raise ProtocolError("tensors of a device that share a block")
        return flat.untyped_storage()

    def _made_on_device(
        self, dtype: torch.dtype, shape: Any, strides: Any, at: int
    ) -> torch.Tensor:
        """A tensor that is to be filled."""
        assert self._on_device is not None
        tensor = torch.empty_strided(
            shape, strides or _steps(shape), dtype=dtype, device=self._on_device.device
        )
        self._targets.append(Piece(at, tensor))
        return tensor

    def fill(self) -> None:
        """Copy to the device's tensors what has come for them."""
        if self._targets and self._on_device is not None:
            self._on_device.copy_to(self._targets)

    def _tensor(
        self,
        entry: tuple[int, torch.dtype, int, tuple[int, ...], Any, int],
        places: list[_Place],
        shared: dict[int, torch.UntypedStorage],
    ) -> torch.Tensor:
        block, dtype, flags, shape, strides, offset = entry
        where, at, length = places[block]
        needed = _needed(shape, strides, dtype.itemsize)
        if offset + needed > length or offset % dtype.itemsize:
            raise ProtocolError(f"tensor of shape {shape} reaches out of its block")
        self._count_expanded(math.prod(shape) * dtype.itemsize, length)
        if where == _ON_DEVICE and block not in shared:
            if needed != length or offset:
                raise ProtocolError(f"tensor of shape {shape} in {length} bytes")
            tensor = self._made_on_device(dtype, shape, strides, at)
        elif block in shared or strides is not None:
            storage = shared.get(block) or self._storage(places[block])
            tensor = torch.empty(0, dtype=dtype, device=raw_bytes.CPU)
            tensor.set_(
                storage, offset // dtype.itemsize, shape, strides or _steps(shape)
            )
        elif needed != length:
            raise ProtocolError(f"tensor of shape {shape} in a block of {length} bytes")
        elif where == _IN_AREA:
            count = length // dtype.itemsize
            flat = torch.frombuffer(self._area, dtype=dtype, count=count, offset=at)
            tensor = flat.resize_(shape)
        else:
            tensor = torch.empty(shape, dtype=dtype, device=raw_bytes.CPU)
            raw_bytes.write(tensor, self._body[at : at + length])
        return tensor.requires_grad_() if flags & _GRAD else tensor

    def _count_expanded(self, claimed: int, length: int) -> None:
        if claimed > length:
            self._expanded += claimed
            if self._expanded > self._most:
                raise ProtocolError(
                    f"expanded tensors of {self._expanded} bytes, the limit is {self._most}"
                )


def _needed(shape: Sequence[int], strides: Sequence[int] | None, itemsize: int) -> int:
    if 0 in shape:
        return 0
    steps = zip(shape, strides or _steps(shape), strict=True)
    return (1 + sum((size - 1) * step for size, step in steps)) * itemsize


def _steps(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor of this shape."""
    steps = []
    step = 1
    for size in reversed(shape):
        steps.append(step)
        step *= max(size, 1)
    return tuple(reversed(steps))
