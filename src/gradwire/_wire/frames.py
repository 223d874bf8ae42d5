"""The unit of transfer: a fixed header, a body, and an area for bulk bytes.

    offset  size  field
    0       1     version of this layout
    1       1     kind: which message (`messages.py`)
    2       2     encoding of the body (`codec.py`)
    4       4     length of the body
    8       8     call: which call this asks or answers; 0 for neither
    16      8     scope: the context that the message belongs to; 0 for none
    24      8     mark: which message of its context this is, if it has tensors that need gradients
    32      8     length of the bulk area
    40      8     segment of shared memory that holds the bulk area; 0: it follows the body
    48      8     over: another context, which has ended; 0 for none

A `Parcel` is a frame to be sent, a `Frame` one that has arrived. The body is bytes; the bulk area
holds the large tensors of the message, each at a multiple of 64 bytes, and those of devices after
all others. A transport that has a shorter way for these than through memory of the host leaves them
out of the area. Lengths are checked against `Limits` before any memory is taken for them.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from .. import streams
from ..errors import ProtocolError

VERSION = 1
HEADER = struct.Struct("<BBHIQQQQQQ")
ALIGNMENT = 64


class Piece(NamedTuple):
    """A flat tensor and where in the bulk area it goes."""

    offset: int
    tensor: torch.Tensor


class Freight(Protocol):
    """A part of a message that an upper layer tracks. One of its methods is called, once."""

    def delivered(self) -> None:
        """The other side has it."""

    def in_doubt(self) -> None:
        """The other side may or may not have it."""


class Wait(Protocol):
    """Something that completes on its own."""

    def wait(self, deadline: float | None = None) -> Any:
        """Wait for it to complete; raises its error, or TimeoutError at the deadline."""

    def settle(self) -> None:
        """Wait for it to complete, with or without an error."""


class OnDevice(Protocol):
    """The tensors of a message that have come from device to device, and are not copied out yet."""

    @property
    def device(self) -> torch.device:
        """Where they are."""

    @property
    def room(self) -> int:
        """Bytes that they have there: no more than that has come."""

    def begin(self) -> bool:
        """Whether they are there; else they are in the bulk area after all. Called first."""

    def copy_to(self, targets: Sequence[Piece]) -> None:
        """Fill tensors of that device, with what begins at their offsets. Once."""


class Replaced(Protocol):
    """Replaces objects of some types in one message by numbers."""

    @property
    def freight(self) -> Sequence[Freight]:
        """What the upper layer tracks about them."""

    def __call__(self, thing: Any) -> tuple[int, ...]:
        """The numbers that replace an object."""

    def take_back(self) -> None:
        """Undo: the message was not sent."""


class Restored(Protocol):
    """Restores such objects from their numbers."""

    @property
    def waits(self) -> Sequence[Wait]:
        """What must complete before the message is answered or used."""

    def __call__(self, *numbers: int) -> Any:
        """The object."""


Replacing = Callable[[int, bool], Replaced]
"""Begins with a message, given whom it goes to and whether it is a reply."""
Restoring = Callable[[int], Restored]
"""Begins with a message, given who sent it."""


class Parcel:
    """An encoded message, ready to be sent to any worker.

    Rarely used fields keep the class's defaults: setting all of them would take longer than the
    rest.
    """

    bulk: Sequence[Piece] = ()
    bulk_length = 0
    device_at = -1
    """Where in the bulk area the tensors of devices begin, if there are some."""
    scope = 0
    mark = 0
    over = 0
    freight: Sequence[Freight] = ()
    can_wait = False
    """An answer that may be held back for a moment, to travel with others."""
    may_be_last = False
    """An answer that is never held back: the process may end right after it."""
    meanwhile: Callable[[], object] | None = None
    """What the sender has to do between sending a request and waiting for its response."""
    was_emptied = False
    """Its tensors were taken out: it cannot be sent again."""
    afterwards: tuple[Callable[[], object], ...] = ()
    """What may be done here when it has been sent, and the other side has to do something first."""

    def __init__(self, kind: int, encoding: int, body: bytes) -> None:
        self.kind = kind
        self.encoding = encoding
        self.body = body

    def __repr__(self) -> str:
        return (
            f"<Parcel of kind {self.kind}: {len(self.body)} + {self.bulk_length} bytes>"
        )

    def with_bulk(self, bulk: Sequence[Piece], length: int) -> Parcel:
        """Itself, with large tensors attached."""
        self.bulk, self.bulk_length = bulk, length
        return self

    def take_from_device(self) -> list[Piece]:
        """Take the tensors of devices out of the bulk area; each with its place among them."""
        at = self.device_at
        taken = [Piece(offset - at, t) for offset, t in self.bulk if offset >= at]
        self.bulk = [piece for piece in self.bulk if piece.offset < at]
        self.bulk_length, self.device_at = at, -1
        self.was_emptied = True
        return taken

    def header(self, call: int, segment: int = 0) -> bytes:
        return HEADER.pack(
            VERSION,
            self.kind,
            self.encoding,
            len(self.body),
            call,
            self.scope,
            self.mark,
            self.bulk_length,
            segment,
            self.over,
        )

    def was_sent(self) -> None:
        """Run the actions for when it has been sent."""
        for do in self.afterwards:
            do()
        if self.meanwhile is not None:
            self.meanwhile()

    def check(self, limits: Limits) -> None:
        """Reject what the receiver would reject.

        Raises:
            ValueError: the message is larger than the options allow.
        """
        if len(self.body) > limits.body or self.bulk_length > limits.bulk:
            raise ValueError(
                f"message of {len(self.body)} + {self.bulk_length} bytes is larger than "
                f"max_body={limits.body}, max_bulk={limits.bulk}; raise them on all workers"
            )

    def arrive(self, call: int) -> Frame:
        """The frame that the other side would get, with its own copy of the bytes."""
        frame = Frame(self.kind, self.encoding, call, self.body)
        if self.device_at >= 0:
            frame.on_device = Copied(self.take_from_device())
        if self.bulk_length:
            frame.area = (ctypes.c_char * self.bulk_length)()
            fill(frame.area, 0, self.bulk)
        if self.scope or self.over:
            frame.scope, frame.mark, frame.over = self.scope, self.mark, self.over
        return frame


class Frame:
    """A message that has arrived and has not been decoded. Most set only a few of the fields."""

    scope = 0
    mark = 0
    over = 0
    waits: Sequence[Wait] = ()
    """What must have come to its end before a request is answered, or a reply used; known when it
    is opened."""
    context: Any = None
    """What an upper layer knows of the scope (`Recorder`); known when it is opened."""
    refused = ""
    """Why a request must not be run: its sender has too much in flight. The body was dropped."""
    charge: Any = None
    """Its entry in the sender's quota (`_transport/quota.py`)."""
    area: Any = None  # a writable buffer that lives as long as the tensors made of it
    on_device: OnDevice | None = None
    """Where the tensors of devices are; None: they are in the area, if there are some."""

    def __init__(
        self, kind: int, encoding: int, call: int, body: bytes | memoryview
    ) -> None:
        self.kind = kind
        self.encoding = encoding
        self.call = call
        self.body = body

    def __repr__(self) -> str:
        return f"<Frame of kind {self.kind}, call {self.call}: {len(self.body)} bytes>"


class Copied:
    """Copies of a message's tensors on their device, for a receiver in the same process."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._copies = {offset: tensor.clone() for offset, tensor in pieces}
        self.device: torch.device = pieces[0].tensor.device
        self.room = max(offset + tensor.nbytes for offset, tensor in pieces)
        streams.publish()

    def begin(self) -> bool:
        return True

    def copy_to(self, targets: Sequence[Piece]) -> None:
        for offset, target in targets:
            copy = self._copies[offset]
            streams.keep(copy)  # it was made on the sender's stream
            target.as_strided((copy.numel(),), (1,)).copy_(copy)


class Limits(NamedTuple):
    """The largest lengths accepted."""

    body: int
    bulk: int


Header = tuple[int, int, int, int, int, int, int, int, int, int]
"""The fields of a header as listed above: a bare tuple is taken apart the fastest."""


def refusal(header: Header, most_body: int, most_bulk: int) -> ProtocolError:
    """Why a header is invalid, or exceeds the limits."""
    version, _, _, body, _, _, _, bulk, _, _ = header
    if version != VERSION:
        return ProtocolError(f"frame of version {version}, this is version {VERSION}")
    if body > most_body:
        return ProtocolError(f"body of {body} bytes, the limit is {most_body}")
    return ProtocolError(f"bulk of {bulk} bytes, the limit is {most_bulk}")


def note(kind: int, segment: int = 0) -> bytes:
    """A frame that consists of its header only."""
    return Parcel(kind, 0, b"").header(0, segment)


def aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def fill(area: Any, start: int, pieces: Sequence[Piece]) -> None:
    """Copy the pieces into a buffer; torch's own threads help with large ones."""
    for offset, source in pieces:
        target = torch.frombuffer(
            area, dtype=source.dtype, count=source.numel(), offset=start + offset
        )
        target.copy_(source)
