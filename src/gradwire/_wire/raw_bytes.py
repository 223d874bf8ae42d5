"""Raw bytes of CPU tensors, without copies and for every dtype.

The only place that uses addresses. numpy is not an option: it knows neither bfloat16 nor float8.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

CPU = torch.device("cpu")  # always explicit: users may have set another default device


class _Arrays(dict[int, Any]):
    """ctypes' array types by length, cached: creating one costs more than using it."""

    def __missing__(self, length: int) -> Any:
        array = ctypes.c_char * length
        if len(self) < 4096:
            self[length] = array
        return array


arrays = _Arrays()
"""The types of so many bytes; `arrays[n].from_address(there).raw` are those at an address."""


def read(tensor: torch.Tensor, length: int) -> bytes:
    """A copy of the first `length` bytes at the tensor's address."""
    if not length:
        return b""
    return arrays[length].from_address(tensor.data_ptr()).raw  # type: ignore[no-any-return]


def write(tensor: torch.Tensor, data: bytes | memoryview) -> None:
    """Write `data` to the tensor's memory, which is large enough."""
    if len(data):
        there = tensor.data_ptr() or no_memory(data)
        arrays[len(data)].from_address(there).raw = data


def no_memory(data: bytes | memoryview) -> int:
    """An address for a tensor without memory: it is never written to.

    Raises:
        RuntimeError: the tensor has elements. Writing them would crash the process.
    """
    if len(data):
        raise RuntimeError("it has no memory; is a mode such as FakeTensorMode on?")
    return 0


def view(tensor: torch.Tensor) -> memoryview:
    """The tensor's bytes in place. Holds no reference: keep the tensor meanwhile."""
    return memoryview(arrays[tensor.nbytes].from_address(tensor.data_ptr())).cast("B")


def place(tensor: torch.Tensor) -> int:
    """The address of its memory; a unique number where that is not contiguous."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return -id(tensor)
    if not tensor.storage_offset():
        return tensor.data_ptr()  # the same, in half the time
    return tensor.untyped_storage().data_ptr()
