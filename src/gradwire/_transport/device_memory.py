"""Tensors of devices between two workers of one host: copied by the device, twice, and by no host.

A sender has, for each receiver and size, an *arena* on the device: slots that both processes map.
It copies tensors into a slot, on the stream that is current, and has that stream set a flag. The
receiver's stream waits for the flag, copies them out into memory of its own, and sets another: then
the slot is free again. So no host waits for a device, what the sender does to the tensors later
changes nothing, and what has arrived belongs to the receiver alone.

    sender's host     sent := n, and the frame that names the slot
    sender's stream   copies in, filled := n
    receiver's stream waits for filled = n, copies out, emptied := n

A slot is free when its three words are the same; they lie in the page of the arena
(`device_arena.py`).

An arena is offered with a frame whose tensors go by way of the host, as does all else until the
receiver has opened it. If it cannot, they go on so, and the sender says why, once. At the end the
receiver closes it before the sender frees its memory: the driver wants it so.

No stream ever waits for something that is not yet begun: a flag is set by work that was begun
before the frame was sent. If the sender dies all the same, the receiver's host sets it (`release`).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence

import torch

from .._wire.frames import Parcel, Piece
from ..errors import GradwireError, ProtocolError
from ..locks import CheckedLock
from .base import Traffic
from .cuda_driver import Driver, DriverError
from .device_arena import CLOSED, EMPTIED, FILLED, OPENED, PAGE, REASON, REFUSED, Arena
from .shared_memory import SegmentMap, SegmentPool

log = logging.getLogger("gradwire")

_CLASSES = ((64 << 10, 64), (1 << 20, 16), (16 << 20, 4))
"""Size of a slot, and how many there are of it; larger ones are made to measure, two of each."""
_OFFER = (
    1 << 31
)  # of the word in a frame: tensors came by the host, but here is an arena
_INDEX = 0xFF
_LONGEST = 5.0  # seconds for what this worker has begun to be done, at its end
_LONG = 1.0  # seconds for the other one to take what was sent to it, and to close it
_SLOWLY = 1 << 30  # bytes per second by way of the host: as long a slot is waited for
_MOST_REASONS = 8  # that are kept: some are the other worker's words

GetDriver = Callable[[], Driver | None]


_left: list[Arena] = []
"""Those that the other worker did not close: their memory and their pages stay."""


class DevicePool:
    """The sender's side."""

    def __init__(
        self,
        segments: SegmentPool,
        to: int,
        traffic: Traffic,
        get_driver: GetDriver,
    ) -> None:
        self._segments = segments
        self._to = to
        self._traffic = traffic
        self._get_driver = get_driver
        self._arenas: dict[tuple[int, int], Arena | None] = {}
        self._lock = CheckedLock()
        self.reasons: dict[str, None] = {}
        """Why tensors of devices went by way of the host, if some did."""

    def __repr__(self) -> str:
        return f"<DevicePool to {self._to}: {len(self._arenas)} arenas>"

    def describe(self) -> str:
        """What was done so far, for people."""
        arenas = [*self._arenas.values()]  # others may be added meanwhile
        is_direct = any(arena is not None and _is_open(arena) for arena in arenas)
        found = ", memory of GPUs" if is_direct else ""
        if self.reasons:
            some = "some tensors" if found else "tensors"
            found += f"; {some} of GPUs by way of the CPU ({'; '.join(self.reasons)})"
        return found

    def place(self, parcel: Parcel) -> int:
        """Put a parcel's tensors of devices into a slot, if that can be; a word for its frame."""
        at = parcel.device_at
        pieces = [Piece(n - at, tensor) for n, tensor in parcel.bulk if n >= at]
        length = parcel.bulk_length - at
        driver = self._get_driver()
        device = None if driver is None else driver.index(pieces[0].tensor)
        if driver is None or device is None:
            return self._by_host(length, "only those of CUDA can go from GPU to GPU")
        if any(driver.index(tensor) != device for _, tensor in pieces):
            return self._by_host(length, "one message has tensors of several devices")
        try:
            with driver.entered(device):
                return self._place(driver, device, parcel, pieces)
        except DriverError as error:
            return self._by_host(length, str(error))

    def _place(
        self, driver: Driver, device: int, parcel: Parcel, pieces: Sequence[Piece]
    ) -> int:
        length = parcel.bulk_length - parcel.device_at
        size, count = _class_of(length)
        arena = self._arenas.get((device, size))
        if arena is None:
            if (device, size) in self._arenas:  # it could not be made
                return self._by_host(length)
            return self._offer(driver, device, size, count, length)
        if arena.page.state != OPENED:
            if arena.page.state == REFUSED:
                return self._by_host(length, arena.reason())
            return self._by_host(length) or _OFFER | arena.segment.id << 8
        index = self._free_slot(arena, length)
        if index is None:
            return self._by_host(length, "no slot was free in time")
        slot = arena.slots[index]
        try:
            self._copy_in(driver, arena, index, pieces)
        except BaseException:
            slot.filled = slot.emptied = slot.sent
            raise
        parcel.take_from_device()
        self._traffic.direct += length
        return arena.segment.id << 8 | index

    def _copy_in(
        self, driver: Driver, arena: Arena, index: int, pieces: Sequence[Piece]
    ) -> None:
        stream = driver.stream(arena.device)
        start = arena.memory + index * arena.size
        for offset, tensor in pieces:
            address = driver.address(tensor)
            driver.copy(start + offset, address, tensor.nbytes, stream)
            driver.keep(tensor)  # it may have been made on another stream
        driver.set(arena.flag(index, FILLED), arena.slots[index].sent, stream)

    def take_back(self, word: int) -> None:
        """Free the slot of a frame that was not sent."""
        for arena in [*self._arenas.values()]:
            if arena is not None and arena.segment.id == (word & ~_OFFER) >> 8:
                slot = arena.slots[word & _INDEX]
                slot.emptied = slot.sent

    def _free_slot(self, arena: Arena, length: int) -> int | None:
        """A slot that is now taken; None: there is none for as long as going by the host takes."""
        deadline = time.monotonic() + 0.001 + length / _SLOWLY
        while True:
            with self._lock:
                for index in range(arena.count):
                    slot = arena.slots[index]
                    if slot.sent == slot.filled == slot.emptied:
                        slot.sent += 1
                        return index
            if time.monotonic() > deadline:
                return None
            time.sleep(20e-6)

    def _offer(
        self, driver: Driver, device: int, size: int, count: int, length: int
    ) -> int:
        """Make an arena, and have the receiver told of it."""
        with self._lock:
            if (device, size) in self._arenas:
                return self._by_host(length)
            self._arenas[device, size] = None
            if size * count > driver.free_memory() // 4:
                return self._by_host(length, "little memory is left on the GPU")
            segment = self._segments.page(PAGE)
            if segment is None:
                return self._by_host(length, "no memory can be shared")
            arena = Arena(segment)
            arena.page.count, arena.page.size = count, size
            arena.page.uuid[:] = driver.uuid(device)
            memory = driver.allocate(size * count)
            try:
                arena.page.handle[:] = driver.export(memory)
                arena.begin(driver, device, memory, size, count)
            except BaseException:
                driver.release(memory)
                raise
            self._arenas[device, size] = arena
        return self._by_host(length) or _OFFER | segment.id << 8

    def _by_host(self, length: int, reason: str = "") -> int:
        """Leave it to the host, and say why, once each."""
        self._traffic.by_host += length
        is_new = reason and reason not in self.reasons
        if is_new and len(self.reasons) < _MOST_REASONS:
            self.reasons[reason] = None
            log.warning(
                "tensors of GPUs go to worker %d by way of the CPU, which takes several times as "
                "long: %s",
                self._to,
                reason,
            )
        return 0

    def close(self, *, is_lost: bool) -> None:
        """Free the memory, when the other worker has taken what is in it and closed it.

        If it does neither, the memory is left to the end of the process: the driver does not say
        what happens to who reads on. A worker that is lost has nothing open, as a rule: its process
        has ended.
        """
        with self._lock:  # by one thread, if several see to it
            known, self._arenas = self._arenas, {}
        arenas = [arena for arena in known.values() if arena is not None]
        if not arenas or (driver := self._get_driver()) is None:
            return
        self.drain(arenas)
        until = time.monotonic() + _LONG
        for arena in arenas:
            if not _wait_until(until, arena, _is_let_go) and not is_lost:
                _left.append(arena)
                log.debug("memory of a GPU is left: worker %d has it open", self._to)
                continue
            try:
                with driver.entered(arena.device):
                    driver.unmap_host(arena.start)
                    driver.release(arena.memory)
            except DriverError as error:  # at the end of the process, perhaps
                log.debug("memory of a GPU was not freed: %s", error)

    def drain(self, arenas: Sequence[Arena] = ()) -> None:
        """Wait until what was sent is in its slots: this worker is about to end."""
        until = time.monotonic() + _LONGEST
        known = [arena for arena in self._arenas.values() if arena is not None]
        for arena in arenas or known:
            if not _wait_until(until, arena, _is_filled):
                log.warning("tensors sent to worker %d are not ready", self._to)


def _wait_until(
    deadline: float, arena: Arena, condition: Callable[[Arena], bool]
) -> bool:
    """Whether an arena came to be so in time. Streams wake nobody."""
    while not condition(arena):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.0005)
    return True


def _is_filled(arena: Arena) -> bool:
    """Whether all that was sent is there."""
    return all(slot.sent == slot.filled for slot in arena.slots[: arena.count])


def _is_open(arena: Arena) -> bool:
    """Whether the receiver has it open."""
    return bool(arena.page.state == OPENED)


def _is_let_go(arena: Arena) -> bool:
    """Whether the receiver does not have it open, or no more."""
    return not _is_open(arena)


def _is_taken(arena: Arena) -> bool:
    """Whether all that is copied out here has been."""
    return all(arena.slots[i].emptied == n for i, n in arena.taken.items())


def _class_of(length: int) -> tuple[int, int]:
    """The size of the slot for so many bytes, and how many there are of it."""
    for size, count in _CLASSES:
        if length <= size:
            return size, count
    size = 1 << (length - 1).bit_length()
    return (size // 4 * 3 if length <= size // 4 * 3 else size), 2


class DeviceMap:
    """The receiver's side."""

    def __init__(self, segments: SegmentMap, get_driver: GetDriver) -> None:
        self._segments = segments
        self._get_driver = get_driver
        self._arenas: dict[int, Arena] = {}
        self._lock = CheckedLock()

    def arrival(self, word: int) -> Arrival:
        """What a frame with this word has brought."""
        return Arrival(self, word)

    def arena(self, number: int, *, is_offered: bool) -> Arena:
        """An arena, opened now if it can be, and was not yet.

        Raises:
            ProtocolError: there is no such arena.
        """
        arena = self._arenas.get(number)
        if arena is not None:
            return arena
        segment = self._segments.get(number)
        if segment.size < PAGE:
            raise ProtocolError(f"arena of a device in a page of {segment.size} bytes")
        with self._lock:
            arena = self._arenas.get(number)
            if arena is None:
                arena = Arena(segment)
                if not is_offered:
                    raise ProtocolError("tensors in an arena that was never opened")
                self._open(arena)
                self._arenas[number] = arena
        return arena

    def _open(self, arena: Arena) -> None:
        page = arena.page
        try:
            self._try_to_open(arena)
        except DriverError as error:
            page.reason[:] = str(error).encode()[:REASON].ljust(REASON, b"\0")
            page.state = REFUSED
        else:
            page.state = OPENED

    def _try_to_open(self, arena: Arena) -> None:
        driver, page = self._get_driver(), arena.page
        size, count = page.size, page.count
        if driver is None:
            raise DriverError("there is no CUDA driver there")
        device = driver.find(bytes(page.uuid))
        if device is None:
            raise DriverError(
                "its process does not see that GPU (CUDA_VISIBLE_DEVICES)"
            )
        if not 0 < count <= min(len(arena.slots), _INDEX):
            raise DriverError(f"arena of {count} slots")
        with driver.entered(device):
            memory = driver.open(bytes(page.handle))
            try:
                arena.begin(driver, device, memory, size, count)
            except BaseException:
                driver.close(memory)
                raise

    def device_of(self, arena: Arena) -> torch.device:
        """The device of an arena that is open."""
        driver = self._get_driver()
        assert driver is not None  # it has opened it
        return driver.device(arena.device)

    def copy_out(self, arena: Arena, index: int, targets: Sequence[Piece]) -> None:
        """Copy what is in a slot to where it belongs, on the current stream."""
        driver, slot = self._get_driver(), arena.slots[index]
        assert driver is not None  # it has opened the arena
        with driver.entered(arena.device):
            stream = driver.stream(arena.device)
            if slot.filled != slot.sent:
                driver.wait(arena.flag(index, FILLED), slot.sent, stream)
            start = arena.memory + index * arena.size
            for offset, target in targets:
                to = driver.address(target)
                driver.copy(to, start + offset, _span(target), stream)
            driver.set(arena.flag(index, EMPTIED), slot.sent, stream)
            arena.taken[index] = slot.sent

    def release(self) -> None:
        """The sender is gone: what it did not fill is not waited for any more."""
        for arena in [*self._arenas.values()]:
            for slot in arena.slots[: arena.count]:
                if slot.filled != slot.sent:
                    log.warning(
                        "tensors of a GPU were lost with the worker that sent them"
                    )
                    slot.filled = slot.sent

    def close(self) -> None:
        """Let go of the other worker's memory, when all that came is copied out."""
        with self._lock:
            known, self._arenas = self._arenas, {}
        arenas = [arena for arena in known.values() if arena.memory]
        if not arenas or (driver := self._get_driver()) is None:
            return
        until = time.monotonic() + _LONGEST
        for arena in arenas:
            _wait_until(until, arena, _is_taken)
            try:
                with driver.entered(arena.device):
                    driver.unmap_host(arena.start)
                    driver.close(arena.memory)
                arena.page.state = CLOSED
            except DriverError as error:
                log.debug("memory of a GPU was not closed: %s", error)


class Arrival:
    """What one frame has brought, until it is copied out. An `OnDevice` (`frames.py`)."""

    _arena: Arena | None = None

    def __init__(self, source: DeviceMap, word: int) -> None:
        self._source = source
        self._word = word
        self._index = word & _INDEX
        self._process = os.getpid()
        if not word & _OFFER:
            arena = source.arena(word >> 8, is_offered=False)
            if self._index >= arena.count or not arena.memory:
                raise ProtocolError(f"slot {self._index} of an arena of a device")
            self._arena = arena

    def begin(self) -> bool:
        if self._word & _OFFER:
            # It may take a while, if this process has not used the device yet.
            self._source.arena((self._word ^ _OFFER) >> 8, is_offered=True)
            return False
        return True

    @property
    def device(self) -> torch.device:
        assert self._arena is not None
        return self._source.device_of(self._arena)

    @property
    def room(self) -> int:
        assert self._arena is not None
        return self._arena.size

    def copy_to(self, targets: Sequence[Piece]) -> None:
        assert self._arena is not None
        try:
            self._source.copy_out(self._arena, self._index, targets)
        except DriverError as error:
            self._free()
            raise GradwireError(
                f"tensors of a GPU were sent here, and could not be taken: {error}"
            ) from error
        self._arena = None

    def __del__(self) -> None:
        if os.getpid() == self._process:
            self._free()

    def _free(self) -> None:
        """Nobody wants it, unless it has been copied out."""
        arena, self._arena = self._arena, None
        if arena is not None:
            slot = arena.slots[self._index]
            slot.emptied = slot.sent


def _span(tensor: torch.Tensor) -> int:
    """Bytes from the first element of a tensor to the end of its last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * step for size, step in steps)) * tensor.itemsize
