"""One arena: slots of a device's memory that two workers map, and the page that describes them.

The page is a segment of shared memory (`shared_memory.py`), and begins by saying what the arena is:

    state u32 (0 offered, 1 opened, 2 refused, 3 closed), count u32, size u64, device's identity 16
    bytes, handle 64 bytes, reason of a refusal 160 bytes; then per slot sent, filled, emptied u32
    each

What the words of a slot mean is in `device_memory.py`.
"""

from __future__ import annotations

import ctypes
from typing import Any

from .cuda_driver import HANDLE, UUID, Driver
from .shared_memory import Segment

OFFERED, OPENED, REFUSED, CLOSED = range(4)
PAGE = 4096
REASON = 160
FILLED, EMPTIED = 1, 2
"""Words of a slot that streams set."""
_SLOTS = 256  # where their words begin


class _Slot(ctypes.Structure):
    """The words of one slot. Numbers count up, and around."""

    _fields_ = [
        ("sent", ctypes.c_uint32),
        ("filled", ctypes.c_uint32),
        ("emptied", ctypes.c_uint32),
    ]


class _Page(ctypes.Structure):
    """What both workers see of an arena."""

    _fields_ = [
        ("state", ctypes.c_uint32),
        ("count", ctypes.c_uint32),
        ("size", ctypes.c_uint64),
        ("uuid", ctypes.c_ubyte * UUID),
        ("handle", ctypes.c_ubyte * HANDLE),
        ("reason", ctypes.c_ubyte * REASON),
    ]


class Arena:
    """An arena, as one of its two workers sees it."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        area = segment.area(PAGE)
        self.start = ctypes.addressof(area)
        self.page = _Page.from_buffer(area)
        self.slots: Any = (
            _Slot * ((PAGE - _SLOTS) // ctypes.sizeof(_Slot))
        ).from_buffer(area, _SLOTS)
        self.memory = 0
        self.device = -1
        self.size = self.count = 0
        """Of the slots; as they were when it was opened: the page can change."""
        self.flags = 0
        """Where the device sees the words of the first slot."""
        self.taken: dict[int, int] = {}
        """On the receiver: by slot, what was last copied out, or is being."""

    def begin(
        self, driver: Driver, device: int, memory: int, size: int, count: int
    ) -> None:
        """Its memory is mapped."""
        self.flags = driver.map_host(self.start, PAGE) + _SLOTS
        self.device, self.memory = device, memory
        self.size, self.count = size, count

    def flag(self, index: int, word: int) -> int:
        """Where the device sees a word of a slot."""
        return self.flags + ctypes.sizeof(_Slot) * index + 4 * word

    def reason(self) -> str:
        text = bytes(self.page.reason).rstrip(b"\0")
        return text.decode(errors="replace")
