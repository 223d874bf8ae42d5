"""The fields of messages: how they are got at, and whether they are of the right types."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from .messages import Call, Failure
from .packets import Packet, is_packet

Fields = Callable[[Any], tuple[Any, ...]]


def getter(message: type) -> Fields:
    """What gets the fields of such messages."""
    names = [field.name for field in dataclasses.fields(message)]
    if len(names) > 1:
        return attrgetter(*names)
    return lambda m: tuple([getattr(m, name) for name in names])


fields_of_call, fields_of_failure = getter(Call), getter(Failure)


def fields_are_right(message: Any) -> bool:
    """Whether what we use of a message ourselves is what we expect; the rest is for others."""
    if isinstance(message, Call):
        _, args, kwargs, modes, ids = fields_of_call(message)
        kinds = (tuple, list)
        return (
            isinstance(args, kinds)
            and type(kwargs) is dict
            and (modes is None or isinstance(modes, kinds))
            and are_ids(ids)
        )
    if isinstance(message, Packet):
        return is_packet(message)
    if type(message) is Failure:
        return all(type(text) is str for text in fields_of_failure(message)[:3])
    return True


def are_ids(ids: Any) -> bool:
    return isinstance(ids, (tuple, list)) and all(type(n) is int for n in ids)
