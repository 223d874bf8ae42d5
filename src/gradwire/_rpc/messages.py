"""Messages of the calls layer besides calls and their responses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

GREETING, GATHER, DEVICES = 16, 17, 18


@dataclass(frozen=True, slots=True)
class Greeting:
    """A newcomer to an elastic world → everyone there: I am here."""


@dataclass(frozen=True, slots=True)
class Gather:
    """A worker → the one that collects: my part; answered with everyone's, when all have come."""

    key: str
    value: Any


@dataclass(frozen=True, slots=True)
class Devices:
    """A worker → one that its device map is for: have you these? Answered with those it lacks."""

    names: tuple[str, ...]
