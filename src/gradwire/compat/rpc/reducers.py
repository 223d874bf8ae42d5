"""How things travel that only programs for torch's RPC send: what is scripted, and futures."""

from __future__ import annotations

import io
from typing import Any, NoReturn

import torch
from torch.jit import RecursiveScriptModule  # type: ignore[attr-defined]

from ... import api as gradwire_api
from ..._rpc.futures import CallFuture, Future
from ..._wire.functions import Names, resolve

_names = Names()


def register() -> None:
    """Have the workers of this process send them so."""
    gradwire_api.register_reducer(torch.jit.ScriptFunction, _by_name)
    gradwire_api.register_reducer(RecursiveScriptModule, _saved)
    for kind in (torch.futures.Future, Future, CallFuture):
        gradwire_api.register_reducer(kind, _refuse)


def _by_name(function: Any) -> tuple[Any, ...]:
    name = _names.name_of(function, same_main=True)
    if name is None:
        raise TypeError(
            f"{function.qualified_name} cannot be sent: a scripted function has to be found in "
            "a module under its own name"
        )
    return resolve, (name,)


def _saved(module: Any) -> tuple[Any, ...]:
    file = io.BytesIO()
    torch.jit.save(module, file)
    return _load, (file.getvalue(),)


def _load(data: bytes) -> Any:
    return torch.jit.load(io.BytesIO(data))


def _refuse(future: Any) -> NoReturn:
    raise RuntimeError("Can not pickle torch.futures.Future")
