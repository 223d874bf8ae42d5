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


def shared(function: Any, value: Any) -> Any:
    """What a scripted function has returned, such that scripts see one another's changes of it.

    Those are lists and dicts. torch infers their type from what is in them: it cannot for
    references, or if an element is empty, and forgets the names of tuples. There, all get copies.
    """
    if type(value) not in (list, dict) or not value:
        return value
    if "__torch__." in function.schema.returns[0].type.annotation_str:
        return value
    share = torch._C.ScriptList if type(value) is list else torch._C.ScriptDict
    try:
        return share(value)
    except (RuntimeError, torch.jit.Error):
        return value


def profiled_name(function: Any) -> str:
    """What profiles call a function."""
    if is_scripted(function):
        return str(function.qualified_name)
    return builtin_name(function) or str(function.__qualname__)
