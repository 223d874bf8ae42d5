"""The other end of `signature_encoder.py`: a signature that arrives is parsed once, into a plan.

A plan fetches the values that follow the signature: the small tensors in one go
(`tensor_prealloc.py`), and
where there is more, each value by a step of its own.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ..errors import ProtocolError
from . import safe_encoding
from .dense_tensors import DTYPES, INLINE
from .frames import Frame
from .messages import CALL, RESULT, Call, Result
from .signature_encoder import LENGTH, MAX_SIGNATURE, NUMBERS, Subject, picker
from .tensor_prealloc import Small, Stock

P = TypeVar("P")
Load = Callable[[Any], Any]
Step = Callable[[Sequence[Any], Sequence[Tensor], Any, Sequence[Any]], Any]
"""What gives a value, from the numbers, the small tensors, the bulk area, and other data."""

_MAX_LEARNED = 1 << 20  # bytes of signatures; what is made of them takes 30 times that
_read_length = LENGTH.unpack_from


class Learner(Generic[P]):
    """Remembers what was made of the signatures that arrived."""

    def __init__(self, parse: Callable[[Any], P]) -> None:
        self._parse = parse
        self._known: dict[bytes | memoryview, P] = {}
        self._learned = 0

    def _find(self, body: bytes | memoryview) -> tuple[P, int]:
        """What to do with what follows a signature, and where that begins."""
        try:
            end = 4 + _read_length(body)[0]
            return self._known[body[4:end]], end
        except (KeyError, ValueError, struct.error):
            return self._learn(body)  # it is new, in memory that has no hash, or none

    def _learn(self, body: bytes | memoryview) -> tuple[P, int]:
        if len(body) < LENGTH.size:
            raise ProtocolError("message without a signature")
        end = LENGTH.size + _read_length(body)[0]
        signature = bytes(body[LENGTH.size : end])
        plan = self._known.get(signature)  # it was in memory that cannot be hashed
        if plan is not None:
            return plan, end
        if end > len(body) or len(signature) > MAX_SIGNATURE:
            raise ProtocolError(f"signature of {end - LENGTH.size} bytes")
        try:
            plan = self._parse(safe_encoding.loads(signature, []))
        except (TypeError, ValueError, IndexError, RuntimeError) as error:
            raise ProtocolError(f"signature makes no sense: {error}") from error
        self._learned += len(signature)
        if self._learned > _MAX_LEARNED:
            self._known.clear()
            self._learned = len(signature)
        self._known[signature] = plan
        return plan, end


class Decoder(Learner["Plan"]):
    """What reads calls and results."""

    def __init__(self, load: Load, stock: Stock) -> None:
        super().__init__(_parse)
        self._load = load
        self._stock = stock

    def decode(self, frame: Frame) -> tuple[Plan, tuple[Any, ...]]:
        """What is known of such messages, and the values of this one.

        Raises:
            ProtocolError: the bytes make no sense.
        """
        body = frame.body
        plan, at = self._find(body)
        if plan.fixed is not None and at <= len(body):
            return plan, plan.fixed
        found = plan.cut(body, at, frame.area)
        data = self._load_data(plan, body[at + plan.inline :]) if plan.data else ()
        return plan, tuple(plan.fetch(found, data, frame, self._stock))

    def _load_data(self, plan: Plan, rest: bytes | memoryview) -> list[Any]:
        data = self._load(rest)
        if type(data) is not list or len(data) != plan.data:
            raise ProtocolError("data does not fit its signature")
        return data


def _parse(signature: Any) -> Plan:
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
    return Plan(subject, specs)


class Plan:
    """How to fetch the values that follow a signature."""

    __slots__ = (
        "_cut",
        "_offsets",
        "_traced",
        "bulk",
        "count",
        "data",
        "fixed",
        "inline",
        "is_small",
        "kind",
        "make",
        "pick",
        "small",
        "steps",
        "subject",
    )

    def __init__(
        self, subject: Subject, specs: tuple[Any, ...], count: int = 0
    ) -> None:
        """`count`: how many numbers come before the values."""
        self.count = count
        """How many come before the small tensors."""
        self.subject = subject
        self.kind = subject[0]
        self.steps: list[Step] = []
        self.small = Small()
        self.bulk = 0
        self.data = 0  # values that are other data than numbers
        numbers = f"{count}q"
        self._traced: list[int] = []  # the places of the tensors that require grad
        self._offsets: set[int] = set()  # of large tensors
        for spec in specs:
            if spec is None:
                self.steps.append(_fetch_none)
            elif type(spec) is tuple:
                self.steps.append(self._tensor(*spec))
            elif spec in NUMBERS:
                self.steps.append(_fetch_number(self.count))
                numbers += NUMBERS[spec]
                self.count += 1
            else:
                self.steps.append(_fetch_data(self.data))
                self.data += 1
        self.make = _maker(subject, len(specs))
        """Makes the message of the values, for the most common ones."""
        self.pick = picker(self._traced, len(specs))
        self.is_small = 0 < len(specs) == len(self.small)
        """Whether all values are small tensors."""
        are_none = all(spec is None for spec in specs)
        self.fixed: tuple[Any, ...] | None = (None,) * len(specs) if are_none else None
        """The values, if there are none in fact."""
        lengths = "".join(f"{length}s" for length in self.small.lengths)
        inline = struct.Struct(f"<{numbers}{lengths}")
        self.inline = inline.size  # bytes of numbers and small tensors
        self._cut = inline.unpack_from

    def cut(self, body: bytes | memoryview, at: int, area: Any) -> tuple[Any, ...]:
        """The numbers, and the bytes of each small tensor.

        Raises:
            ProtocolError: something is missing, there or in the bulk area.
        """
        if self.bulk and self.bulk > room(area):
            raise too_short()
        try:
            return self._cut(body, at)
        except struct.error:
            raise too_short() from None

    def fetch(
        self, found: Sequence[Any], data: Sequence[Any], frame: Frame, stock: Stock
    ) -> list[Any]:
        """The values, of what was cut and of other data.

        Raises:
            ProtocolError: a tensor cannot be made.
        """
        raws = found[self.count :]
        try:
            small = stock.make(self.small, raws, frame) if raws else []
            if self.is_small:
                return small
            return [step(found, small, frame.area, data) for step in self.steps]
        except (TypeError, RuntimeError) as error:
            raise ProtocolError(f"tensor cannot be made here: {error}") from error

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
            step = _fetch_small(self.small.add(dtype, shape, length, grad=grad))
        else:
            if offset % 64 or not count:
                raise ProtocolError(f"large tensor of {length} bytes at {offset}")
            step = _fetch_large(dtype, shape, offset, count)
            if offset in self._offsets:
                step = _fetch_copy(step)
            self._offsets.add(offset)
            if grad:
                self.small.not_ahead()
            self.bulk = max(self.bulk, offset + length)
        if grad:
            if not (dtype.is_floating_point or dtype.is_complex):
                raise ProtocolError(f"tensor of {dtype} that requires grad")
            self._traced.append(len(self.steps))
        return step


def _maker(subject: Subject, count: int) -> Callable[[tuple[Any, ...]], Any] | None:
    kind, name, keywords, modes, spread = subject
    if kind == RESULT and spread:
        return Result
    if kind == RESULT and count == 1:
        return lambda values: Result(values[0])
    if kind == CALL and name is not None and not keywords:
        return lambda values: Call(name, values, {}, modes)
    return None


def too_short() -> ProtocolError:
    return ProtocolError("message is shorter than its signature says")


def room(area: Any) -> int:
    return 0 if area is None else memoryview(area).nbytes


def _is_size(number: Any) -> bool:
    return type(number) is int and 0 <= number < 1 << 63


def _fetch_none(numbers: Any, small: Any, area: Any, data: Any) -> None:
    return None


def _fetch_number(index: int) -> Step:
    return lambda numbers, small, area, data: numbers[index]


def _fetch_data(index: int) -> Step:
    return lambda numbers, small, area, data: data[index]


def _fetch_small(index: int) -> Step:
    return lambda numbers, small, area, data: small[index]


def _fetch_large(dtype: torch.dtype, shape: Any, offset: int, count: int) -> Step:
    def step(numbers: Any, small: Any, area: Any, data: Any) -> Tensor:
        flat = torch.frombuffer(area, dtype=dtype, count=count, offset=offset)
        return flat.resize_(shape)

    return step


def _fetch_copy(fetch: Step) -> Step:
    """For one that was sent once and is there twice."""
    return lambda *found: fetch(*found).clone()


def load_plain(data: Any) -> Any:
    return safe_encoding.loads(data, [])
