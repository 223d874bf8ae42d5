"""What is only there for CUDA: memory that two processes share, and flags that streams wait for.

The driver's own interface (`libcuda`) is public and stable, and the same for every version of
torch: two workers need not have the same one. Memory is taken from the driver, not from torch's
allocator, whose expandable segments cannot be shared. Nothing is loaded before the first CUDA
tensor is sent, and no thread has to have used CUDA before.

A flag is a word of host memory that both processes map. A stream sets it or waits for it as it
comes to it, and the host can set it, too: so what waits for a process that has died can go on.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import byref, c_char, c_int, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any, Protocol

import torch

from .. import streams
from ..locks import CheckedLock

HANDLE, UUID = 64, 16
"""Bytes of a handle of memory, and of a device's identity."""
_OPEN_LAZILY = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_FOR_ALL_AND_MAPPED = 1 | 2  # CU_MEMHOSTREGISTER_PORTABLE | _DEVICEMAP
_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ: of two numbers that count up and around


class DriverError(Exception):
    """The driver refused something; says what."""


class Driver(Protocol):
    """What `device_memory.py` needs of devices. All is done in `entered`."""

    def index(self, tensor: torch.Tensor) -> int | None:
        """The device of a tensor; None: of none that is known here."""

    def device(self, index: int) -> torch.device: ...

    def address(self, tensor: torch.Tensor) -> int: ...

    def keep(self, tensor: torch.Tensor) -> None:
        """Its memory is not used for others before the current stream is done with it."""

    def uuid(self, index: int) -> bytes:
        """What a device is called on the whole host."""

    def find(self, uuid: bytes) -> int | None:
        """The number that this process has for a device, if it sees it.

        Raises:
            DriverError: it can use none at all.
        """

    def entered(self, index: int) -> Any:
        """A context in which this thread uses a device."""

    def stream(self, index: int) -> int:
        """The current stream."""

    def free_memory(self) -> int: ...

    def allocate(self, size: int) -> int: ...

    def release(self, memory: int) -> None: ...

    def export(self, memory: int) -> bytes:
        """A handle by which another process can open it."""

    def open(self, handle: bytes) -> int: ...

    def close(self, memory: int) -> None: ...

    def map_host(self, address: int, size: int) -> int:
        """Where devices see memory of the host."""

    def unmap_host(self, address: int) -> None: ...

    def copy(self, to: int, source: int, size: int, stream: int) -> None: ...

    def wait(self, flag: int, value: int, stream: int) -> None: ...

    def set(self, flag: int, value: int, stream: int) -> None: ...


class _Handle(ctypes.Structure):
    _fields_ = [("raw", c_char * HANDLE)]


class CudaDriver:
    """The `Driver` of CUDA."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._contexts: dict[int, c_void_p] = {}
        self._uuids: dict[int, bytes] = {}
        self._lock = CheckedLock()

    def index(self, tensor: torch.Tensor) -> int | None:
        return tensor.get_device() if tensor.is_cuda else None

    def device(self, index: int) -> torch.device:
        return torch.device("cuda", index)

    def address(self, tensor: torch.Tensor) -> int:
        return tensor.data_ptr()

    def keep(self, tensor: torch.Tensor) -> None:
        streams.keep(tensor)

    def uuid(self, index: int) -> bytes:
        known = self._uuids.get(index)
        if known is None:
            found = (c_char * UUID)()
            self._call("cuDeviceGetUuid_v2", byref(found), self._device(index))
            known = self._uuids[index] = bytes(found)
        return known

    def find(self, uuid: bytes) -> int | None:
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as error:  # a forked child, no GPU
            raise DriverError(str(error).partition(". ")[0]) from error
        count = torch.cuda.device_count()
        return next((i for i in range(count) if self.uuid(i) == uuid), None)

    @contextmanager
    def entered(self, index: int) -> Iterator[None]:
        self._call("cuCtxPushCurrent_v2", self._context(index))
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", byref(c_void_p()))

    def stream(self, index: int) -> int:
        if not torch.accelerator.current_stream(index).stream_id:
            return 0  # the default one: a third of the time
        stream: int = torch.cuda.current_stream(index).cuda_stream
        return stream

    def free_memory(self) -> int:
        free = c_size_t()
        self._call("cuMemGetInfo_v2", byref(free), byref(c_size_t()))
        return free.value

    def allocate(self, size: int) -> int:
        memory = c_uint64()
        self._call("cuMemAlloc_v2", byref(memory), c_size_t(size))
        return memory.value

    def release(self, memory: int) -> None:
        self._call("cuMemFree_v2", c_uint64(memory))

    def export(self, memory: int) -> bytes:
        handle = _Handle()
        self._call("cuIpcGetMemHandle", byref(handle), c_uint64(memory))
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        memory, given = c_uint64(), _Handle.from_buffer_copy(handle)
        self._call("cuIpcOpenMemHandle_v2", byref(memory), given, _OPEN_LAZILY)
        return memory.value

    def close(self, memory: int) -> None:
        self._call("cuIpcCloseMemHandle", c_uint64(memory))

    def map_host(self, address: int, size: int) -> int:
        at, there = c_void_p(address), c_uint64()
        self._call("cuMemHostRegister_v2", at, c_size_t(size), _FOR_ALL_AND_MAPPED)
        self._call("cuMemHostGetDevicePointer_v2", byref(there), at, 0)
        return there.value

    def unmap_host(self, address: int) -> None:
        self._call("cuMemHostUnregister", c_void_p(address))

    def copy(self, to: int, source: int, size: int, stream: int) -> None:
        self._call(
            "cuMemcpyDtoDAsync_v2",
            c_uint64(to),
            c_uint64(source),
            c_size_t(size),
            c_void_p(stream),
        )

    def wait(self, flag: int, value: int, stream: int) -> None:
        where, what = c_uint64(flag), c_uint32(value)
        self._call("cuStreamWaitValue32_v2", c_void_p(stream), where, what, _AT_LEAST)

    def set(self, flag: int, value: int, stream: int) -> None:
        where, what = c_uint64(flag), c_uint32(value)
        self._call("cuStreamWriteValue32_v2", c_void_p(stream), where, what, 0)

    def _device(self, index: int) -> c_int:
        device = c_int()
        self._call("cuDeviceGet", byref(device), index)
        return device

    def _context(self, index: int) -> c_void_p:
        """The context that torch uses, too; kept for the life of the process."""
        known = self._contexts.get(index)
        if known is None:
            with self._lock:
                known = c_void_p()
                self._call(
                    "cuDevicePrimaryCtxRetain", byref(known), self._device(index)
                )
                self._contexts[index] = known
        return known

    def _call(self, name: str, *arguments: Any) -> None:
        function = getattr(self._library, name, None)
        if function is None:
            raise DriverError(f"this driver has no {name}")
        status = function(*arguments)
        if status:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(status, byref(text))
            what = (text.value or b"an unknown error").decode()
            raise DriverError(f"{name}: {what}")


@functools.cache
def cuda_driver() -> Driver | None:
    """The driver of this machine; None where there is none."""
    if torch.version.cuda is None:
        return None
    try:
        return CudaDriver(ctypes.CDLL("libcuda.so.1"))
    except OSError:
        return None
