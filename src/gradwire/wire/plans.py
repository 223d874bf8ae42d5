"""The other end of `signatures.py`: a signature that arrives is parsed once, into a plan.

A plan fetches the values that follow the signature: each by a step of its own, or, where all are
small tensors, as most are, in one go.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ..errors import ProtocolError
from . import memory, plain
from .memory import no_memory
from .messages import CALL, RESULT, Call, Result
from .signatures import LENGTH, MAX_SIGNATURE, Subject, picker
from .tensors import DTYPES, INLINE

P = TypeVar("P")
Load = Callable[[Any], Any]
Step = Callable[[Any, int, Any, Any], Any]
_Small = tuple[Callable[..., Tensor], tuple[Any, ...], Callable[[int], Any]]
"""How to make a small tensor: a function, its arguments, and what puts bytes at an address."""

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
            plan = self._parse(plain.loads(signature, []))
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

    def __init__(self, load: Load) -> None:
        super().__init__(_parse)
        self._load = load

    def decode(
        self, body: bytes | memoryview, area: Any
    ) -> tuple[Plan, tuple[Any, ...]]:
        """What is known of such messages, and the values of this one.

        Raises:
            ProtocolError: the bytes make no sense.
        """
        plan, at = self._find(body)
        if not plan.is_small:
            values = plan.fixed
            if values is None or at > len(body):
                values = self._fetch(plan, body, at, area)
            return plan, values
        try:
            return plan, tuple(plan.make_all(plan.cut(body, at)))
        except struct.error:
            raise too_short() from None
        except (TypeError, RuntimeError) as error:
            raise too_odd(error) from error

    def _fetch(
        self, plan: Plan, body: bytes | memoryview, at: int, area: Any
    ) -> tuple[Any, ...]:
        """The values, step by step."""
        start = at + plan.inline
        if start > len(body) or (plan.bulk and plan.bulk > room(area)):
            raise too_short()
        data = self._load(body[start:]) if plan.data else []
        if type(data) is not list or len(data) != plan.data:
            raise ProtocolError("data does not fit its signature")
        try:
            return tuple([step(body, at, area, data) for step in plan.steps])
        except (TypeError, RuntimeError) as error:
            raise too_odd(error) from error


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
        "_lengths",
        "_offsets",
        "_traced",
        "bulk",
        "cut",
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
        self, subject: Subject, specs: tuple[Any, ...], numbers: int = 0
    ) -> None:
        """`numbers`: how many come before the values."""
        self.subject = subject
        self.kind = subject[0]
        self.steps: list[Step] = []
        self.small: list[_Small] = []
        """How to make them, if all are small tensors."""
        self.inline = 8 * numbers  # bytes of small tensors, and of what comes before
        self.bulk = 0
        self.data = 0  # values that are plain data
        self._traced: list[int] = []  # the places of the tensors that require grad
        self._lengths = f"<{numbers}q"
        self._offsets: set[int] = set()  # of large tensors
        for spec in specs:
            if spec is None:
                self.steps.append(_fetch_none)
            elif type(spec) is tuple:
                self.steps.append(self._tensor(*spec))
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
        self.cut = struct.Struct(self._lengths).unpack_from
        """Takes the numbers and the bytes of small tensors apart."""

    def make_all(self, raws: Sequence[bytes]) -> list[Tensor]:
        """The values, if all are small tensors."""
        made = []
        for (make, sizes, put), raw in zip(self.small, raws, strict=True):
            tensor = make(*sizes)
            put(tensor.data_ptr() or no_memory(raw)).raw = raw
            made.append(tensor)
        return made

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
            self.small.append(_small(dtype, shape, length))
            self._lengths += f"{length}s"
            step = _fetch_small(self.small[-1], self.inline, length)
            self.inline += length
        else:
            if offset % 64 or not count:
                raise ProtocolError(f"large tensor of {length} bytes at {offset}")
            step = _fetch_large(dtype, shape, offset, count)
            if offset in self._offsets:
                step = _fetch_copy(step)
            self._offsets.add(offset)
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


def too_odd(error: Exception) -> ProtocolError:
    return ProtocolError(f"tensor cannot be made here: {error}")


def room(area: Any) -> int:
    return 0 if area is None else memoryview(area).nbytes


def _is_size(number: Any) -> bool:
    return type(number) is int and 0 <= number < 1 << 63


def _fetch_none(body: Any, at: int, area: Any, data: Any) -> None:
    return None


def _fetch_data(index: int) -> Step:
    return lambda body, at, area, data: data[index]


def _small(dtype: torch.dtype, shape: Any, length: int) -> _Small:
    like = torch.empty((), dtype=dtype, device=memory.CPU)
    memory.write(like, bytes(dtype.itemsize))  # raises if a mode made it without memory
    # `new_empty` takes half the time of `torch.empty` with its options.
    return like.new_empty, shape or ((),), memory.arrays[length].from_address


def _fetch_small(small: _Small, start: int, length: int) -> Step:
    make, sizes, put = small
    end = start + length

    def step(body: Any, at: int, area: Any, data: Any) -> Tensor:
        tensor = make(*sizes)
        raw = body[at + start : at + end]
        put(tensor.data_ptr() or no_memory(raw)).raw = raw
        return tensor

    return step


def _fetch_large(dtype: torch.dtype, shape: Any, offset: int, count: int) -> Step:
    def step(body: Any, at: int, area: Any, data: Any) -> Tensor:
        flat = torch.frombuffer(area, dtype=dtype, count=count, offset=offset)
        return flat.view(shape)

    return step


def _fetch_copy(fetch: Step) -> Step:
    """For one that was sent once and is there twice."""
    return lambda body, at, area, data: fetch(body, at, area, data).clone()


def load_plain(data: Any) -> Any:
    return plain.loads(data, [])
