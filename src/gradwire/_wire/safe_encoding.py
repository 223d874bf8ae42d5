"""Plain data as bytes, without pickle: the encoding of workers with an allow-list.

None, bool, int, float, complex, str, bytes, list, tuple, dict, set, slice, torch's dtype, device
and size, and tensors. One tag byte, then a length or count, then the content. Decoding creates only
these types, so bytes from anyone are safe to decode.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import torch

from ..errors import ProtocolError
from . import tensor_kinds
from .device_maps import DeviceMap

_U32 = struct.Struct("<I")
_F64 = struct.Struct("<d")
_C128 = struct.Struct("<dd")
_MAX_DEPTH = 64


class SafeSerializer(NamedTuple):
    """The encoding as a serializer, for messages that follow a device map."""

    devices: DeviceMap | None = None

    def dumps(self, obj: Any, tensors: list[torch.Tensor]) -> bytes:
        """`obj` as bytes; its tensors are appended to `tensors`.

        Raises:
            TypeError: something in it is not plain data.
            ValueError: the device map does not have a tensor's device.
        """
        out: list[bytes] = []
        _put(obj, _Tensors(tensors, self.devices), out, 0)
        return b"".join(out)

    def loads(self, data: bytes | memoryview, tensors: list[torch.Tensor]) -> Any:
        """The inverse of `dumps`."""
        return loads(data, tensors)


class _Tensors(NamedTuple):
    """The tensors of one message."""

    found: list[torch.Tensor]
    devices: DeviceMap | None


def dumps(obj: Any, tensors: list[torch.Tensor]) -> bytes:
    """`obj` as bytes; its tensors are appended to `tensors`.

    Raises:
        TypeError: something in it is not plain data.
    """
    return SafeSerializer().dumps(obj, tensors)


def loads(data: bytes | memoryview, tensors: list[torch.Tensor]) -> Any:
    """The inverse of `dumps`.

    Raises:
        ProtocolError: these bytes are not from `dumps`.
    """
    reader = _Reader(memoryview(data), tensors)
    try:
        value = reader.value(0)
    except (struct.error, LookupError, ValueError, TypeError, OverflowError) as error:
        raise ProtocolError(f"not plain data: {error}") from error
    if reader.at != len(data):
        raise ProtocolError(f"{len(data) - reader.at} bytes left over")
    return value


def _put(obj: Any, tensors: _Tensors, out: list[bytes], depth: int) -> None:
    if depth > _MAX_DEPTH:
        raise TypeError(f"data nested deeper than {_MAX_DEPTH}")
    kind = type(obj)
    if kind in _FIXED:
        tag, text = _FIXED[kind](obj)
        out.append(tag + _U32.pack(len(text)) + text)
    elif kind in _MANY:
        items = [x for pair in obj.items() for x in pair] if kind is dict else list(obj)
        out.append(_MANY[kind] + _U32.pack(len(items)))
        for item in items:
            _put(item, tensors, out, depth + 1)
    elif kind is slice:
        out.append(b"|" + _U32.pack(3))
        for item in (obj.start, obj.stop, obj.step):
            _put(item, tensors, out, depth + 1)
    elif kind is torch.Tensor or kind is torch.nn.Parameter:
        _put_tensor(obj, tensors, out, depth)
    elif kind is tensor_kinds.Copy:
        _put_beside(obj.tensor, tensors, out)
    else:
        raise TypeError(
            f"cannot send {kind.__module__}.{kind.__qualname__}: in allow-list mode "
            "only tensors and plain data (numbers, strings, lists, dicts, …) are sent"
        )


def _put_tensor(
    tensor: torch.Tensor, tensors: _Tensors, out: list[bytes], depth: int
) -> None:
    if type(tensor) is not torch.Tensor:
        grad = tensor.requires_grad
        tensor = tensor.detach().as_subclass(torch.Tensor).requires_grad_(grad)
    recipe = tensor_kinds.take_apart(tensor, tensors.devices)
    if recipe is None:
        _put_beside(tensor, tensors, out)
        return
    out.append(b"R" + _U32.pack(2))
    _put(recipe[0], tensors, out, depth + 1)
    _put(recipe[1], tensors, out, depth + 1)


def _put_beside(tensor: torch.Tensor, tensors: _Tensors, out: list[bytes]) -> None:
    out.append(b"@" + _U32.pack(len(tensors.found)))
    tensors.found.append(tensor)


def _int_bytes(number: int) -> bytes:
    return number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)


_FIXED: dict[type, Callable[[Any], tuple[bytes, bytes]]] = {
    type(None): lambda x: (b"N", b""),
    bool: lambda x: (b"T" if x else b"F", b""),
    int: lambda x: (b"i", _int_bytes(x)),
    float: lambda x: (b"f", _F64.pack(x)),
    complex: lambda x: (b"c", _C128.pack(x.real, x.imag)),
    str: lambda x: (b"s", x.encode("utf-8", "surrogatepass")),
    bytes: lambda x: (b"b", x),
    bytearray: lambda x: (b"B", bytes(x)),
    torch.dtype: lambda x: (b"d", str(x).removeprefix("torch.").encode()),
    torch.device: lambda x: (b"D", str(x).encode()),
}
_MANY: dict[type, bytes] = {
    list: b"[",
    tuple: b"(",
    dict: b"{",
    set: b"<",
    frozenset: b"^",
    torch.Size: b"z",
}


_DTYPES = {  # not getattr: torch imports modules and warns when asked for some names
    str(dtype).removeprefix("torch.").encode(): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}


def _dtype(text: memoryview) -> torch.dtype:
    dtype = _DTYPES.get(bytes(text))
    if dtype is None:
        raise ProtocolError(f"unknown dtype {bytes(text)!r}")
    return dtype


def _device(text: memoryview) -> torch.device:
    try:
        return torch.device(bytes(text).decode())
    except RuntimeError as error:
        raise ProtocolError(f"unknown device {bytes(text)!r}") from error


def _slice(items: list[Any]) -> slice:
    start, stop, step = items
    return slice(start, stop, step)


_READ_FIXED: dict[int, Callable[[memoryview], Any]] = {
    ord("N"): lambda b: None,
    ord("T"): lambda b: True,
    ord("F"): lambda b: False,
    ord("i"): lambda b: int.from_bytes(b, "little", signed=True),
    ord("f"): lambda b: _F64.unpack(b)[0],
    ord("c"): lambda b: complex(*_C128.unpack(b)),
    ord("s"): lambda b: bytes(b).decode("utf-8", "surrogatepass"),
    ord("b"): bytes,
    ord("B"): bytearray,
    ord("d"): _dtype,
    ord("D"): _device,
}
_READ_MANY: dict[int, Callable[[list[Any]], Any]] = {
    ord("["): lambda items: items,
    ord("("): tuple,
    ord("{"): lambda items: dict(zip(items[::2], items[1::2], strict=True)),
    ord("<"): set,
    ord("^"): frozenset,
    ord("z"): torch.Size,
    ord("|"): _slice,
}


class _Reader:
    def __init__(self, data: memoryview, tensors: list[torch.Tensor]) -> None:
        self._data = data
        self._tensors = tensors
        self._copied = 0
        self.at = 0

    def value(self, depth: int) -> Any:
        tag = self._data[self.at]
        (count,) = _U32.unpack_from(self._data, self.at + 1)
        self.at += 5
        if tag == ord("@"):
            return self._tensors[count]
        if depth > _MAX_DEPTH or count > len(self._data) - self.at:
            raise ProtocolError("plain data is cut or nested too deep")
        if tag in _READ_FIXED:
            self.at += count
            return _READ_FIXED[tag](self._data[self.at - count : self.at])
        if tag not in _READ_MANY and tag != ord("R"):
            raise ProtocolError(f"unknown tag {tag}")
        items = [self.value(depth + 1) for _ in range(count)]
        return self._recipe(*items) if tag == ord("R") else _READ_MANY[tag](items)

    def _recipe(self, name: Any, parts: Any) -> torch.Tensor:
        if type(name) is not str or type(parts) is not tuple:
            raise ProtocolError("tensor that is not described")
        if not tensor_kinds.is_known(name):
            raise ProtocolError(f"unknown kind of tensor {name!r}")
        try:
            self._check_size(name, parts)
            return tensor_kinds.put_together(name, parts)
        except (RuntimeError, AttributeError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise ProtocolError(f"tensor of kind {name!r}: {error}") from error

    def _check_size(self, name: str, parts: tuple[Any, ...]) -> None:
        """However often tensors are repeated, copy no more bytes than arrived."""
        if any(
            tensor_kinds.is_expanded(tensor)
            for tensor in tensor_kinds.tensors_of(parts)
        ):
            raise ProtocolError("part of a tensor is larger than its memory")
        self._copied += tensor_kinds.copied(name, parts)
        if self._copied > self._room:
            raise ProtocolError("tensors are larger than the message")

    @cached_property
    def _room(self) -> int:
        storages = (tensor.untyped_storage() for tensor in self._tensors)
        return sum({s.data_ptr(): s.nbytes() for s in storages}.values())
