"""The messages of calls: one dataclass each.

Codes below 16 are for this layer and the transports; upper layers register theirs from 16 on
(`Codec.register`). Every message but `Result`, `Failure` and the notes is a request, and is
answered by one `Result` or `Failure` with the same call number. Those of every call are not frozen:
making a frozen one takes three times as long.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torch import Tensor

from . import raw_bytes
from .device_maps import is_map

CALL, RESULT, FAILURE, PING, PONG, GOODBYE = 1, 2, 3, 4, 5, 6
NOTES = frozenset((PING, PONG, GOODBYE))
"""Sent on a connection by the transport itself, without a body, and never answered."""
FIRST_UPPER = 16

GetFields = Callable[[Any], tuple[Any, ...]]


@dataclass(slots=True)
class Call:
    """Caller → callee: run this function and return its result."""

    function: Any
    """The function, or its name."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    modes: tuple[Any, ...] | None
    """The caller's grad mode and autocast, if not the usual ones (`_rpc/torch_modes.py`)."""
    ids: tuple[int, ...] = ()
    """Numbers for an upper layer, whose messages that are calls too extend this class."""
    device_map: dict[str, str] | None = None
    """The map for this call's arguments, and backwards for its result; None: the workers' own."""


@dataclass(slots=True)
class Result:
    """Callee → caller: the function's result."""

    value: Any


@dataclass(frozen=True, slots=True)
class Failure:
    """Callee → caller: the exception it raised."""

    type_name: str
    message: str
    trace: str
    pickled: bytes | None
    """The exception itself, if it could be pickled and the caller accepts pickles."""
    tensors: list[Any]
    """Those that the pickle refers to."""


@dataclass(slots=True)
class TensorMessage:
    """64-bit numbers, and tensors by value.

    Each tensor arrives without history and with its own memory, even if two were the same. Upper
    layers' messages of this kind extend this class; a `Result` can contain one.
    """

    numbers: Sequence[int]
    tensors: Sequence[Tensor | None]

    def unshared(self) -> tuple[tuple[int, ...], tuple[Tensor | None, ...]]:
        """The fields, where no tensor has a history or shares memory."""
        tensors: list[Tensor | None] = []
        places: set[int] = set()
        for tensor in self.tensors:
            if tensor is not None:
                place = raw_bytes.place(tensor)
                tensor = tensor.detach().clone() if place in places else tensor.detach()
                places.add(place)
            tensors.append(tensor)
        return tuple(map(int, self.numbers)), tuple(tensors)  # True is 1 there, too


def getter(message: type) -> GetFields:
    """What gets the fields of such messages."""
    names = [field.name for field in dataclasses.fields(message)]
    if len(names) > 1:
        return attrgetter(*names)
    return lambda m: tuple([getattr(m, name) for name in names])


fields_of_call, fields_of_failure = getter(Call), getter(Failure)


def has_right_fields(message: object) -> bool:
    """Whether the fields that Gradwire itself uses have the expected types."""
    if isinstance(message, Call):
        _, args, kwargs, modes, ids, device_map = fields_of_call(message)
        kinds = (tuple, list)
        return (
            isinstance(args, kinds)
            and type(kwargs) is dict
            and (modes is None or isinstance(modes, kinds))
            and isinstance(ids, kinds)
            and all(type(n) is int for n in ids)
            and (device_map is None or is_map(device_map))
        )
    if isinstance(message, TensorMessage):
        return are_numbers_and_tensors((message.numbers, message.tensors))
    if type(message) is Failure:
        return all(type(text) is str for text in fields_of_failure(message)[:3])
    return True


def are_numbers_and_tensors(fields: object) -> bool:
    """Whether these are the fields of a `TensorMessage`."""
    if not isinstance(fields, tuple) or len(fields) != 2:
        return False
    numbers, tensors = fields
    return (
        type(numbers) is tuple
        and type(tensors) is tuple
        and all(type(number) is int for number in numbers)
        and all(tensor is None or isinstance(tensor, Tensor) for tensor in tensors)
    )
