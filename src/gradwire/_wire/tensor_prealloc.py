"""The small tensors of messages, which are made ahead where messages look alike.

To make a tensor and to put it into the graph of a context takes several times as long as to fill
it, and programs say the same again and again. So whenever something was sent, and the other side
has to work first, tensors are made for the next message that looks like the last one.

What is made ahead is what would be made on arrival: plain tensors, with the history that the
recorder gives them, which learns later where they belong. Where someone watches what torch does
(`torch_modes.py`), or tensors are others, none are made ahead and none are used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import raw_bytes
from .cargo import NoRecorder, Recorder
from .frames import Frame
from .torch_modes import is_in_mode, is_watched

_FEW, _FEW_BYTES = 8, 4096  # tensors of a message that are made ahead
_MOST = 64  # messages
_Maker = tuple[Callable[..., Tensor], tuple[Any, ...], Callable[[int], Any]]
"""A function, its arguments, and what gives the memory at an address."""


class Blanks:
    """The small tensors of a message to come, still to be filled."""

    __slots__ = ("_places", "history", "tensors")

    def __init__(self, tensors: list[Tensor], places: list[Any], history: Any) -> None:
        self.tensors = tensors
        self._places = places  # their memory, as arrays
        self.history = history
        """What the recorder knows of them."""

    def fill(self, raws: Sequence[bytes]) -> list[Tensor]:
        """The tensors, with these bytes."""
        for place, raw in zip(self._places, raws, strict=True):
            place.raw = raw
        return self.tensors


class Small:
    """How to make the small tensors of messages that look alike."""

    def __init__(self) -> None:
        self.is_usual = False
        """Such a message came before, and its tensors may be made ahead."""
        self.traced: list[int] = []
        """Which of them require grad."""
        self.lengths: list[int] = []
        self._bytes = 0
        self._makers: list[_Maker] = []
        self._can_be_ahead = True

    def __len__(self) -> int:
        return len(self.lengths)

    def add(self, dtype: torch.dtype, shape: Any, length: int, *, grad: bool) -> int:
        """Have one more; its place among them.

        Raises:
            RuntimeError: a mode makes tensors that have no memory.
        """
        like = torch.empty((), dtype=dtype, device=raw_bytes.CPU)
        raw_bytes.write(like, bytes(dtype.itemsize))
        # `new_empty` takes half the time of `torch.empty` with its options.
        array = raw_bytes.arrays[length].from_address
        self._makers.append((like.new_empty, shape or ((),), array))
        self.lengths.append(length)
        self._bytes += length
        if len(self.lengths) > _FEW or self._bytes > _FEW_BYTES:
            self.not_ahead()
        place = len(self.lengths) - 1
        if grad:
            self.traced.append(place)
        return place

    def not_ahead(self) -> None:
        """Make none ahead: it would take too much, or a history is that of others, too."""
        self._can_be_ahead = False

    def make(self, raws: Sequence[bytes]) -> list[Tensor]:
        """The tensors of one message, with these bytes.

        Raises:
            TypeError, RuntimeError: they cannot be made.
        """
        self.is_usual = self._can_be_ahead
        tensors = []
        for (make, sizes, array), raw in zip(self._makers, raws, strict=True):
            tensor = make(*sizes)
            array(tensor.data_ptr() or raw_bytes.no_memory(raw)).raw = raw
            tensors.append(tensor)
        return tensors

    def blanks(self, recorder: Recorder) -> Blanks | None:
        """The tensors of a message to come; None: they would be others than on arrival.

        Raises:
            Exception: whatever a mode raises.
        """
        tensors = self.make([bytes(length) for length in self.lengths])
        if not all(type(tensor) is Tensor for tensor in tensors):
            return None
        makers = zip(self._makers, tensors, strict=True)
        places = [array(tensor.data_ptr()) for (_, _, array), tensor in makers]
        history = None
        if self.traced:
            history = recorder.prepare([tensors[i] for i in self.traced])
        return Blanks(tensors, places, history)


class Stock:
    """What one worker has made ahead. For all threads: each change is a single step."""

    def __init__(self) -> None:
        self.recorder: Recorder = NoRecorder()
        self.wanted: dict[Small, None] = {}
        """Of what some were used, or could have been: to be made by `refill`."""
        self._ready: dict[Small, Blanks] = {}

    def make(self, small: Small, raws: Sequence[bytes], frame: Frame) -> list[Tensor]:
        """The tensors of a message, with these bytes.

        Raises:
            TypeError, RuntimeError: as `Small.make`.
        """
        if small.is_usual and (not small.traced or (frame.mark and frame.scope)):
            if len(self.wanted) < _MOST:
                self.wanted[small] = None
            blanks = self._ready.pop(small, None)
            if blanks is not None and not is_in_mode():
                frame.history = blanks.history
                return blanks.fill(raws)
        return small.make(raws)

    def refill(self) -> None:
        """Make what is wanted. Never raises: it is done beside something else."""
        if is_watched():
            return
        while self.wanted:
            try:
                small, _ = self.wanted.popitem()
                blanks = small.blanks(self.recorder)
            except Exception:  # noqa: BLE001 a mode; or another thread took the last
                continue
            if blanks is not None:
                if len(self._ready) >= _MOST:
                    self._ready.clear()
                self._ready[small] = blanks
