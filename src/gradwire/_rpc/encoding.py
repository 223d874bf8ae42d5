"""A user's call, checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.jit import ScriptFunction

from .._wire.messages import Call
from . import torch_modes

check_scripted: Callable[[Any, Any, Any], None] | None = None
"""Sees that a scripted function takes its arguments, where scripts may make calls (`script.py`)."""


def prepare(
    func: Any,
    args: Any,
    kwargs: Any,
    kind: type[Call] = Call,
    ids: tuple[int, ...] = (),
) -> Call:
    """A user's call, checked, with this thread's modes.

    Raises:
        TypeError: naming what cannot be called or passed.
        RuntimeError: a scripted function does not take these arguments.
    """
    if not callable(func):
        raise TypeError(f"{func!r} cannot be called: give a function")
    if type(args) is not tuple:
        if args is not None and not isinstance(args, (tuple, list)):
            raise TypeError(f"args={args!r}: give a tuple, such as args=(x,)")
        args = tuple(args or ())
    if kwargs is None:
        kwargs = {}
    elif isinstance(kwargs, dict):
        kwargs = dict(kwargs)
    else:
        raise TypeError(f"kwargs={kwargs!r}: give a dict, such as kwargs={{'x': 1}}")
    if check_scripted is not None and type(func) is ScriptFunction:
        check_scripted(func, args, kwargs)
    return kind(func, args, kwargs, torch_modes.capture(), ids)
