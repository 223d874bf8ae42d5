"""Numbers and tensors: the quickest kind of message there is, for upper layers that talk much.

What a packet looks like (how many numbers; dtype and shape of each tensor) is its *signature*, as
that of calls (`signature_encoder.py`): its bytes are computed once here and parsed once there.
Tensors may
be missing. Each that is there arrives without history and with memory of its own, also if two were
one; and small ones in order: an expanded one, say the gradient of a sum, is written out on the way.

    body     length of the signature u32, signature (plain encoding), numbers i64 each, the bytes of
             small tensors one after the other; large ones are in the bulk area

What has other tensors, such as large ones that are not in order, or those of a device, takes the
general way (`codec.py`), as a tuple of numbers and one of tensors.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from torch import Tensor

from . import raw_bytes, safe_encoding
from .dense_tensors import DTYPE_CODES, INLINE, is_plain
from .frames import Frame, Parcel, Piece, aligned
from .signature_decoder import Learner, Plan
from .signature_encoder import LENGTH, MAX_REMEMBERED, MAX_SIGNATURE, Subject
from .tensor_prealloc import Stock

_SUBJECT: Subject = (0, None, (), None, False)  # a packet's kind is in its header
_NOWHERE = (None, 0)
_look_at = attrgetter("__class__", "dtype", "shape", "layout", "is_cpu")


class Packet(NamedTuple):
    """A message, or an answer. Messages are subclasses of it."""

    numbers: Sequence[int]
    tensors: Sequence[Tensor | None]


class _Known(NamedTuple):
    """What is known of packets that look alike."""

    prefix: bytes
    """Their signature, with its length."""
    write: Any
    """How their numbers are written."""
    sources: Sequence[tuple[Any, int]]
    """What reads the bytes at a small tensor's address, and how often they are repeated (0: it has
    to be put in order)."""
    offsets: Sequence[int]
    """Where the large ones go."""
    bulk_length: int


class PacketEncoder:
    """Remembers the signatures sent."""

    def __init__(self, encoding: int) -> None:
        self._encoding = encoding
        self._known: dict[tuple[Any, ...], _Known] = {}

    def encode(self, kind: int, packet: Packet) -> Parcel | None:
        """The message, or None if it has to go the general way."""
        numbers, tensors = packet
        key: list[Any] = [len(numbers)]
        try:
            for tensor in tensors:
                if tensor is None:
                    key.append(None)
                    continue
                key += (_look_at(tensor), tensor.stride(), tensor.storage_offset() > 0)
        except RuntimeError:
            return None  # one that has no sizes or no strides
        alike = tuple(key)
        known = self._known.get(alike) or self._learn(alike, packet)
        if known is None:
            return None
        parts = [known.prefix, known.write(*numbers)]
        for (at, repeats), tensor in zip(known.sources, tensors, strict=True):
            if at is None or tensor is None:
                continue
            if not repeats:
                tensor, repeats = _in_order(tensor), 1
            there = tensor.data_ptr()
            if not there:
                return None  # freed: the general way says so
            parts.append(at(there).raw * repeats)
        parcel = Parcel(kind, self._encoding, b"".join(parts))
        return _with_bulk(parcel, known, tensors) if known.bulk_length else parcel

    def _learn(self, alike: tuple[Any, ...], packet: Packet) -> _Known | None:
        known = _describe(packet)
        if known is not None and not known.bulk_length:  # else it matters which are one
            if len(self._known) > MAX_REMEMBERED:
                self._known.clear()
            self._known[alike] = known
        return known


def _describe(packet: Packet) -> _Known | None:
    """What there is to know of a packet; None: it has to go the general way."""
    specs: list[Any] = []
    sources: list[tuple[Any, int]] = []
    places: dict[int, int] = {}  # of the large tensors, each once
    bulk = 0
    for tensor in packet.tensors:
        if tensor is None:
            specs.append(None)
            sources.append(_NOWHERE)
            continue
        if not _can_go(tensor):
            return None
        length, offset = tensor.nbytes, -1
        is_small = length <= INLINE
        if not is_small:
            offset = places.setdefault(id(tensor), bulk)
            bulk = max(bulk, aligned(offset + length))
        specs.append((DTYPE_CODES[tensor.dtype], tuple(tensor.shape), False, offset))
        sources.append(_source(tensor) if is_small and length else _NOWHERE)
    count = len(packet.numbers)
    signature = safe_encoding.dumps((count, tuple(specs)), [])
    if len(signature) > MAX_SIGNATURE:
        return None
    prefix = LENGTH.pack(len(signature)) + signature
    write = struct.Struct(f"<{count}q").pack
    return _Known(prefix, write, sources, list(places.values()), bulk)


def _can_go(tensor: Tensor) -> bool:
    return (
        type(tensor) is Tensor
        and is_plain(tensor)
        and (tensor.nbytes <= INLINE or tensor.is_contiguous())
    )


def _source(tensor: Tensor) -> tuple[Any, int]:
    """How the bytes of a small tensor are read, and of all that look like it."""
    length = tensor.nbytes
    # Real and at the beginning: so it is neither conjugate nor negative.
    if not tensor.is_complex() and not tensor.storage_offset():
        if tensor.is_contiguous():
            return raw_bytes.arrays[length].from_address, 1
        if not any(tensor.stride()):
            return raw_bytes.arrays[tensor.itemsize].from_address, tensor.numel()
    return raw_bytes.arrays[length].from_address, 0


def _in_order(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _with_bulk(
    parcel: Parcel, known: _Known, tensors: Sequence[Tensor | None]
) -> Parcel:
    large = {id(t): t for t in tensors if t is not None and t.nbytes > INLINE}
    flat = [_in_order(tensor).view(-1) for tensor in large.values()]
    pieces = [Piece(*p) for p in zip(known.offsets, flat, strict=True)]
    return parcel.with_bulk(pieces, known.bulk_length)


class PacketDecoder(Learner["_PacketPlan"]):
    """What reads packets."""

    def __init__(self, stock: Stock) -> None:
        super().__init__(_parse)
        self._stock = stock

    def decode(self, frame: Frame) -> tuple[Any, Any]:
        """The numbers and tensors of a packet.

        Raises:
            ProtocolError: the bytes make no sense.
        """
        plan, at = self._find(frame.body)
        found = plan.cut(frame.body, at, frame.area)
        return found[: plan.count], plan.fetch(found, (), frame, self._stock)


class _PacketPlan(Plan):
    """How to fetch the numbers and tensors that follow a signature."""

    __slots__ = ()

    def __init__(self, count: int, specs: tuple[Any, ...]) -> None:
        super().__init__(_SUBJECT, specs, count)
        if self.small.traced:
            raise TypeError("a tensor that requires grad")


def _parse(signature: Any) -> _PacketPlan:
    # Unpacked only if it is a tuple: a tensor in its place could have any number of items.
    if type(signature) is not tuple:
        raise TypeError("not a tuple")
    count, specs = signature
    if type(count) is not int or not 0 <= count < 1 << 32 or type(specs) is not tuple:
        raise TypeError("no number of numbers, or no tuple of tensors")
    if not all(spec is None or type(spec) is tuple for spec in specs):
        raise TypeError("something that is no tensor")
    return _PacketPlan(count, specs)


def apart(packet: Packet) -> tuple[Any, ...]:
    """The fields of a packet that goes the general way, where those that share memory stay so."""
    tensors: list[Tensor | None] = []
    places: set[int] = set()
    for tensor in packet.tensors:
        if tensor is not None:
            place = raw_bytes.place(tensor)
            tensor = tensor.detach().clone() if place in places else tensor.detach()
            places.add(place)
        tensors.append(tensor)
    return tuple(map(int, packet.numbers)), tuple(tensors)  # True is 1 there, too


def is_packet(fields: Any) -> bool:
    """Whether what came the general way is numbers and tensors."""
    if not isinstance(fields, tuple) or len(fields) != 2:
        return False
    numbers, tensors = fields
    return (
        type(numbers) is tuple
        and type(tensors) is tuple
        and all(type(number) is int for number in numbers)
        and all(tensor is None or isinstance(tensor, Tensor) for tensor in tensors)
    )
