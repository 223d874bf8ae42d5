"""Who is measured, and what each of them has in its environment."""

from __future__ import annotations

import os
from importlib.util import find_spec

from . import ray_monarch
from .library import VARIABLE

BASE = "torch"
"""Ratios are to this one."""

WAYS: dict[str, dict[str, str]] = {
    "torch": {},
    "torch, huge pages": {"THP_MEM_ALLOC_ENABLE": "1"},
    "gradwire": {},
    "gradwire, TCP": {"GRADWIRE_UNIX_SOCKETS": "0"},
    "gradwire, TLS": {"GRADWIRE_UNIX_SOCKETS": "0", "GRADWIRE_TLS": "1"},
    "Ray": {},
    "Monarch": {},
}


def available() -> list[str]:
    """The ways that can be measured here."""
    ours = [way for way in WAYS if way[0].islower()]
    if find_spec("cryptography") is None:  # nothing else makes certificates
        ours.remove("gradwire, TLS")
    return ours + ray_monarch.installed()


def is_known(way: str) -> bool:
    """Whether it can be measured here: available, or a variant, `gradwire, NAME=VALUE ...`."""
    return way in available() or _variant(way) is not None


def environment(way: str) -> dict[str, str]:
    """That of its processes."""
    library = "torch" if way.startswith("torch") else "gradwire"
    settings = _variant(way) or WAYS[way]
    return {**os.environ, **settings, VARIABLE: library}


def _variant(way: str) -> dict[str, str] | None:
    """The environment variables that make a variant of torch or Gradwire."""
    library, _, settings = way.partition(", ")
    pairs = [setting.partition("=") for setting in settings.split()]
    if library not in ("torch", "gradwire") or not pairs:
        return None
    if not all(equals for _, equals, _ in pairs):
        return None
    return {name: value for name, _, value in pairs}
