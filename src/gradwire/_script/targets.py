"""Which scripted function a scripted call is for, and its arguments as that function takes them.

In a script a function is its qualified name, `__torch__.module.name`, as TorchScript has it. Calls
carry the function itself, which the wire layer names in its own way.

Private torch names, and what breaks without them: `torch.jit._state`, the compilation unit of all
that Python has scripted. Without it no function or interface could be found by its name.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch.jit import _state

PYTHON = "python:"
"""Before the names of functions that nobody has scripted."""

_found: dict[str, Any] = {}


def find(name: str) -> Any:
    """The scripted function of this name.

    Raises:
        RuntimeError: there is none, here or under that name in its module.
    """
    function = _found.get(name)
    if function is None:
        function = _found[name] = _look_up(name)
    return function


def find_here(name: str) -> Any:
    """The scripted function of this name, for a worker that was sent the name."""
    function = _state._python_cu.find_function(name)
    if function is None:
        in_module(name)  # imports it, and with it what is scripted there
        function = _state._python_cu.find_function(name)
    if function is None:
        raise undefined(name, "it is not scripted on the worker that was called")
    return function


def _look_up(name: str) -> Any:
    if name.startswith(PYTHON):
        raise undefined(
            name.removeprefix(PYTHON),
            "it is a Python function. Scripts can call scripted functions only: "
            "decorate it with @torch.jit.script",
        )
    named = in_module(name)  # the very object, which other workers find in the same way
    if isinstance(named, torch.jit.ScriptFunction) and named.qualified_name == name:
        return named
    function: Any = _state._python_cu.find_function(name)
    if function is None:
        raise undefined(name, "nothing of that name is scripted here")
    return function


def in_module(name: str) -> Any:
    """The attribute that a qualified name refers to, in its module; None if there is none."""
    module, _, attribute = name.rpartition(".")
    title = module.removeprefix("__torch__").lstrip(".") or "__main__"
    try:
        return getattr(importlib.import_module(title), attribute, None)
    except (ImportError, ValueError):
        return None


def interface(name: str) -> Any:
    """The type of the interface of this name, which is scripted in this process."""
    return _state._python_cu.get_interface(name)


def undefined(name: str, why: str) -> RuntimeError:
    short = name.rpartition(".")[2]
    return RuntimeError(f"attempted to get undefined function {short}: {why}")


def arguments(function: Any, args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]]:
    """What to call a function with.

    `args` has all parameters, with defaults where the script gives none; what a script has put
    into a dict, whose keys the compiler cannot know, takes the place of those.

    Raises:
        RuntimeError: there is no such parameter.
    """
    args = args or ()
    if not kwargs:
        return args, {}
    names = [argument.name for argument in function.schema.arguments]
    for name in kwargs:
        if name not in names:
            raise RuntimeError(
                f"Unknown keyword argument '{name}' for {function.name}(), "
                f"which takes {', '.join(names) or 'none'}"
            )
    return (), {**dict(zip(names, args, strict=False)), **kwargs}
