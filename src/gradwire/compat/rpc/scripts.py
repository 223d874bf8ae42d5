"""What torch runs without Python: its operators, and scripted functions."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch


def builtin_name(function: Any) -> str | None:
    """The name of an operator, such as `aten::add`; None if it is none."""
    name: str | None = torch.jit._builtins._find_builtin(function)
    return name


def is_scripted(function: Any) -> bool:
    return isinstance(function, torch.jit.ScriptFunction)


def check_arguments(function: Any, args: Any, kwargs: Any) -> None:
    """See that a scripted function takes these arguments, before they are sent.

    Raises:
        RuntimeError: it does not, in TorchScript's own words.
    """
    args = args or ()
    if not kwargs and all(isinstance(value, torch.Tensor) for value in args):
        takes, needs = _signature(function)
        if needs <= len(args) <= len(takes) and all(takes[: len(args)]):
            return
    from ..._script.calls import packer

    packer(function)(*args, **(kwargs or {}))


@lru_cache(maxsize=4096)
def _signature(function: Any) -> tuple[tuple[bool, ...], int]:
    """By parameter, whether it is a tensor; and how many have to be given."""
    parameters = function.schema.arguments
    takes = tuple(str(parameter.type) == "Tensor" for parameter in parameters)
    needs = sum(not parameter.has_default_value() for parameter in parameters)
    return takes, needs


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
