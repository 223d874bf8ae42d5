"""The short way for common messages: everything that repeats is said once and remembered.

A call whose arguments are contiguous CPU tensors, None and small plain data has a *signature*: the
function's name, keyword names, modes, and dtype and shape of each tensor. Its bytes are computed
once per signature here, and parsed once there, into steps that fetch the arguments. What follows
the signature is raw: small tensors and short strings of bytes, then the plain data. Results go the
same way.

    body     length of the signature u32, signature (plain encoding), raw bytes, data

Anything else takes the general way (`codec.py`); `encode` says so by returning None.
"""

from __future__ import annotations

import math
import pickle
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import ProtocolError
from . import memory, plain
from .frames import Parcel, Piece, aligned
from .tensors import DTYPE_CODES, DTYPES, INLINE

Dump = Callable[[Any], bytes]
Load = Callable[[Any], Any]
Step = Callable[[Any, int, Any, Any], Any]

_STRIDED = torch.strided
_REAL = frozenset(dtype for dtype in DTYPE_CODES if not dtype.is_complex)
_LENGTH = struct.Struct("<I")
_BASIC = frozenset((int, float, str, bool, bytes))
_MAX_ITEMS, _MAX_DEPTH = 32, 3
_MAX_SIGNATURE = 4096
# The lengths of bytes that go as they are: few, so that few signatures are to be known.
_RAW = frozenset(range(8, 257, 8))
_MAX_REMEMBERED = 4096
_MAX_LEARNED = 1 << 20  # bytes of signatures; what is made of them takes 30 times that


Subject = tuple[int, str | None, tuple[str, ...], tuple[Any, ...] | None, bool]
"""What a signature is about, besides the values: the kind of message; the name of a function,
keyword names and modes, for calls; and whether the values are the items of one tuple."""


@dataclass(slots=True)
class _Known:
    """A signature's bytes, and where its large tensors go."""

    prefix: bytes
    offsets: list[int]
    bulk_length: int

    def with_bulk(self, parcel: Parcel, tensors: list[torch.Tensor]) -> Parcel:
        parcel.bulk = [Piece(*p) for p in zip(self.offsets, tensors, strict=True)]
        parcel.bulk_length = self.bulk_length
        return parcel


class Encoder:
    """Remembers the signatures sent."""

    def __init__(self, encoding: int, dump: Dump) -> None:
        self._encoding = encoding
        self._dump = dump
        self._known: dict[Any, _Known] = {}

    def encode(
        self, subject: Subject, values: tuple[Any, ...], found: list[torch.Tensor]
    ) -> Parcel | None:
        """The message, or None if it has to go the general way.

        Tensors that require grad are added to `found`.
        """
        key: list[Any] = [subject]
        parts = [b""]
        data: list[Any] = []
        large: list[torch.Tensor] = []
        storages: list[int] = []
        for value in values:
            if type(value) is torch.Tensor:
                there = _look_at(value, key, storages, found)
                if there is None:
                    return None
                length = value.nbytes
                if length > INLINE:
                    large.append(value.detach().view(-1))
                elif length:
                    parts.append(memory.arrays[length].from_address(there).raw)
            elif value is None:
                key.append(None)
            elif type(value) is bytes and len(value) in _RAW:
                key.append(len(value))
                parts.append(value)
            elif type(value) in _BASIC or _is_small(value, _MAX_DEPTH):
                key.append(0)
                data.append(value)
            else:
                return None
        if len(storages) > 1 and len(set(storages)) < len(storages):
            return None  # shared storages stay shared the general way
        signature = tuple(key)
        known = self._known.get(signature) or self._learn(signature, subject, values)
        if known is None:
            return None
        parts[0] = known.prefix
        if data:
            parts.append(self._dump(data))
        parcel = Parcel(subject[0], self._encoding, b"".join(parts))
        return known.with_bulk(parcel, large) if large else parcel

    def _learn(
        self, key: tuple[Any, ...], subject: Subject, values: tuple[Any, ...]
    ) -> _Known | None:
        known = _describe(subject, values)
        if known is not None:
            if len(self._known) > _MAX_REMEMBERED:
                self._known.clear()
            self._known[key] = known
        return known


class Decoder:
    """Remembers the signatures that arrived."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._known: dict[bytes, _Plan] = {}
        self._learned = 0

    def decode(
        self, body: bytes | memoryview, area: Any
    ) -> tuple[Subject, list[Any], Sequence[int]]:
        """What the message is about, its values, and which of them are to require grad.

        Raises:
            ProtocolError: the bytes make no sense.
        """
        if len(body) < 4:
            raise ProtocolError("message without a signature")
        at = 4 + _LENGTH.unpack_from(body)[0]
        signature = bytes(body[4:at])
        plan = self._known.get(signature) or self._learn(signature, at, len(body))
        start = at + plan.inline
        if start > len(body) or (plan.bulk and plan.bulk > _room(area)):
            raise ProtocolError("message is shorter than its signature says")
        data = None
        if plan.data:
            data = self._load(body[start:])
            if type(data) is not list or len(data) != plan.data:
                raise ProtocolError("data does not fit its signature")
        values = []
        try:
            for step in plan.steps:
                values.append(step(body, at, area, data))
        except (TypeError, RuntimeError) as error:
            raise ProtocolError(f"tensor cannot be made here: {error}") from error
        return plan.subject, values, plan.traced

    def _learn(self, signature: bytes, end: int, length: int) -> _Plan:
        if end > length or end > _MAX_SIGNATURE + 4:
            raise ProtocolError(f"signature of {end - 4} bytes")
        try:
            plan = _parse(plain.loads(signature, []))
        except (TypeError, ValueError, IndexError, RuntimeError) as error:
            raise ProtocolError(f"signature makes no sense: {error}") from error
        self._learned += len(signature)
        if self._learned > _MAX_LEARNED:
            self._known.clear()
            self._learned = len(signature)
        self._known[signature] = plan
        return plan


def _parse(signature: Any) -> _Plan:
    # Unpacked only if it is a tuple: a tensor in its place could have any number of items.
    if type(signature) is not tuple or any(type(x) is not tuple for x in signature):
        raise TypeError("not two tuples")
    subject, specs = signature
    kind, name, keywords, modes, spread = subject
    if not (
        type(kind) is int
        and (name is None or type(name) is str)
        and type(keywords) is tuple
        and all(type(word) is str for word in keywords)
        and (modes is None or type(modes) is tuple)
        and type(spread) is bool
    ):
        raise TypeError("subject with fields of wrong types")
    return _Plan(subject, specs)


def _look_at(
    tensor: torch.Tensor,
    key: list[Any],
    storages: list[int],
    found: list[torch.Tensor],
) -> int | None:
    """Where it is, if it is its memory, in order, and nothing else; None if not.

    Adds what there is to say of it to the lists.

    `is_conj` and `is_neg` let go of the GIL, which costs more than all the rest where another
    thread wants it. So they are asked only where they can be true: a tensor is conjugate only if
    it is complex, and negative only as the imaginary part of such a one, which has a stride of two
    and begins at an odd offset.
    """
    dtype, offset = tensor.dtype, tensor.storage_offset()
    if not (
        tensor.layout is _STRIDED
        and tensor.is_cpu
        and tensor.is_contiguous()
        and not tensor.is_nested
        and (dtype in _REAL or (dtype in DTYPE_CODES and not tensor.is_conj()))
        and (not offset or tensor.numel() > 1 or not tensor.is_neg())
    ):
        return None
    there = storage = tensor.data_ptr()
    if offset or not there:
        storage = tensor.untyped_storage().data_ptr()
        if not storage and tensor.numel():
            return None  # freed: the general way says so
    needs_grad = tensor.requires_grad
    if needs_grad:
        found.append(tensor)
    key += (dtype, tensor.shape, needs_grad)
    storages.append(storage)
    return there


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
    offsets = []
    bulk = 0
    for value in values:
        if not isinstance(value, torch.Tensor):
            is_raw = type(value) is bytes and len(value) in _RAW
            specs.append(None if value is None else len(value) if is_raw else 0)
            continue
        spec = (DTYPE_CODES[value.dtype], tuple(value.shape), value.requires_grad)
        if value.nbytes > INLINE:
            offsets.append(bulk)
            specs.append((*spec, bulk))
            bulk = aligned(bulk + value.nbytes)
        else:
            specs.append((*spec, -1))
    signature = plain.dumps((subject, tuple(specs)), [])
    if len(signature) > _MAX_SIGNATURE:
        return None
    return _Known(_LENGTH.pack(len(signature)) + signature, offsets, bulk)


class _Plan:
    """How to fetch the values that follow a signature."""

    __slots__ = ("bulk", "data", "inline", "steps", "subject", "traced")

    def __init__(self, subject: Subject, specs: tuple[Any, ...]) -> None:
        self.subject = subject
        self.steps: list[Step] = []
        self.traced: list[int] = []  # the places of the tensors that require grad
        self.inline = 0  # bytes of small tensors
        self.bulk = 0
        self.data = 0  # values that are plain data
        for spec in specs:
            if spec is None:
                self.steps.append(_fetch_none)
            elif type(spec) is tuple:
                self.steps.append(self._tensor(*spec))
            elif type(spec) is int and spec in _RAW:
                self.steps.append(_fetch_raw(self.inline, spec))
                self.inline += spec
            else:
                self.steps.append(_fetch_data(self.data))
                self.data += 1

    def _tensor(self, code: int, shape: Any, grad: bool, offset: int) -> Step:
        dtype = DTYPES[code]
        if type(shape) is not tuple or not all(map(_is_size, shape)):
            raise ProtocolError("tensor whose shape is not one")
        if dtype is None or code < 0:
            raise ProtocolError(f"tensor of dtype {code}")
        count = math.prod(shape)
        length = count * dtype.itemsize
        if offset < 0:
            if length > INLINE:
                raise ProtocolError(f"small tensor of {length} bytes")
            step = _fetch_small(dtype, shape, self.inline, length)
            self.inline += length
        else:
            if offset % 64 or not count:
                raise ProtocolError(f"large tensor of {length} bytes at {offset}")
            step = _fetch_large(dtype, shape, offset, count)
            self.bulk = max(self.bulk, offset + length)
        if grad:
            if not (dtype.is_floating_point or dtype.is_complex):
                raise ProtocolError(f"tensor of {dtype} that requires grad")
            self.traced.append(len(self.steps))
        return step


def _room(area: Any) -> int:
    return 0 if area is None else memoryview(area).nbytes


def _is_size(number: Any) -> bool:
    return type(number) is int and 0 <= number < 1 << 63


def _fetch_none(body: Any, at: int, area: Any, data: Any) -> None:
    return None


def _fetch_data(index: int) -> Step:
    return lambda body, at, area, data: data[index]


def _fetch_raw(start: int, length: int) -> Step:
    return lambda body, at, area, data: bytes(body[at + start : at + start + length])


def _fetch_small(dtype: torch.dtype, shape: Any, start: int, length: int) -> Step:
    like = torch.empty((), dtype=dtype, device=memory.CPU)
    make = like.new_empty  # takes half the time of `torch.empty` with its options
    sizes = shape or ((),)
    end = start + length
    if not length:
        return lambda body, at, area, data: make(*sizes)
    array = memory.arrays[length]

    def step(body: Any, at: int, area: Any, data: Any) -> torch.Tensor:
        tensor = make(*sizes)
        array.from_address(tensor.data_ptr()).raw = body[at + start : at + end]
        return tensor

    return step


def _fetch_large(dtype: torch.dtype, shape: Any, offset: int, count: int) -> Step:
    def step(body: Any, at: int, area: Any, data: Any) -> torch.Tensor:
        flat = torch.frombuffer(area, dtype=dtype, count=count, offset=offset)
        return flat.view(shape)

    return step


def dump_pickle(data: Any) -> bytes:
    return pickle.dumps(data, 5)


def dump_plain(data: Any) -> bytes:
    return plain.dumps(data, [])


def load_plain(data: Any) -> Any:
    return plain.loads(data, [])
