"""Whose functions scripts call: Gradwire's own, and torch's names for them.

A script names a function such as `gradwire.rpc_sync`; what it runs later is an operator, which is
told the name of the frontend and finds the function here. `gradwire.script.enable()` adds
Gradwire's own, the drop-in adds torch's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Make = Callable[[Any, Any, Any, Any, float], Any]
"""Makes a call: worker, scripted function, args, kwargs, timeout (-1: the default)."""

WAYS = ("rpc_sync", "rpc_async", "remote")


@dataclass(frozen=True, slots=True)
class Frontend:
    """Functions for scripts, under one set of names."""

    name: str
    functions: dict[str, Callable[..., Any]]
    """By way, the functions that programs name."""
    make: dict[str, Make]
    """By way, what makes such a call for a script."""
    reference: type
    """The class of references; `reference[T]` is an annotation."""
    operators: dict[str, Callable[..., Any]]
    """By operator, functions that scripts call as that operator, with the same arguments."""


_known: dict[str, Frontend] = {}
"""Those that scripts have been compiled for, and may still call."""
_enabled: dict[str, Frontend] = {}
"""Those that scripts are compiled for now."""


def add(frontend: Frontend) -> None:
    _known[frontend.name] = _enabled[frontend.name] = frontend


def remove(name: str) -> None:
    """No script is compiled for it any more."""
    _enabled.pop(name, None)


def get(name: str) -> Frontend:
    """The frontend of this name.

    Raises:
        RuntimeError: it has not been enabled in this process.
    """
    try:
        return _known[name]
    except KeyError:
        raise RuntimeError(
            f"this script makes calls by the names of {name!r}, which are not enabled for "
            "scripts in this process: call gradwire.script.enable(), or run the program with "
            "gradwire run"
        ) from None


def every() -> list[Frontend]:
    return list(_enabled.values())


def find(function: Any) -> tuple[str, str] | None:
    """The frontend and the way of a function that programs name; None for any other."""
    for frontend in _enabled.values():
        for way, known in frontend.functions.items():
            if known is function:
                return frontend.name, way
    return None


def references() -> list[type]:
    """The classes of references."""
    return [frontend.reference for frontend in _enabled.values()]
