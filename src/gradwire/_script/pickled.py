"""References inside saved modules: allowed by a switch, as in torch, and meant for calls only.

A saved module is bytes, of which nobody knows who will load them, or how often. So the worker that
saves keeps the reference, and writes down where it can be asked for. Whoever loads asks for it by a
call and gets a fork of its own. What is kept goes with its worker.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

from ..api import current_worker

_allowed = False
_kept: weakref.WeakKeyDictionary[Any, dict[int, Any]] = weakref.WeakKeyDictionary()
_numbers = itertools.count()


def allow(is_allowed: bool) -> None:
    """Whether references can be saved from now on."""
    global _allowed
    _allowed = is_allowed


def dump(rref: Any) -> str:
    """Where a reference can be had.

    Raises:
        RuntimeError: it was not allowed.
    """
    if not _allowed:
        raise RuntimeError(
            "RRef jit pickling is only allowed inside RPC calls: pass the RRef as an argument"
        )
    worker, number = current_worker(), next(_numbers)
    _kept.setdefault(worker, {})[number] = rref
    return f"{number}@{worker.name}"


def load(token: str) -> Any:
    """The reference that `dump` wrote down."""
    number, _, name = token.partition("@")
    worker = current_worker()
    if name == worker.name:
        return _give(int(number))
    return worker.rpc_sync(name, _give, (int(number),))


def _give(number: int) -> Any:
    try:
        return _kept[current_worker()][number]
    except KeyError:
        raise RuntimeError(
            f"reference {number} was saved by another worker than this one, or before a restart"
        ) from None
