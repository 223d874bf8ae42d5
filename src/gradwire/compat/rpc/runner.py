"""Runs what other workers ask for, as torch does: with its errors, and what it prints."""

from __future__ import annotations

import copy
import sys
import traceback
from typing import Any

import torch

from ..._rpc.function_runner import Runner, is_async_execution
from ..._wire.messages import Call
from ...api import current_worker
from .. import state
from . import profiling
from .scripts import builtin_name, is_scripted, shared
from .workers import known

_START = 60.0  # seconds for `init_rpc` to come to its end here, when others are ahead


class TorchRunner(Runner):
    """Runs calls on this worker."""

    _is_ready = False

    def find(self, function: Any, sender: int) -> Any:
        if not self._is_ready:
            self._is_ready = state.started.wait(_START)
        try:
            return _prepared(super().find(function, sender))
        except LookupError as error:
            raise RuntimeError(
                f"{error}. Default RPC pickler does not serialize function code. "
                "Ensure that UDFs are defined on both caller and callee modules."
            ) from error

    def _find_method(self, value: Any, method: str, sender: int) -> Any:
        return _prepared(super()._find_method(value, method, sender))

    def returned(self, function: Any, call: Call, value: Any) -> Any:
        value = super().returned(function, call, value)
        scripted = profiling.unwrapped(function)
        if is_scripted(scripted):
            return shared(scripted, value)
        if isinstance(value, torch.Future):
            raise RuntimeError("Can not pickle torch.futures.Future")
        return value

    def raised(self, function: Any, error: Exception) -> None:
        _tell(error)
        _check_copy(error)
        if isinstance(error, torch.jit.Error):  # which cannot be sent
            raise RuntimeError(str(error)) from error
        if type(error) is TypeError and builtin_name(profiling.unwrapped(function)):
            raise RuntimeError(
                "Overloaded torch operator invoked from Python failed to match any "
                f"schema: {error}"
            ) from error


class _Asynchronous:
    """A function that has to return a future."""

    _wrapped_async_rpc_function = True

    def __init__(self, function: Any) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        value = self._function(*args, **kwargs)
        if not isinstance(value, torch.Future):
            if is_scripted(self._function._wrapped_async_rpc_function):
                raise RuntimeError(
                    "Async functions must return an IValue of Future type, but got "
                    f"{type(value).__name__}"
                )
            raise RuntimeError(
                "Functions decorated with @rpc.async_function must return a "
                f"torch.futures.Future object, but got {type(value)}"
            )
        return value


def _prepared(function: Any) -> Any:
    if is_async_execution(function):
        function = _Asynchronous(function)
    return profiling.for_this_process(function)


def _check_copy(error: Exception) -> None:
    """Raises what torch does in place of an error that cannot be recreated at the caller."""
    try:
        copy.copy(error)
    except Exception as why:  # noqa: BLE001 user code
        raise RuntimeError(
            f"Failed to create original exception type. Error msg was {why}. Original "
            f"exception on remote side was {error!r}"
        ) from error


def _tell(error: Exception) -> None:
    """On standard error, where torch's users look."""
    who = known(current_worker().info)
    trace = "".join(traceback.format_exception(error))
    print(f"On {who}:\n{error!r}\n{trace}", file=sys.stderr)  # noqa: T201
