"""What torch runs without Python: its operators, and scripted functions."""

from __future__ import annotations

from typing import Any

import torch


def builtin_name(function: Any) -> str | None:
    """The name of an operator, such as `aten::add`; None if it is none."""
    name: str | None = torch.jit._builtins._find_builtin(function)
    return name


def is_scripted(function: Any) -> bool:
    return isinstance(function, torch.jit.ScriptFunction)


def check_arguments(function: Any, args: Any, kwargs: Any) -> None:
    """As that of `_script/arguments.py`, which is loaded by those who script."""
    from ..._script.arguments import check_arguments as check

    check(function, args, kwargs)


def shared(value: Any) -> Any:
    """What a scripted function has returned, such that scripts see one another's changes of it."""
    if type(value) is list and value:
        return torch._C.ScriptList(value)
    if type(value) is dict and value:
        return torch._C.ScriptDict(value)
    return value


def profiled_name(function: Any) -> str:
    """What profiles call a function."""
    if is_scripted(function):
        return str(function.qualified_name)
    return builtin_name(function) or str(function.__qualname__)
