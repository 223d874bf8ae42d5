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


def original(function: Any) -> Any:
    """The Python function that was scripted."""
    return function._torchdynamo_inline


def profiled_name(function: Any) -> str:
    """What profiles call a function."""
    if is_scripted(function):
        return str(function.qualified_name)
    return builtin_name(function) or str(function.__qualname__)
