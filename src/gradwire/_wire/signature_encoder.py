"""The short way for common messages: everything that repeats is said once and remembered.

A call whose arguments are contiguous CPU tensors, None and small plain data has a *signature*: the
function's name, keyword names, modes, and dtype and shape of each tensor. Its bytes are computed
once per signature here, and parsed once there, into a plan to fetch the arguments
(`signature_decoder.py`).
What follows the signature is raw: numbers, small tensors, then other plain data. Results go the
same way.

    body     length of the signature u32, signature (plain encoding), numbers of 8 bytes each, raw
             bytes of tensors, data

Anything else takes the general way (`codec.py`); `encode` says so by returning None.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from typing import Any

from torch import Tensor

from . import raw_bytes, safe_encoding
from .dense_tensors import DTYPE_CODES, INLINE, is_plain
from .frames import Limits, Parcel, Piece, aligned

Dump = Callable[[Any], bytes]

LENGTH = struct.Struct("<I")
_BASIC = frozenset((int, float, str, bool, bytes))
DATA, INT, FLOAT = 0, 1, 2
"""What stands in a signature for values that are no tensors; None stands for itself."""
NUMBERS = {INT: "q", FLOAT: "d"}
"""How numbers are packed; an int that is too long for that is data."""
_INTS = range(-1 << 63, 1 << 63)
_MAX_ITEMS, _MAX_DEPTH = 32, 3
MAX_SIGNATURE = 4096
MAX_REMEMBERED = 4096


Subject = tuple[int, str | None, tuple[str, ...], tuple[Any, ...] | None, bool]
"""What a signature is about, besides the values: the kind of message; the name of a function,
keyword names and modes, for calls; and whether the values are the items of one tuple."""


Pick = Callable[[tuple[Any, ...]], tuple[Tensor, ...]]
"""Finds the tensors that require grad among the values."""


_look_at: Callable[[Tensor], tuple[Any, ...]] = attrgetter(
    "dtype", "shape", "requires_grad", "layout", "is_cpu", "is_nested"
)
"""What tells tensors of one signature from others; all in one step, which takes a third."""


@dataclass(slots=True)
class Known:
    """A signature's bytes, and how what follows them is made."""

    prefix: bytes
    count: int
    """Of what is sent as it is."""
    pick: Pick
    """What finds the tensors that require grad."""
    reads: list[Any] | None
    """What reads the bytes of tensors; None: there are large or complex tensors, or too many."""
    write: Callable[..., bytes]
    """What packs the numbers."""
    offsets: list[int]
    bulk_length: int
    habit: set[int] = field(default_factory=set)
    """That of their parcels."""

    def mix(self, values: tuple[Any, ...]) -> tuple[list[bytes], list[Piece]]:
        """The bytes of small tensors, and the large ones."""
        parts, large = [], []
        for value in values:
            if type(value) is Tensor and value.nbytes > INLINE:
                large.append(value.detach().view(-1))
            elif type(value) is Tensor:
                parts.append(raw_bytes.read(value, value.nbytes))
        return parts, [Piece(*p) for p in zip(self.offsets, large, strict=True)]


class Encoder:
    """Remembers the signatures sent."""

    def __init__(self, encoding: int, dump: Dump, limits: Limits) -> None:
        self._encoding = encoding
        self._dump = dump
        self._limits = limits
        self._known: dict[Any, Known] = {}

    def encode(
        self, subject: Subject, values: tuple[Any, ...]
    ) -> tuple[Parcel, Known] | None:
        """The message, and what is known of such messages.

        None: it has to go the general way.

        Raises:
            ValueError: it is larger than the limits.
        """
        key: list[Any] = [subject]
        places: dict[int, int] = {}  # by storage
        numbers: list[int | float] = []
        data: list[Any] = []
        try:
            for value in values:
                kind = type(value)
                if kind is Tensor:
                    there = storage = value.data_ptr()
                    if not there or value.storage_offset() or not value.is_contiguous():
                        storage = _storage(value, there)
                    places[storage] = there
                    key.append(_look_at(value))
                elif value is None:
                    key.append(None)
                elif kind is float or (kind is int and value in _INTS):
                    key.append(FLOAT if kind is float else INT)
                    numbers.append(value)
                elif kind in _BASIC or _is_small(value, _MAX_DEPTH):
                    key.append(DATA)
                    data.append(value)
                else:
                    return None
        except RuntimeError:  # a tensor without memory of its own, or without a shape
            return None
        known = self._known.get(tuple(key)) or self._learn(tuple(key), subject, values)
        if known is None or len(places) < known.count:
            return None  # shared storages stay shared the general way
        parts = [known.prefix, known.write(*numbers)] if numbers else [known.prefix]
        if known.reads is None:
            return self._mixed(subject, known, values, parts, data)
        if places:
            for read, there in zip(known.reads, places.values(), strict=True):
                parts.append(read(there).raw)
        if data:
            return self._checked(subject, parts, data), known
        return Parcel(subject[0], self._encoding, b"".join(parts)), known

    def _mixed(
        self,
        subject: Subject,
        known: Known,
        values: tuple[Any, ...],
        parts: list[bytes],
        data: list[Any],
    ) -> tuple[Parcel, Known] | None:
        """As `encode`, where not all is small and simple."""
        if any(type(value) is Tensor and _is_conjugate(value) for value in values):
            return None
        raws, large = known.mix(values)
        parcel = self._checked(subject, parts + raws, data, large, known.bulk_length)
        return parcel, known

    def _checked(
        self,
        subject: Subject,
        parts: list[bytes],
        data: list[Any],
        large: Sequence[Piece] = (),
        bulk_length: int = 0,
    ) -> Parcel:
        if data:
            parts.append(self._dump(data))
        parcel = Parcel(subject[0], self._encoding, b"".join(parts))
        parcel.with_bulk(large, bulk_length).check(self._limits)
        return parcel

    def _learn(
        self, key: tuple[Any, ...], subject: Subject, values: tuple[Any, ...]
    ) -> Known | None:
        known = _describe(subject, values, key[1:], self._limits)
        if known is not None:
            if len(self._known) > MAX_REMEMBERED:
                self._known.clear()
            self._known[key] = known
        return known


def _storage(tensor: Tensor, there: int) -> int:
    """Where the memory of a tensor begins that may be a part of more.

    Raises:
        RuntimeError: it is not its memory, in order, and nothing else.
    """
    if not tensor.is_contiguous():
        raise RuntimeError
    offset = tensor.storage_offset()
    if offset and tensor.numel() <= 1 and tensor.is_neg():
        raise RuntimeError
    if there and not offset:
        return there
    storage = tensor.untyped_storage().data_ptr()
    if not storage and tensor.numel():  # freed: the general way says so
        raise RuntimeError
    return storage


def _is_conjugate(tensor: Tensor) -> bool:
    """Asked only of complex ones, for `is_conj` lets go of the GIL, as `is_neg` does.

    That costs more than all the rest where another thread wants it. Negative can only be what is
    the imaginary part of a complex one: it has a stride of two and begins at an odd offset.
    """
    return tensor.is_complex() and tensor.is_conj()


def _is_small(value: Any, depth: int) -> bool:
    """Whether this is plain data small enough for the short way."""
    kind = type(value)
    if kind is dict:
        if not all(type(k) in _BASIC for k in value):
            return False
        items = value.values()
    elif kind is list or kind is tuple:
        items = value
    else:
        return False
    if not depth or len(value) > _MAX_ITEMS:
        return False
    return all(x is None or type(x) in _BASIC or _is_small(x, depth - 1) for x in items)


def _describe(
    subject: Subject, values: tuple[Any, ...], looks: tuple[Any, ...], limits: Limits
) -> Known | None:
    specs: list[Any] = []
    reads: list[Any] = []
    offsets: list[int] = []
    bulk = length = 0  # of large tensors, and of what is sent as it is
    is_real = True
    for value, look in zip(values, looks, strict=True):
        if type(value) is not Tensor:
            specs.append(look)
        elif not is_plain(value):
            return None
        else:
            spec = (DTYPE_CODES[value.dtype], tuple(value.shape), value.requires_grad)
            is_large = value.nbytes > INLINE
            specs.append((*spec, bulk if is_large else -1))
            if is_large:
                offsets.append(bulk)
                bulk = aligned(bulk + value.nbytes)
            else:
                reads.append(raw_bytes.arrays[value.nbytes].from_address)
                length += value.nbytes
            is_real = is_real and not value.is_complex()
    signature = safe_encoding.dumps((subject, tuple(specs)), [])
    if len(signature) > MAX_SIGNATURE:
        return None
    prefix = LENGTH.pack(len(signature)) + signature
    numbers = struct.Struct("<" + "".join([NUMBERS.get(s, "") for s in specs]))
    length += len(prefix) + numbers.size
    is_simple = is_real and not offsets and length <= limits.body
    traced = [n for n, spec in enumerate(specs) if type(spec) is tuple and spec[2]]
    count, pick = len(reads) + len(offsets), picker(traced, len(specs))
    simple = reads if is_simple else None
    return Known(prefix, count, pick, simple, numbers.pack, offsets, bulk)


def picker(places: list[int], count: int) -> Pick:
    """What picks the values at some places."""
    if len(places) == count:
        return tuple
    if len(places) > 1:
        return itemgetter(*places)
    return itemgetter(slice(places[0], places[0] + 1) if places else slice(0))


def dump_pickle(data: Any) -> bytes:
    return pickle.dumps(data, 5)


def dump_plain(data: Any) -> bytes:
    return safe_encoding.dumps(data, [])
