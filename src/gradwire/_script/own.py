"""Gradwire's own functions in scripts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import api
from .._rref.reference import RRef
from .frontends import Frontend, Make


def _making(function: Any) -> Make:
    def make(to: Any, target: Any, args: Any, kwargs: Any, timeout: float) -> Any:
        return function(to, target, args, kwargs, None if timeout < 0 else timeout)

    return make


_functions: dict[str, Callable[..., Any]] = {
    "rpc_sync": api.rpc_sync,
    "rpc_async": api.rpc_async,
    "remote": api.remote,
}

OWN = Frontend(
    name="gradwire",
    functions=_functions,
    make={way: _making(function) for way, function in _functions.items()},
    reference=RRef,
    operators={
        "gradwire::dist_backward": api.backward,
        "gradwire::get_gradients": api.get_gradients,
    },
)
