"""The short way for common messages: everything that repeats is said once and remembered.

A call whose arguments are contiguous CPU tensors, None and small plain data has a *signature*: the
function's name, keyword names, modes, and dtype and shape of each tensor. Its bytes are computed
once per signature here, and parsed once there, into a plan to fetch the arguments (`plans.py`).
What follows the signature is raw: small tensors and short strings of bytes, then the plain data.
Results go the same way.

    body     length of the signature u32, signature (plain encoding), raw bytes, data

Anything else takes the general way (`codec.py`); `encode` says so by returning None.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from . import memory, plain
from .frames import Parcel, Piece, aligned
from .tensors import DTYPE_CODES, INLINE

Dump = Callable[[Any], bytes]

_STRIDED = torch.strided
_REAL = frozenset(dtype for dtype in DTYPE_CODES if not dtype.is_complex)
LENGTH = struct.Struct("<I")
_BASIC = frozenset((int, float, str, bool, bytes))
_MAX_ITEMS, _MAX_DEPTH = 32, 3
MAX_SIGNATURE = 4096
# The lengths of bytes that go as they are: few, so that few signatures are to be known.
RAW = frozenset(range(8, 257, 8))
_MAX_REMEMBERED = 4096


Subject = tuple[int, str | None, tuple[str, ...], tuple[Any, ...] | None, bool]
"""What a signature is about, besides the values: the kind of message; the name of a function,
keyword names and modes, for calls; and whether the values are the items of one tuple."""


Pick = Callable[[tuple[Any, ...]], tuple[Tensor, ...]]
"""Finds the tensors that require grad among the values."""


@dataclass(slots=True)
class _Known:
    """A signature's bytes, and how what follows them is made."""

    prefix: bytes
    count: int
    """Of what is sent as it is."""
    pick: Pick
    reads: list[Any] | None
    """What reads what is sent as it is; not needed where there are large tensors."""
    offsets: list[int]
    bulk_length: int

    def mix(self, values: tuple[Any, ...]) -> tuple[list[bytes], list[Piece]]:
        """What is sent as it is, in order, and the large tensors."""
        parts, large = [self.prefix], []
        for value in values:
            if type(value) is bytes and len(value) in RAW:
                parts.append(value)
            elif type(value) is Tensor and value.nbytes > INLINE:
                large.append(value.detach().view(-1))
            elif type(value) is Tensor:
                parts.append(memory.read(value, value.nbytes))
        return parts, [Piece(*p) for p in zip(self.offsets, large, strict=True)]


class Encoder:
    """Remembers the signatures sent."""

    def __init__(self, encoding: int, dump: Dump) -> None:
        self._encoding = encoding
        self._dump = dump
        self._known: dict[Any, _Known] = {}

    def encode(
        self, subject: Subject, values: tuple[Any, ...]
    ) -> tuple[Parcel, Pick] | None:
        """The message, and what finds its tensors that require grad.

        None: it has to go the general way.
        """
        key: list[Any] = [subject]
        places: dict[int, Any] = {}  # by storage, or a number below 0 for bytes
        data: list[Any] = []
        for value in values:
            if type(value) is Tensor:
                dtype = value.dtype
                is_dense = value.layout is _STRIDED and value.is_contiguous()
                if not is_dense or not value.is_cpu or value.is_nested:
                    return None
                there = storage = value.data_ptr()
                if not there or dtype not in _REAL or value.storage_offset():
                    storage = _storage(value, there)
                    if storage < 0:
                        return None
                places[storage] = there
                key += (dtype, value.shape, value.requires_grad)
            elif value is None:
                key.append(None)
            elif type(value) is bytes and len(value) in RAW:
                key.append(len(value))
                places[~len(places)] = value
            elif type(value) in _BASIC or _is_small(value, _MAX_DEPTH):
                key.append(0)
                data.append(value)
            else:
                return None
        known = self._known.get(tuple(key)) or self._learn(tuple(key), subject, values)
        if known is None or len(places) < known.count:
            return None  # shared storages stay shared the general way
        if known.reads is None:
            return self._mixed(subject, known, values, data)
        parts = [known.prefix]
        for read, there in zip(known.reads, places.values(), strict=True):
            parts.append(read(there).raw)
        if data:
            parts.append(self._dump(data))
        return Parcel(subject[0], self._encoding, b"".join(parts)), known.pick

    def _mixed(
        self,
        subject: Subject,
        known: _Known,
        values: tuple[Any, ...],
        data: list[Any],
    ) -> tuple[Parcel, Pick]:
        """As `encode`, where there are large tensors."""
        parts, large = known.mix(values)
        if data:
            parts.append(self._dump(data))
        parcel = Parcel(subject[0], self._encoding, b"".join(parts))
        return parcel.with_bulk(large, known.bulk_length), known.pick

    def _learn(
        self, key: tuple[Any, ...], subject: Subject, values: tuple[Any, ...]
    ) -> _Known | None:
        known = _describe(subject, values)
        if known is not None:
            if len(self._known) > _MAX_REMEMBERED:
                self._known.clear()
            self._known[key] = known
        return known


def _storage(tensor: Tensor, there: int) -> int:
    """Where the memory of a dense tensor begins; below 0: it is not just its memory.

    `is_conj` and `is_neg` let go of the GIL, which costs more than all the rest where another
    thread wants it. So they are asked only where they can be true: a tensor is conjugate only if
    it is complex, and negative only as the imaginary part of such a one, which has a stride of two
    and begins at an odd offset.
    """
    dtype, offset = tensor.dtype, tensor.storage_offset()
    if dtype not in DTYPE_CODES or (dtype not in _REAL and tensor.is_conj()):
        return -1
    if offset and tensor.numel() <= 1 and tensor.is_neg():
        return -1
    if there and not offset:
        return there
    storage = tensor.untyped_storage().data_ptr()
    is_freed = not storage and tensor.numel()  # the general way says so
    return -1 if is_freed else storage


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


def _describe(subject: Subject, values: tuple[Any, ...]) -> _Known | None:
    specs: list[Any] = []
    reads: list[Any] = []
    offsets = []
    bulk = 0
    for value in values:
        if type(value) is bytes and len(value) in RAW:
            reads.append(memory.arrays[len(value)].from_buffer_copy)
            specs.append(len(value))
            continue
        if type(value) is not Tensor:
            specs.append(None if value is None else 0)
            continue
        spec = (DTYPE_CODES[value.dtype], tuple(value.shape), value.requires_grad)
        if value.nbytes > INLINE:
            offsets.append(bulk)
            specs.append((*spec, bulk))
            bulk = aligned(bulk + value.nbytes)
        else:
            reads.append(memory.arrays[value.nbytes].from_address)
            specs.append((*spec, -1))
    signature = plain.dumps((subject, tuple(specs)), [])
    if len(signature) > MAX_SIGNATURE:
        return None
    traced = [n for n, spec in enumerate(specs) if type(spec) is tuple and spec[2]]
    return _Known(
        LENGTH.pack(len(signature)) + signature,
        count=len(reads) + len(offsets),
        pick=picker(traced, len(specs)),
        reads=None if offsets else reads,
        offsets=offsets,
        bulk_length=bulk,
    )


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
    return plain.dumps(data, [])
