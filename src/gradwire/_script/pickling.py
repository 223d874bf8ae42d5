"""How what is scripted travels, where it is an argument, a result or a function without a name."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch.jit import RecursiveScriptModule  # type: ignore[attr-defined]

from ..api import register_reducer
from .targets import find_here


def register() -> None:
    """Have the workers of this process send it so. Idempotent."""
    register_reducer(torch.jit.ScriptFunction, _by_name)
    register_reducer(RecursiveScriptModule, _saved)
    register_reducer(torch._C.ScriptList, lambda values: (list, (list(values),)))
    register_reducer(torch._C.ScriptDict, _as_dict)


def _by_name(function: Any) -> tuple[Any, ...]:
    """By its name in TorchScript, if its module does not have it under its own."""
    return find_here, (function.qualified_name,)


def _saved(module: Any) -> tuple[Any, ...]:
    if hasattr(module, "module_rref"):
        raise RuntimeError(
            "Passing a script RemoteModule over RPC is not supported. Please create a "
            "RemoteModule in the sender, send the `module_rref` to the receiver, and create a "
            "new instance on the receiver end by passing this `module_rref`."
        )
    file = io.BytesIO()
    torch.jit.save(module, file)
    return _load, (file.getvalue(),)


def _load(data: bytes) -> Any:
    return torch.jit.load(io.BytesIO(data))


def _as_dict(values: Any) -> tuple[Any, ...]:
    return dict, ({key: values[key] for key in values},)
