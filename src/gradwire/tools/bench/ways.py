"""Who is measured, and what each of them has in its environment."""

from __future__ import annotations

import os

from . import ray_monarch
from .library import VARIABLE

BASE = "torch"
"""Ratios are to this one."""

WAYS: dict[str, dict[str, str]] = {
    "torch": {},
    "torch, huge pages": {"THP_MEM_ALLOC_ENABLE": "1"},
    "gradwire": {},
    "gradwire, TCP": {"GRADWIRE_UNIX_SOCKETS": "0"},
    "Ray": {},
    "Monarch": {},
}


def available() -> list[str]:
    """The ways that can be measured here."""
    return [way for way in WAYS if way[0].islower()] + ray_monarch.installed()


def environment(way: str) -> dict[str, str]:
    """That of its processes."""
    library = "torch" if way.startswith("torch") else "gradwire"
    return {**os.environ, **WAYS[way], VARIABLE: library}
