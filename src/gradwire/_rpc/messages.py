"""Messages of the calls layer besides calls and their responses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

GREETING, GATHER, DEVICES = 16, 17, 18


@dataclass(frozen=True, slots=True)
class Greeting:
    """A new worker of an elastic world → all members: I have joined."""


@dataclass(frozen=True, slots=True)
class Gather:
    """A worker → the collector: one part; the response has all parts."""

    key: str
    value: Any


@dataclass(frozen=True, slots=True)
class Devices:
    """A worker → the target of its device map: these devices; the response lists missing ones."""

    names: tuple[str, ...]
