"""A driver for devices that are not there, and streams of it that go on when they are told to.

Each worker has a driver of its own, as each process has; the memory is the same. What a stream does
is put off until `run`, so that a test sees who waits for whom; or is done at once.
"""

import ctypes
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from gradwire._transport.cuda_driver import HANDLE, DriverError

Step = Callable[[], bool]
"""Something a stream does, if it is time."""


class Memory:
    """That of all devices, by address."""

    def __init__(self) -> None:
        self.buffers: dict[int, ctypes.Array[ctypes.c_char]] = {}
        self.opened: dict[int, int] = {}
        """By address, how many others have it open."""


class PretendedDriver:
    """The `Driver` of one worker. Devices are called `uuids`, in this worker's order."""

    def __init__(
        self, memory: Memory, uuids: str = "abcd", *, is_lazy: bool = False
    ) -> None:
        self.memory = memory
        self.uuids = uuids
        self.current = 0
        """The stream."""
        self.free = 1 << 40
        self.copied: list[int] = []
        """Sizes of what was copied."""
        self.kept: list[torch.Tensor] = []
        self.mapped: set[int] = set()
        self.refuses = ""
        """The name of what it refuses to do."""
        self._is_lazy = is_lazy
        self._used: list[torch.Tensor] = []
        self._streams: dict[int, deque[Step]] = {}

    def run(self) -> bool:
        """Have all streams go on as far as they can; whether they are done."""
        went = True
        while went:
            went = False
            for steps in self._streams.values():
                while steps and steps[0]():
                    steps.popleft()
                    went = True
        is_done = not any(self._streams.values())
        if is_done:
            self._used.clear()
        return is_done

    def index(self, tensor: torch.Tensor) -> int | None:
        return None if tensor.device.type == "meta" else tensor.device.index or 0

    def device(self, index: int) -> torch.device:
        return torch.device("lazy", index)

    def address(self, tensor: torch.Tensor) -> int:
        self._used.append(tensor)  # until the streams are done with it
        return getattr(tensor, "held", tensor).data_ptr()

    def keep(self, tensor: torch.Tensor) -> None:
        self.kept.append(tensor)

    def uuid(self, index: int) -> bytes:
        return self.uuids[index].encode() * 16

    def find(self, uuid: bytes) -> int | None:
        at = self.uuids.find(uuid.decode()[0])
        return None if at < 0 else at

    @contextmanager
    def entered(self, index: int) -> Iterator[None]:
        yield

    def stream(self, index: int) -> int:
        return self.current

    def free_memory(self) -> int:
        return self.free

    def allocate(self, size: int) -> int:
        self._refuse("allocate")
        buffer = ctypes.create_string_buffer(size)
        address = ctypes.addressof(buffer)
        self.memory.buffers[address] = buffer
        return address

    def release(self, memory: int) -> None:
        del self.memory.buffers[memory]

    def export(self, memory: int) -> bytes:
        self._refuse("export")
        return memory.to_bytes(HANDLE, "little")

    def open(self, handle: bytes) -> int:
        self._refuse("open")
        memory = int.from_bytes(handle, "little")
        assert memory in self.memory.buffers
        self.memory.opened[memory] = self.memory.opened.get(memory, 0) + 1
        return memory

    def close(self, memory: int) -> None:
        self.memory.opened[memory] -= 1

    def map_host(self, address: int, size: int) -> int:
        self.mapped.add(address)
        return address

    def unmap_host(self, address: int) -> None:
        self.mapped.remove(address)

    def copy(self, to: int, source: int, size: int, stream: int) -> None:
        self._refuse("copy")

        def step() -> bool:
            ctypes.memmove(to, source, size)
            self.copied.append(size)
            return True

        self._do(stream, step)

    def wait(self, flag: int, value: int, stream: int) -> None:
        word = ctypes.c_uint32.from_address(flag)
        self._do(stream, lambda: word.value == value)

    def set(self, flag: int, value: int, stream: int) -> None:
        def step() -> bool:
            ctypes.c_uint32.from_address(flag).value = value
            return True

        self._do(stream, step)

    def do(self, step: Callable[[], object]) -> None:
        """Something of a program's on the current stream."""
        self._do(self.current, lambda: (step(), True)[1])

    def _do(self, stream: int, step: Step) -> None:
        self._streams.setdefault(stream, deque()).append(step)
        if not self._is_lazy:
            self.run()

    def _refuse(self, what: str) -> None:
        if self.refuses == what:
            raise DriverError(f"{what}: not today")
