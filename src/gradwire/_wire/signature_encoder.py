"""Common messages as bytes: what repeats is described once, and remembered at both ends.

A message has a *signature*: the function's name, keyword names and modes of a call, how its values
are nested, and dtype and shape of each tensor. Its bytes are computed once per signature here, and
compiled once there, into a plan to read the values (`signature_decoder.py`). What follows the
signature is raw: numbers, small tensors, then other plain data.

    body       length of the signature u32, signature (safe encoding), numbers of 8 bytes each, raw
               bytes of tensors, data

    signature  (target, keywords, modes, specs): the name of the function called, or
               `TENSOR_MESSAGE`, or None; and a spec for each value

    None                          None
    "i", "f"                      an int, a float, among the numbers
    ("i", count)                  a tuple of ints, among the numbers
    "d"                           other plain data
    (dtype, shape, grad, offset)  a tensor; offset: where in the bulk area, -1 if it is in the body
    n ≥ 0                         the very tensor that is the n-th of the message
    ("r", count)                  an object that so many ints replace, among the numbers
    ("[", specs), ("(", specs)    a list, a tuple
    ("{", keys, specs)            a dict

Values are contiguous CPU tensors, each with a storage of its own, None, small plain data, objects
that are replaced by numbers (references), and lists, tuples and dicts of these with tensors in
them. All else goes the general way (`codec.py`): `encode` returns None.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Iterator, Sequence
from ctypes import Array, c_char
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter, itemgetter
from typing import Any

from torch import Tensor, strided

from . import raw_bytes, safe_encoding
from .dense_tensors import DTYPE_CODES, INLINE, is_plain
from .frames import Limits, Parcel, Piece, Replaced, Replacing, aligned
from .messages import RESULT, TensorMessage

Subject = tuple[str | bool | None, tuple[str, ...], tuple[Any, ...] | None]
"""Target, keyword names and modes of a signature."""
NO_SUBJECT: Subject = (None, (), None)
TENSOR_MESSAGE = True
"""The target of a signature whose values are those of a `TensorMessage`: first its numbers."""
_OF_TENSORS: Subject = (TENSOR_MESSAGE, (), None)

Pick = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""Finds the tensors that require grad among those of a message."""
Encoded = tuple[Parcel, Sequence[Tensor], Replaced | None]
"""A message, its tensors that require grad, and the objects replaced, if there may be some."""
Dump = Callable[[Any], bytes]
_Read = Callable[[int], "Array[c_char]"]

LENGTH = struct.Struct("<I")
NUMBERS = {"i": "q", "f": "d"}
"""How numbers are packed; an int that is too long for that is other data."""
MAX_SIGNATURE = 4096
MAX_DEPTH = 4
"""Of lists, tuples and dicts."""
_MAX_REMEMBERED = 4096
_MAX_ITEMS, _MAX_TENSORS, _MAX_INTS = 32, 64, 1024  # in one list, tuple or dict
_BASIC = frozenset((int, float, str, bool, bytes))
_ONLY_INT, _ONLY_STR = frozenset((int,)), frozenset((str,))
_INTS = range(-1 << 63, 1 << 63)

_look_at: Callable[[Tensor], tuple[Any, ...]] = attrgetter(
    "dtype", "shape", "requires_grad", "layout", "is_cpu", "is_nested"
)
"""What tells tensors of one signature from others; all at once, which takes a third."""


class _Keys(tuple[str, ...]):
    """Those of a dict, in the key of a signature."""

    __slots__ = ()


@dataclass(slots=True)
class Known:
    """A signature's bytes, and how to encode what follows them."""

    prefix: bytes
    write: Callable[..., bytes]
    """What packs the numbers."""
    places: list[tuple[_Read | None, int]]
    """Of each tensor: what reads its bytes at its address; or None, and its place in the bulk."""
    bulk_length: int
    pick: Pick
    may_be_conjugate: bool
    is_small: bool
    """Without other data it is well below the limits."""


class _Contents:
    """The contents of a message's values."""

    __slots__ = (
        "_replaced",
        "_width",
        "data",
        "key",
        "numbers",
        "storages",
        "tensors",
        "things",
    )

    def __init__(
        self, subject: Subject, replaced: frozenset[type] = frozenset(), width: int = 0
    ) -> None:
        self.key: list[Any] = [subject]
        """What it has in common with others of its signature."""
        self.tensors: list[Tensor] = []
        self.storages: set[int] = set()  # where their memory begins
        self.numbers: list[int | float] = []
        self.data: list[Any] = []
        self.things: dict[int, Any] = {}
        """Objects to be replaced, by where among the numbers theirs begin."""
        self._replaced = replaced
        self._width = width

    def look(self, values: Sequence[Any], depth: int = 0) -> bool:
        """Inspect values; False: they need the general encoding.

        Raises:
            RuntimeError: a tensor has no contiguous memory of its own, or no shape.
        """
        key, tensors, storages = self.key, self.tensors, self.storages
        for value in values:
            kind = type(value)
            if kind is Tensor:
                there = storage = value.data_ptr()
                if not there or value.storage_offset() or not value.is_contiguous():
                    storage = _storage(value, there) or -id(value)
                storages.add(storage)
                tensors.append(value)
                key.append(_look_at(value))
            elif value is None:
                key.append(None)
            elif kind is float or (kind is int and value in _INTS):
                key.append("f" if kind is float else "i")
                self.numbers.append(value)
            elif kind in self._replaced:
                if any(value is thing for thing in self.things.values()):
                    return False  # the same one twice: only a pickle preserves that
                key.append(f"r{self._width}")
                self.things[len(self.numbers)] = value
                self.numbers += (0,) * self._width
            elif kind is tuple and value and type(value[0]) is Tensor:
                if depth == MAX_DEPTH or not self._look_into(value, depth + 1):
                    return False
            elif kind is tuple and _is_shape(value):
                key.append(f"i{len(value)}")
                self.numbers += value
            elif kind in _BASIC or _is_small(value, MAX_DEPTH - 1):
                key.append("d")
                self.data.append(value)
            elif depth == MAX_DEPTH or not self._look_into(value, depth + 1):
                return False
        return True

    def _look_into(self, value: Any, depth: int) -> bool:
        """Inspect a list, tuple or dict that contains tensors."""
        kind = type(value)
        if kind is not list and kind is not tuple and kind is not dict:
            return False
        count = len(value)
        if count > _MAX_TENSORS:
            return False
        if kind is not dict:
            self.key.append(f"[{count}" if kind is list else f"({count}")
            items = value
        elif _ONLY_STR.issuperset(map(type, value)):
            self.key.append(_Keys(value))
            items = value.values()
        else:
            return False
        before = len(self.tensors)
        # A list without tensors may occur twice: only a pickle preserves that.
        return self.look(items, depth) and len(self.tensors) > before

    def replace(self, replaced: Replaced) -> None:
        """Fill in the numbers of objects."""
        try:
            for at, thing in self.things.items():
                self.numbers[at : at + self._width] = replaced(thing)
        except BaseException:
            replaced.take_back()
            raise

    def find_repeated(self, least: int = 0) -> bool:
        """Mark tensors that occur twice, and have at least `least` bytes, as the same.

        False: other tensors share their memory, or lists that contain them may occur twice.
        """
        found: dict[int, int] = {}
        tensors = iter(self.tensors)
        self.tensors = []
        for index, entry in enumerate(self.key[1:], 1):
            if type(entry) is _Keys or (type(entry) is str and entry[0] == "["):
                return False
            if type(entry) is not tuple:
                continue
            tensor = next(tensors)
            number = found.get(id(tensor))
            if number is not None and tensor.nbytes >= least:
                self.key[index] = number
                continue
            found[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
        return bool(least) or len(self.tensors) == len(self.storages)


class Encoder:
    """Encodes messages by signature, and caches the signatures."""

    def __init__(self, encoding: int, dump: Dump, limits: Limits) -> None:
        self._encoding = encoding
        self._dump = dump
        self._limits = limits
        self._known: dict[tuple[Any, ...], Known] = {}
        self._replaced: frozenset[type] = frozenset()
        self._width = 0
        self._replacing: Replacing | None = None

    def replace(self, kinds: frozenset[type], width: int, replacing: Replacing) -> None:
        """Send objects of exactly these types as that many numbers."""
        self._replaced, self._width, self._replacing = kinds, width, replacing

    def encode(
        self, kind: int, subject: Subject, values: Sequence[Any], to: int = -1
    ) -> Encoded | None:
        """A message; None: it needs the general encoding.

        Raises:
            ValueError: it is larger than the limits.
            Exception: an object in it cannot be replaced.
        """
        if not values or (
            len(values) == 1 and values[0] is None
        ):  # as so many calls and results
            known = self._known.get((subject, *values))
            if known is not None:
                return Parcel(kind, self._encoding, known.prefix), (), None
        contents = _Contents(subject, self._replaced, self._width)
        try:
            if not contents.look(values):
                return None
        except RuntimeError:
            return None
        shared = len(contents.storages) < len(contents.tensors)
        if shared and not contents.find_repeated():
            return None  # the general encoding preserves shared storages
        return self._put(kind, contents, to)

    def encode_tensors(self, kind: int, message: TensorMessage) -> Parcel | None:
        """A `TensorMessage`, also as a result; or None, as `encode`."""
        contents = _Contents(_OF_TENSORS)
        contents.key.append(f"i{len(message.numbers)}")
        contents.numbers += message.numbers
        try:
            if not contents.look(list(map(_in_order, message.tensors))):
                return None
        except RuntimeError:
            return None
        is_shared = len(contents.storages) < len(contents.tensors)
        if is_shared and any(t.nbytes > INLINE for t in contents.tensors):
            if sum(t.nbytes for t in contents.tensors) > 2 * self._limits.bulk:
                return None  # too much for the receiver, which copies what is repeated
            contents.find_repeated(INLINE + 1)  # large ones are sent once
        encoded = self._put(kind, contents)
        return encoded and encoded[0]

    def _put(self, kind: int, contents: _Contents, to: int = -1) -> Encoded | None:
        key = tuple(contents.key)
        known = self._known.get(key) or self._learn(key, contents.tensors)
        if known is None:
            return None
        parts = [known.prefix]
        if contents.numbers:
            try:
                parts.append(known.write(*contents.numbers))
            except struct.error:
                return None  # some of a tuple are too long
        tensors = contents.tensors
        large: list[Piece] = []
        if known.may_be_conjugate and any(map(Tensor.is_conj, tensors)):
            return None
        for tensor, (read, offset) in zip(tensors, known.places, strict=True):
            if read is None:
                large.append(Piece(offset, tensor.detach().view(-1)))
            else:
                parts.append(read(tensor.data_ptr()).raw)
        if contents.data:
            parts.append(self._dump(contents.data))
        parcel = Parcel(kind, self._encoding, b"".join(parts))
        if not known.is_small or contents.data:
            parcel.with_bulk(large, known.bulk_length).check(self._limits)
        if not contents.things or self._replacing is None:
            return parcel, known.pick(tensors), None
        # Last, when nothing else can fail: the upper layer starts to track them.
        replaced = self._replacing(to, kind == RESULT)
        contents.replace(replaced)
        parts[1] = known.write(*contents.numbers)
        parcel.body = b"".join(parts)
        return parcel, known.pick(tensors), replaced

    def _learn(self, key: tuple[Any, ...], tensors: Sequence[Tensor]) -> Known | None:
        known = _describe(key, tensors, self._limits)
        if known is not None:
            if len(self._known) > _MAX_REMEMBERED:
                self._known.clear()
            self._known[key] = known
        return known


def _storage(tensor: Tensor, there: int) -> int:
    """Where the memory of a tensor begins that may be a part of more; 0 if it has none.

    Raises:
        RuntimeError: it is not its memory, in order, and nothing else.
    """
    if not tensor.is_contiguous():
        raise RuntimeError
    offset = tensor.storage_offset()
    # Asked of few, as `is_conj` is, because both let go of the GIL: that costs more than all the
    # rest where another thread wants it. Negative can only be what is the imaginary part of a
    # complex one: it has a stride of two and begins at an odd offset.
    if offset and tensor.numel() <= 1 and tensor.is_neg():
        raise RuntimeError
    if there and not offset:
        return there
    storage = tensor.untyped_storage().data_ptr()
    if not storage and tensor.numel():  # freed: the general way says so
        raise RuntimeError
    return storage


def _in_order(tensor: Tensor | None) -> Tensor | None:
    """A tensor without history; a small one with its elements contiguous."""
    if tensor is None or tensor.layout is not strided or tensor.is_nested:
        return tensor
    if tensor.requires_grad:
        tensor = tensor.detach()
    in_order = tensor.is_contiguous()
    if tensor.nbytes > INLINE and not in_order:
        return tensor
    if tensor.is_complex() or tensor.storage_offset():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor if in_order else tensor.contiguous()


def _is_shape(value: tuple[Any, ...]) -> bool:
    """Whether these are ints, and not too many."""
    return len(value) <= _MAX_INTS and _ONLY_INT.issuperset(map(type, value))


def _is_small(value: Any, depth: int) -> bool:
    """Whether this is small plain data, without tensors."""
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
    key: tuple[Any, ...], tensors: Sequence[Tensor], limits: Limits
) -> Known | None:
    """What is known of messages with this key; None: they need the general encoding."""
    if not all(map(is_plain, tensors)):
        return None
    places: list[tuple[_Read | None, int]] = []
    of_tensors: list[Any] = []
    bulk = length = 0  # of large tensors, and of what is sent as it is
    for tensor in tensors:
        spec = (DTYPE_CODES[tensor.dtype], tuple(tensor.shape), tensor.requires_grad)
        if tensor.nbytes > INLINE:
            places.append((None, bulk))
            bulk = aligned(bulk + tensor.nbytes)
        else:
            places.append((raw_bytes.arrays[tensor.nbytes].from_address, -1))
            length += tensor.nbytes
        of_tensors.append((*spec, places[-1][1]))
    layout: list[str] = []
    specs = _specs(iter(key[1:]), iter(of_tensors), layout)
    signature = safe_encoding.dumps((*key[0], specs), [])
    if len(signature) > MAX_SIGNATURE:
        return None
    prefix = LENGTH.pack(len(signature)) + signature
    numbers = struct.Struct("<" + "".join(layout))
    length += len(prefix) + numbers.size
    traced = [n for n, tensor in enumerate(tensors) if tensor.requires_grad]
    return Known(
        prefix,
        numbers.pack,
        places,
        bulk,
        picker(traced, len(tensors)),
        may_be_conjugate=any(tensor.is_complex() for tensor in tensors),
        is_small=not bulk and length <= limits.body,
    )


def _specs(
    entries: Iterator[Any],
    of_tensors: Iterator[Any],
    layout: list[str],
    count: int | None = None,
) -> tuple[Any, ...]:
    """The specs of so many values; `layout` gets that of their numbers."""
    specs: list[Any] = []
    for entry in islice(entries, count):
        if type(entry) is _Keys:
            items = _specs(entries, of_tensors, layout, len(entry))
            specs.append(("{", tuple(entry), items))
        elif type(entry) is tuple:
            specs.append(next(of_tensors))
        elif type(entry) is not str or entry == "d":
            specs.append(entry)
        elif entry in NUMBERS:
            specs.append(entry)
            layout.append(NUMBERS[entry])
        elif entry[0] in "ir":
            specs.append((entry[0], int(entry[1:])))
            layout.append(f"{entry[1:]}q")
        else:
            items = _specs(entries, of_tensors, layout, int(entry[1:]))
            specs.append((entry[0], items))
    return tuple(specs)


def picker(places: list[int], count: int) -> Pick:
    """What picks the tensors at some places, out of so many."""
    if len(places) == count:
        return tuple
    if len(places) > 1:
        return itemgetter(*places)
    return itemgetter(slice(places[0], places[0] + 1) if places else slice(0))


def dump_pickle(data: Any) -> bytes:
    return pickle.dumps(data, 5)


def dump_safely(data: Any) -> bytes:
    return safe_encoding.dumps(data, [])
