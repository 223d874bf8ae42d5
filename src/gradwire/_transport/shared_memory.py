"""Shared memory between two workers of one host, reused.

Fresh pages cost more than the copy, so segments are kept: the sender copies tensors into one, the
receiver's tensors live in it, and when the last of them is freed the receiver clears the segment's
flag, which returns it without a message. The flag is the first word of the segment; the area
begins at `START`. Segments are memfds, sealed against shrinking; their descriptors are passed over
a Unix socket once, and neither side keeps one open.

The first message of each size goes by the stream, and so does everything while no segment is free
(the receiver keeps its tensors): then fresh private memory is cheaper.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import mmap
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from .._wire.frames import Piece, fill
from ..errors import ProtocolError
from ..locks import CheckedLock

START = 4096
_SMALLEST = 64 << 10
_MOST = 2 << 30  # bytes of segments a sender keeps for one receiver
_NOTICE = struct.Struct("<QQ")
_WAIT = 10.0  # a descriptor is sent before the frame that needs it, so this is ample


@functools.cache
def is_available() -> bool:
    """Whether this system supports segments."""
    try:
        fd = _new_memfd(START)
        try:
            Segment(0, fd, 0)
        finally:
            os.close(fd)
    except (AttributeError, OSError):
        return False
    return hasattr(socket, "send_fds")


def _new_memfd(size: int) -> int:
    fd = os.memfd_create("gradwire", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


class Segment:
    """A mapped memfd, with its flag."""

    __slots__ = ("_flag", "_memory", "id", "size", "used_at")

    def __init__(self, number: int, fd: int, size: int) -> None:
        self.id = number
        self.size = size
        self.used_at = 0.0
        self._memory = _map(fd, START + size)
        self._flag = ctypes.c_uint32.from_address(self._memory.data_ptr())

    @property
    def is_free(self) -> bool:
        return not self._flag.value

    def take(self) -> None:
        self._flag.value = 1

    def give_back(self) -> None:
        self._flag.value = 0

    def area(self, length: int) -> Any:
        """The first bytes after the flag, as a buffer. Its user must keep the segment alive."""
        return (ctypes.c_char * length).from_address(self._memory.data_ptr() + START)

    def empty(self) -> None:
        """Return its pages to the system until it is used again."""
        start = ctypes.c_void_p(self._memory.data_ptr())
        length = ctypes.c_size_t(self._memory.numel())
        ctypes.CDLL(None).madvise(start, length, mmap.MADV_REMOVE)
        self.used_at = 0.0


def _map(fd: int, length: int) -> torch.Tensor:
    """The memory of a memfd; unlike `mmap`, torch keeps no descriptor for it."""
    path = f"/proc/self/fd/{fd}"
    try:
        return torch.from_file(path, shared=True, size=length, dtype=torch.uint8)
    except RuntimeError as error:
        raise OSError(f"cannot map shared memory: {error}") from error


class SegmentPool:
    """The sender's side."""

    def __init__(self, side: socket.socket) -> None:
        self._side = side
        self._lock = CheckedLock()
        self._by_size: dict[int, list[Segment]] = {}
        self._missed: dict[int, int] = {}
        self._reused: dict[int, int] = {}
        self._total = 0
        self._count = 0
        self._broken = False

    def __repr__(self) -> str:
        return f"<SegmentPool: {self._count} segments, {self._total >> 20} MiB>"

    def place(self, pieces: Sequence[Piece], length: int) -> Segment | None:
        """A segment with these pieces; None if they should go by the stream."""
        segment = self._take(_size_class(length))
        if segment is None:
            return None
        try:
            fill(segment.area(length), 0, pieces)
        except BaseException:
            segment.give_back()
            raise
        return segment

    def page(self, size: int) -> Segment | None:
        """A segment that is never reused, for data other than areas; None if none can be made."""
        with self._lock:
            return None if self._broken else self._create(size)

    def trim(self, idle: float) -> None:
        """Return the memory of segments that were not used lately to the system."""
        limit = time.monotonic() - idle
        with self._lock:
            for segment in (s for many in self._by_size.values() for s in many):
                if segment.is_free and 0 < segment.used_at < limit:
                    segment.empty()

    def _take(self, size: int) -> Segment | None:
        with self._lock:
            kept = self._by_size.setdefault(size, [])
            for segment in kept:
                if segment.is_free:
                    segment.take()
                    segment.used_at = time.monotonic()
                    self._reused[size] = self._reused.get(size, 0) + 1
                    return segment
            missed = self._missed[size] = self._missed.get(size, 0) + 1
            coming_back = len(kept) < 2 or self._reused.get(size, 0) >= 4 * len(kept)
            if missed < 2 or not coming_back or self._total + size > _MOST:
                return None
            created = None if self._broken else self._create(size)
            if created is None:
                self._broken = (
                    True  # out of memory or descriptors: the stream still works
                )
                return None
            created.take()
            created.used_at = time.monotonic()
            self._total += size
            kept.append(created)
            return created

    def _create(self, size: int) -> Segment | None:
        try:
            fd = _new_memfd(START + size)
            try:
                segment = Segment(self._count + 1, fd, size)
                notice = _NOTICE.pack(segment.id, size)
                socket.send_fds(self._side, [notice], [fd])
            finally:
                os.close(fd)
        except (OSError, ValueError):
            return None
        self._count += 1
        return segment


class SegmentMap:
    """The receiver's side."""

    def __init__(self, side: socket.socket) -> None:
        self._side = side
        self._lock = CheckedLock()
        self._known: dict[int, Segment] = {}

    def area(self, number: int, length: int) -> Any:
        """The bulk area in a segment, which goes back when the last tensor in it dies.

        Raises:
            ProtocolError: there is no such segment, or it is smaller than that.
        """
        segment = self.get(number)
        if length > segment.size:
            raise ProtocolError(f"{length} bytes in a segment of {segment.size}")
        area = segment.area(length)
        area.holder = _Holder(segment)
        return area

    def get(self, number: int) -> Segment:
        """A segment that the sender has made.

        Raises:
            ProtocolError: there is no such segment.
        """
        return self._known.get(number) or self._receive(number)

    def _receive(self, number: int) -> Segment:
        with self._lock:
            while number not in self._known:
                self._receive_one()
            return self._known[number]

    def _receive_one(self) -> None:
        try:
            self._side.settimeout(_WAIT)
            data, fds, _, _ = socket.recv_fds(self._side, _NOTICE.size, 1)
        except OSError as error:
            raise ProtocolError(
                f"no descriptor of a segment was received: {error}"
            ) from error
        if len(data) != _NOTICE.size or len(fds) != 1:
            for fd in fds:
                os.close(fd)
            raise ProtocolError("no descriptor of a segment was received")
        number, size = _NOTICE.unpack(data)
        try:
            sealed = fcntl.fcntl(fds[0], fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
            if not sealed or os.fstat(fds[0]).st_size < START + size:
                raise ProtocolError("segment is not sealed against shrinking")
            self._known[number] = Segment(number, fds[0], size)
        except OSError as error:
            raise ProtocolError(
                f"no descriptor of a segment was received: {error}"
            ) from error
        finally:
            os.close(fds[0])


class _Holder:
    """Returns the segment when the last tensor in it dies; does nothing in a forked child."""

    __slots__ = ("_process", "_segment")

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._process = os.getpid()

    def __del__(self) -> None:
        if os.getpid() == self._process:
            self._segment.give_back()


def _size_class(length: int) -> int:
    """Powers of two, and three quarters of them from 1 MiB on."""
    size = _SMALLEST
    while size < length:
        size <<= 1
    if size > 1 << 20 and length <= size // 4 * 3:
        size = size // 4 * 3
    return size


class Recycler:
    """Private memory to receive large areas from a stream, reused."""

    _FROM = 1 << 20
    _MOST = 1 << 30

    def __init__(self) -> None:
        self._free: dict[int, list[mmap.mmap]] = {}
        self._returned: deque[mmap.mmap] = deque()  # not yet among the free
        self._bytes = 0
        self._lock = CheckedLock()

    def area(self, length: int) -> Any:
        """A writable buffer of that length."""
        if length < self._FROM:
            return (ctypes.c_char * length)()
        size = _size_class(length)
        memory = self._pop(size) or self._map(size)
        area: Any = (ctypes.c_char * length).from_buffer(memory)
        area.holder = _Returner(self, memory)
        return area

    def trim(self) -> None:
        with self._lock:
            self._returned.clear()
            self._free.clear()
            self._bytes = 0

    def put_back(self, memory: mmap.mmap) -> None:
        """Called when tensors die, which may be at any point of the code: takes no lock."""
        self._returned.append(memory)

    def _take_in(self) -> None:
        while self._returned:
            memory = self._returned.popleft()
            if self._bytes + len(memory) <= self._MOST:
                self._bytes += len(memory)
                self._free.setdefault(len(memory), []).append(memory)

    def _pop(self, size: int) -> mmap.mmap | None:
        with self._lock:
            self._take_in()
            kept = self._free.get(size)
            if not kept:
                return None
            self._bytes -= size
            return kept.pop()

    @staticmethod
    def _map(size: int) -> mmap.mmap:
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                memory.madvise(mmap.MADV_HUGEPAGE)
            except OSError:
                pass  # a kernel without huge pages: merely slower
        return memory


class _Returner:
    """Returns the memory when the last tensor in it dies."""

    __slots__ = ("_memory", "_recycler")

    def __init__(self, recycler: Recycler, memory: mmap.mmap) -> None:
        self._recycler = recycler
        self._memory = memory

    def __del__(self) -> None:
        self._recycler.put_back(self._memory)
