"""The other end of `signature_encoder.py`: compiles each signature that arrives once, into a plan.

A plan reads the numbers and the bytes of small tensors after the signature with a single call of
`struct`, creates the tensors, and from them the message. Every part of a signature is checked
before use: it may come from anyone who knows the key.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import ProtocolError
from . import raw_bytes, safe_encoding
from .dense_tensors import DTYPES, INLINE
from .frames import Frame, Limits, Restored, Restoring, aligned
from .messages import FIRST_UPPER, Call, Result, TensorMessage
from .signature_encoder import (
    LENGTH,
    MAX_DEPTH,
    MAX_SIGNATURE,
    NUMBERS,
    TENSOR_MESSAGE,
    Subject,
    picker,
)

Opened = tuple[Any, Sequence[Tensor], Restored | None]
"""A message, its tensors that are to require grad, and the objects restored, if there are some."""
Load = Callable[[Any], Any]
Types = Mapping[int, type]
Found = Sequence[Any]
"""The numbers of a message, and the bytes of its small tensors, as they came."""
Values = tuple[Any, ...]
_Make = Callable[[Found, Any], Tensor]
"""Makes a tensor, of what was found or of the bulk area."""
_Step = Callable[[Found, Sequence[Tensor], Sequence[Any], Any], Any]
"""Gives a value, of what was found, the tensors, other data, and what restores objects."""

_MAX_LEARNED = 1 << 20  # bytes of signatures; their plans take 30 times that
_read_length = LENGTH.unpack_from


class Decoder:
    """Decodes messages of the registered types, and caches the plans of their signatures."""

    def __init__(self, load: Load, types: Types, limits: Limits) -> None:
        self._load = load
        self._types = types
        self._limits = limits
        self._known: dict[tuple[int, bytes | memoryview], Plan] = {}
        self._learned = 0
        self._width: int | None = None
        self._restoring: Restoring | None = None

    def restore(self, width: int, restoring: Restoring) -> None:
        """Restore objects, each from that many numbers."""
        self._width, self._restoring = width, restoring

    def decode(self, frame: Frame, sender: int = -1) -> Opened:
        """A message.

        Raises:
            ProtocolError: the bytes are malformed.
            Exception: an object in it cannot be restored.
        """
        body = frame.body
        try:
            at = 4 + _read_length(body)[0]
            plan = self._known[frame.kind, body[4:at]]
        except (KeyError, ValueError, struct.error):
            plan, at = self._learn(
                frame
            )  # it is new, in memory without a hash, or none
        if plan.fixed is not None and at <= len(body):
            return plan.build(plan.fixed), (), None
        found = plan.cut(body, at, frame.area)
        data: Sequence[Any] = ()
        if plan.data:
            data = self._load(body[at + plan.inline :])
            if type(data) is not list or len(data) != plan.data:
                raise ProtocolError("data does not fit its signature")
        restored = None
        if plan.restores and self._restoring is not None:
            restored = self._restoring(sender)
        if not plan.makers:
            return plan.message(found, (), data, restored), (), restored
        tensors = plan.make_tensors(found, frame.area)
        message = plan.message(found, tensors, data, restored)
        return message, plan.pick(tensors), restored

    def _learn(self, frame: Frame) -> tuple[Plan, int]:
        body = frame.body
        if len(body) < LENGTH.size:
            raise ProtocolError("message without a signature")
        end = LENGTH.size + _read_length(body)[0]
        key = frame.kind, bytes(body[LENGTH.size : end])
        plan = self._known.get(key)  # it was in memory that cannot be hashed
        if plan is not None:
            return plan, end
        length = len(key[1])
        if end > len(body) or length > MAX_SIGNATURE:
            raise ProtocolError(f"signature of {end - LENGTH.size} bytes")
        try:
            signature = safe_encoding.loads(key[1], [])
            most = 2 * self._limits.bulk
            plan = Plan(frame.kind, signature, self._types, most, self._width)
        except (TypeError, ValueError, LookupError, RuntimeError) as error:
            raise ProtocolError(f"invalid signature: {error}") from error
        self._learned += length
        if self._learned > _MAX_LEARNED:
            self._known.clear()
            self._learned = length
        self._known[key] = plan
        return plan, end


class Plan:
    """How to decode messages of one kind and signature."""

    __slots__ = (
        "_bulk",
        "_count",
        "_cut",
        "_steps",
        "build",
        "data",
        "fixed",
        "inline",
        "makers",
        "pick",
        "restores",
    )

    def __init__(
        self,
        kind: int,
        signature: Any,
        types: Types,
        most_bytes: int,
        width: int | None,
    ) -> None:
        """`most_bytes`: of large tensors, and of copies of tensors that came once.

        `width`: how many numbers an object is restored from; None: there are no such objects.

        Raises:
            TypeError, ValueError, ProtocolError: the signature is invalid.
        """
        # Unpacked only if it is a tuple: a tensor in its place could have any number of items.
        if type(signature) is not tuple:
            raise TypeError("not a tuple")
        target, keywords, modes, specs = signature
        if type(specs) is not tuple:
            raise TypeError("no tuple of specs")
        compiler = _Compiler(specs, width, copies=target is TENSOR_MESSAGE)
        if compiler.bulk + compiler.copied > most_bytes:
            raise ProtocolError(f"tensors of {compiler.bulk + compiler.copied} bytes")
        inline = compiler.layout()
        self.inline = inline.size  # bytes of numbers and small tensors
        self._cut = inline.unpack_from
        self._bulk = compiler.bulk
        self.makers = compiler.makers()
        self.pick = picker(compiler.traced, len(self.makers))
        are_tensors = compiler.are_tensors and len(specs) == len(self.makers) > 0
        self._steps = None if are_tensors else compiler.steps
        self._count: int | None = None  # of numbers before tensors, if that is all
        if target is TENSOR_MESSAGE and len(specs) == len(self.makers) + 1:
            self._count = compiler.count
        self.data = compiler.data  # how many values are other data
        self.restores = compiler.restores
        self.build = _builder(kind, (target, keywords, modes), specs, types)
        """Makes the message of its values."""
        self.fixed = specs if all(spec is None for spec in specs) else None
        """The values, if all are None."""

    def cut(self, body: bytes | memoryview, at: int, area: Any) -> Found:
        """The numbers, and the bytes of each small tensor.

        Raises:
            ProtocolError: something is missing, there or in the bulk area.
        """
        if self._bulk and (area is None or self._bulk > memoryview(area).nbytes):
            raise _too_short()
        try:
            return self._cut(body, at)
        except struct.error:
            raise _too_short() from None

    def make_tensors(self, found: Found, area: Any) -> list[Tensor]:
        """The tensors, each once.

        Raises:
            ProtocolError: one cannot be created.
        """
        try:
            return [make(found, area) for make in self.makers]
        except (TypeError, RuntimeError) as error:
            raise ProtocolError(f"tensor cannot be made here: {error}") from error

    def message(
        self,
        found: Found,
        tensors: Sequence[Tensor],
        data: Sequence[Any],
        restored: Restored | None,
    ) -> Any:
        """The message."""
        if self._steps is None:
            return self.build(tuple(tensors))
        if self._count is not None:
            return self.build((found[: self._count], *tensors))
        steps = self._steps
        return self.build(tuple([s(found, tensors, data, restored) for s in steps]))


class _Compiler:
    """The result of the specs compiled so far."""

    def __init__(self, specs: Values, width: int | None, *, copies: bool) -> None:
        self.are_tensors = True
        """Whether all values are tensors, each there once."""
        self.traced: list[int] = []  # which tensors require grad
        self.bulk = 0  # bytes of large tensors
        self.copied = 0  # bytes of copies
        self.data = 0
        self.restores = False
        """Whether objects are to be restored."""
        self._width = width
        self._copies = copies
        self.count = 0
        self._number_layout = ""
        self._raws: list[int] = []  # bytes of small tensors
        self._tensors: list[tuple[torch.dtype, Any, int, int]] = []
        self.steps = self._compile(specs, 0)

    def layout(self) -> struct.Struct:
        """The layout of numbers and small tensors."""
        raws = "".join(f"{length}s" for length in self._raws)
        return struct.Struct(f"<{self._number_layout}{raws}")

    def makers(self) -> list[_Make]:
        """What makes the tensors.

        Raises:
            RuntimeError: a mode makes tensors that have no memory.
        """
        makers, at = [], self.count
        for dtype, shape, length, offset in self._tensors:
            if offset < 0:
                makers.append(_small(dtype, shape, length, at))
                at += 1
            else:
                makers.append(_large(dtype, shape, length // dtype.itemsize, offset))
        return makers

    def _compile(self, specs: Values, depth: int) -> list[_Step]:
        if type(specs) is not tuple or depth > MAX_DEPTH:
            raise TypeError("specs that are no tuple, or nested too deep")
        return [self._step(spec, depth) for spec in specs]

    def _step(self, spec: Any, depth: int) -> _Step:
        is_tensor = type(spec) is tuple and type(spec[0]) is int
        if is_tensor:
            return self._tensor(*spec)
        self.are_tensors = False
        if spec is None:
            return lambda found, tensors, data, restored: None
        if type(spec) is int:
            return self._repeated(spec)
        if type(spec) is tuple:
            return self._several(spec, depth)
        if spec == "d":
            self.data += 1
            return _from_data(self.data - 1)
        at, layout = self.count, NUMBERS[spec]
        self.count += 1
        self._number_layout += layout
        return lambda found, tensors, data, restored: found[at]

    def _several(self, spec: tuple[Any, ...], depth: int) -> _Step:
        if spec[0] in ("i", "r"):
            what, count = spec
            if type(count) is not int or not 0 <= count <= 1 << 20:
                raise TypeError("no number of numbers")
            at, end = self.count, self.count + count
            self.count = end
            self._number_layout += f"{count}q"
            if what == "i":
                return lambda found, tensors, data, restored: found[at:end]
            if count != self._width:
                raise ProtocolError(f"object of {count} numbers")
            self.restores = True
            return lambda found, tensors, data, restored: restored(*found[at:end])
        if spec[0] == "{":
            _, keys, inner = spec
            if type(keys) is not tuple or any(type(key) is not str for key in keys):
                raise TypeError("keys that are no strings")
            return _to_dict(keys, self._compile(inner, depth + 1))
        bracket, inner = spec
        if bracket == "[":
            return _to_list(self._compile(inner, depth + 1))
        if bracket == "(":
            return _to_tuple(self._compile(inner, depth + 1))
        raise TypeError(f"unknown spec {bracket!r}")

    def _repeated(self, number: int) -> _Step:
        if not 0 <= number < len(self._tensors):
            raise ProtocolError(f"tensor {number} before it is there")
        if not self._copies:
            return lambda found, tensors, data, restored: tensors[number]
        self.copied += self._tensors[number][2]
        return lambda found, tensors, data, restored: tensors[number].clone()

    def _tensor(self, code: int, shape: Any, grad: Any, offset: Any) -> _Step:
        if type(grad) is not bool or type(offset) is not int:
            raise TypeError("tensor with fields of wrong types")
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
            self._raws.append(length)
        else:
            if offset != aligned(self.bulk) or not count:
                raise ProtocolError(f"large tensor of {length} bytes at {offset}")
            self.bulk = offset + length
        number = len(self._tensors)
        self._tensors.append((dtype, shape, length, offset))
        if grad:
            if self._copies or not (dtype.is_floating_point or dtype.is_complex):
                raise ProtocolError(f"tensor of {dtype} that requires grad")
            self.traced.append(number)
        return lambda found, tensors, data, restored: tensors[number]


def _builder(
    kind: int, subject: Subject, specs: Values, types: Types
) -> Callable[[Values], Any]:
    """What makes messages of their values.

    Raises:
        TypeError, ProtocolError: there are no such messages.
    """
    target, keywords, modes = subject
    message = types.get(kind)
    if target is TENSOR_MESSAGE:
        _check_numbers_and_tensors(specs)
        if message is Result:
            return lambda values: Result(TensorMessage(values[0], values[1:]))
        if message is not None and issubclass(message, TensorMessage):
            return lambda values: message(values[0], values[1:])
    elif type(target) is str and message is not None and issubclass(message, Call):
        if not (
            type(keywords) is tuple
            and all(type(word) is str for word in keywords)
            and (modes is None or type(modes) is tuple)
        ):
            raise TypeError("call with keywords or modes that are none")
        return _call_builder(message, target, keywords, modes, specs)
    elif target is None and message is Result and len(specs) == 1:
        return lambda values: Result(values[0])
    elif (
        target is None
        and kind >= FIRST_UPPER
        and message is not None
        and not issubclass(message, Call | TensorMessage)
    ):
        return _field_builder(message)
    raise ProtocolError(f"message {kind} with a signature for {target!r}")


def _call_builder(
    message: type[Call],
    name: str,
    keywords: tuple[str, ...],
    modes: Any,
    specs: Values,
) -> Callable[[Values], Call]:
    first = int(message is not Call)  # the numbers of an upper layer
    if first and not (specs and _are_numbers(specs[0])):
        raise ProtocolError(f"{message.__name__} without its numbers")
    last = len(specs) - len(keywords)
    if last < first:
        raise ProtocolError(f"{message.__name__} with more names than values")
    if message is not Call:
        return lambda values: message(
            name,
            values[1:last],
            dict(zip(keywords, values[last:], strict=True)),
            modes,
            values[0],
        )
    if keywords:
        return lambda values: Call(
            name,
            values[:last],
            dict(zip(keywords, values[last:], strict=True)),
            modes,
        )
    return lambda values: Call(name, values, {}, modes)


def _field_builder(message: type) -> Callable[[Values], Any]:
    def build(values: Values) -> Any:
        try:
            return message(*values)
        except (TypeError, ValueError) as error:
            raise ProtocolError(
                f"{message.__name__} with wrong fields: {error}"
            ) from error

    return build


def _check_numbers_and_tensors(specs: Values) -> None:
    if not specs or not _are_numbers(specs[0]):
        raise ProtocolError("tensor message without its numbers")
    for spec in specs[1:]:
        is_tensor = type(spec) is tuple and type(spec[0]) is int
        if spec is not None and not is_tensor and type(spec) is not int:
            raise ProtocolError("tensor message with something that is no tensor")


def _are_numbers(spec: Any) -> bool:
    return type(spec) is tuple and spec[0] == "i"


def _small(dtype: torch.dtype, shape: Any, length: int, at: int) -> _Make:
    like = torch.empty((), dtype=dtype, device=raw_bytes.CPU)
    raw_bytes.write(like, bytes(dtype.itemsize))
    new = like.new_empty  # takes half as long as `torch.empty` with its options
    array = raw_bytes.arrays[length].from_address
    sizes = shape or ((),)

    def make(found: Found, area: Any) -> Tensor:
        tensor = new(*sizes)
        raw = found[at]
        array(tensor.data_ptr() or raw_bytes.no_memory(raw)).raw = raw
        return tensor

    return make


def _large(dtype: torch.dtype, shape: Any, count: int, offset: int) -> _Make:
    def make(found: Found, area: Any) -> Tensor:
        flat = torch.frombuffer(area, dtype=dtype, count=count, offset=offset)
        return flat.resize_(shape)

    return make


def _from_data(index: int) -> _Step:
    return lambda found, tensors, data, restored: data[index]


def _to_list(steps: list[_Step]) -> _Step:
    return lambda *found: [step(*found) for step in steps]


def _to_tuple(steps: list[_Step]) -> _Step:
    return lambda *found: tuple([step(*found) for step in steps])


def _to_dict(keys: tuple[str, ...], steps: list[_Step]) -> _Step:
    pairs = list(zip(keys, steps, strict=True))
    return lambda *found: {key: step(*found) for key, step in pairs}


def _is_size(number: Any) -> bool:
    return type(number) is int and 0 <= number < 1 << 63


def _too_short() -> ProtocolError:
    return ProtocolError("message is shorter than its signature says")


def load_safely(data: Any) -> Any:
    return safe_encoding.loads(data, [])
