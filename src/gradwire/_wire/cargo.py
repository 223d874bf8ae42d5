"""Things in a message that are more than their bytes: both ends keep books about them.

An upper layer registers a carrier for a type (`Codec.carry`). Such an object travels as a few
numbers; the carrier is asked for them when it leaves and gets them when it arrives. What left is
remembered with the parcel (`Parcel.freight`), so that whoever sends that can say what became of
it; what must happen before the message may be used is remembered with the frame (`Frame.waits`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from .frames import Frame, Freight, Parcel, Wait


class Carrier(Protocol):
    """Who keeps the books for one type."""

    def load(
        self, thing: Any, to: int, is_reply: bool
    ) -> tuple[tuple[int, ...], Freight]:
        """The numbers that stand for it on its way to a worker.

        The freight of a reply is told of its end only if it was not sent: nobody answers a reply.
        """

    def unload(self, fields: tuple[int, ...], sender: int) -> tuple[Any, Wait | None]:
        """What came, and what has to be waited for before it may be used."""


class Recorder(Protocol):
    """Who records tensors that need gradients, when they leave and when they arrive.

    A context is an object of its own: it is found once for a message, and handed on.
    """

    def current(self) -> Any:
        """The context of this thread; None if there is none."""

    def check(self, tensors: Sequence[torch.Tensor]) -> None:
        """Refuse what cannot be recorded. What goes the short way can be.

        Raises:
            TypeError: there is one.
        """

    def leaving(
        self, context: Any, to: int, parcel: Parcel, tensors: Sequence[torch.Tensor]
    ) -> None:
        """A message of a context leaves, with these: what there is to say goes onto the parcel."""

    def arrived(
        self, frame: Frame, sender: int, tensors: Sequence[torch.Tensor]
    ) -> Any:
        """A message of a context came, with these that are to require grad; the context.

        With a mark they get their history, in place; without, they are leaves.
        """


class NoRecorder:
    """Where there are no contexts."""

    def current(self) -> None:
        return None

    def check(self, tensors: Sequence[torch.Tensor]) -> None:
        return None

    def leaving(self, context: Any, to: int, parcel: Any, tensors: Any) -> None:
        return None

    def arrived(self, frame: Frame, sender: int, tensors: Any) -> None:
        require_grad(tensors)


def require_grad(tensors: Iterable[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.requires_grad_()


@dataclass(slots=True)
class Cargo:
    """What one message carries: `worker` is whom it goes to or comes from."""

    carriers: dict[type, Carrier]
    worker: int
    is_reply: bool = False
    freight: list[Freight] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    is_recorded: bool = False
    """Tensors that need gradients are taken note of."""
    tensors: dict[int, torch.Tensor] = field(default_factory=dict)
    """Those, by number."""

    def note(self, tensor: torch.Tensor) -> int:
        """The number of a tensor that leaves."""
        number = len(self.tensors)
        self.tensors[number] = tensor
        return number

    def noted(self, number: int, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that arrived, without its history yet."""
        self.tensors[number] = tensor
        return tensor

    def load(self, kind: type, thing: Any) -> tuple[int, ...]:
        fields, freight = self.carriers[kind].load(thing, self.worker, self.is_reply)
        self.freight.append(freight)
        place = list(self.carriers).index(kind)  # carriers are the same on all workers
        return place, *fields

    def unload(self, place: int, *fields: int) -> Any:
        carrier = list(self.carriers.values())[place]
        thing, wait = carrier.unload(fields, self.worker)
        if wait is not None:
            self.waits.append(wait)
        return thing

    def take_back(self) -> None:
        """The message was not sent."""
        for freight in self.freight:
            freight.in_doubt()
