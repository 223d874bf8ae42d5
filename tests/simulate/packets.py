"""What simulated workers send to each other about references and calls."""

from __future__ import annotations

from typing import Any, NamedTuple

from gradwire._rref.messages import (
    Adopt,
    Notes,
    Recall,
)


class Ref(NamedTuple):
    """What stands for a reference on its way."""

    owner: int
    value: int
    fork: int
    token: int


class Request(NamedTuple):
    """Call a function with these references; keep what it returns as this value, or 0."""

    call: int
    refs: list[Ref]
    makes: int


class Reply(NamedTuple):
    """What a function returned; if it is not ok, it raised."""

    call: int
    refs: list[Ref]
    is_ok: bool


class Ask(NamedTuple):
    """A control message; it is answered, and sent again if the answer does not come."""

    number: int
    message: Adopt | Notes | Recall


class Answer(NamedTuple):
    number: int
    outcome: Any


class Gone(NamedTuple):
    """To each survivor: the sender has died. This one is never lost."""


Body = Request | Reply | Ask | Answer | Gone


class Packet(NamedTuple):
    sender: int
    to: int
    body: Body
