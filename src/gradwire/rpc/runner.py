"""Runs what other workers ask for: finds the function, applies the caller's modes, calls it."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

from ..wire.functions import describe, resolve
from ..wire.messages import Call
from . import modes
from .allow import AllowList
from .functions import is_async_execution
from .futures import Loops


class Later:
    """A result that is not there yet."""

    __slots__ = ("future",)

    def __init__(self, future: torch.futures.Future[Any]) -> None:
        self.future = future


class Runner:
    """Runs calls on this worker."""

    def __init__(
        self, allow: AllowList | None, host: Callable[[Callable[[], object]], None]
    ) -> None:
        self._allow = allow
        self._loops = Loops(host)

    def run(self, call: Call) -> Any:
        """What the function returns; `Later` if it is asynchronous.

        Raises:
            Exception: what it raises.
            NotAllowedError: it is not on the allow-list.
            LookupError: there is no such function here.
        """
        function = self._find(call.function)
        if call.modes is None:
            value = function(*call.args, **call.kwargs)
        else:
            with modes.applied(call.modes):
                value = function(*call.args, **call.kwargs)
        if type(value) is types.CoroutineType:
            return Later(self._loops.run(value))
        if is_async_execution(function):
            if not isinstance(value, torch.futures.Future):
                raise TypeError(
                    f"{describe(function)} is marked async_execution and must return a "
                    f"torch.futures.Future, but returned {type(value).__qualname__}"
                )
            return Later(value)
        return value

    def close(self) -> None:
        self._loops.close()

    def _find(self, function: Any) -> Callable[..., Any]:
        if not isinstance(function, str):
            return function  # type: ignore[no-any-return]
        if self._allow is None:
            return resolve(function)  # type: ignore[no-any-return]
        self._allow.check(function)
        found = resolve(function)
        self._allow.check_resolved(function, found)
        return found  # type: ignore[no-any-return]
