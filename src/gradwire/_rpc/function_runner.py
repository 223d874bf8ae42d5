"""Runs what other workers request: resolves the function, applies the caller's modes, calls it."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch

from .._wire.functions import describe, resolve
from .._wire.messages import Call
from ..errors import NotAllowedError
from . import torch_modes
from .allow import AllowList
from .audit import NO_AUDIT
from .futures import Loops
from .serial import lock_of

F = TypeVar("F", bound=Callable[..., Any])

_MARK = "_wrapped_async_rpc_function"  # torch's own, so that its marks work as well


def async_execution(func: F) -> F:
    """Mark a function that returns a future: the caller gets the future's value.

    The thread that ran the function is free meanwhile. `async def` functions need no mark.

    >>> @async_execution
    ... def add_later(x, y):
    ...     future = torch.futures.Future()
    ...     threading.Timer(0.01, lambda: future.set_result(x + y)).start()
    ...     return future
    """
    inner = func.__func__ if isinstance(func, (staticmethod, classmethod)) else func
    setattr(inner, _MARK, inner)
    return func


def is_async_execution(func: object) -> bool:
    return hasattr(func, _MARK)


class Later:
    """A result that is still pending. `begin` is called once a callback is registered."""

    __slots__ = ("begin", "future")

    def __init__(
        self, future: torch.Future[Any], begin: Callable[[], None] | None = None
    ) -> None:
        self.future = future
        self.begin = begin


class Runner:
    """Runs calls on this worker."""

    def __init__(
        self, allow: AllowList | None, host: Callable[[Callable[[], object]], None]
    ) -> None:
        self._allow = allow
        self.audit = NO_AUDIT
        self.name_of: Callable[[int], str] = str
        """The name of a worker."""
        self._loops = Loops(host)
        self.waiting: Callable[[], AbstractContextManager[None]] = nullcontext
        """Around a wait: the thread does not count meanwhile."""

    def run(self, sender: int, call: Call) -> Any:
        """Run the function of a call; returns its result, or `Later` if it is asynchronous.

        Raises:
            Exception: what it raises.
            NotAllowedError: it is not on the allow-list.
            LookupError: there is no such function here.
        """
        return self.run_function(self.find(call.function, sender), call)

    def run_method(self, value: Any, call: Call, sender: int) -> Any:
        """Run the method of an object that a call names.

        Raises:
            AttributeError: there is none.
        """
        method = self._find_method(value, call.function, sender)
        lock = lock_of(value)
        if lock is None:
            return self.run_function(method, call)
        lock.acquire(self.waiting)
        result = None
        try:
            result = self.run_function(method, call)
        finally:
            if type(result) is not Later:
                lock.release()
        if type(result) is Later:
            result.future.add_done_callback(lambda _: lock.release())
        return result

    def run_function(self, function: Any, call: Call) -> Any:
        """Run a function with the arguments of a call, in the caller's modes.

        The frame right below the user's: anomaly mode formats all of them at each operation.
        """
        try:
            if call.modes is None:
                value = function(*call.args, **call.kwargs)
            else:
                with torch_modes.applied(call.modes):
                    value = function(*call.args, **call.kwargs)
            return self.returned(function, call, value)
        except Exception as error:
            self.raised(function, error)
            raise

    def find(self, function: Any, sender: int) -> Any:
        """The function of a call, looked up if it was sent by name."""
        if self._allow is None and self.audit is NO_AUDIT:
            return resolve(function) if type(function) is str else function
        with self._checked(function, sender) as caller:
            if self._allow is not None:
                self._allow.check(function, caller)
            found = resolve(function) if type(function) is str else function
            if self._allow is not None:
                self._allow.check_resolved(function, found, caller)
        return found

    def _find_method(self, value: Any, method: str, sender: int) -> Any:
        if self._allow is None and self.audit is NO_AUDIT:
            return getattr(value, method)
        kind = type(value)
        name = f"{kind.__module__}:{kind.__qualname__}.{method}"
        with self._checked(name, sender) as caller:
            if self._allow is not None:
                self._allow.check(name, caller)
            function = getattr(value, method)
            if self._allow is not None:
                self._allow.check_resolved(name, function, caller)
        return function

    @contextmanager
    def _checked(self, function: Any, sender: int) -> Iterator[str]:
        """Check and log who calls what; returns the caller's name."""
        caller = self.name_of(sender)
        name = function if isinstance(function, str) else describe(function)
        try:
            yield caller
        except NotAllowedError as error:
            self.audit.write("refuse", by=caller, function=name, reason=str(error))
            raise
        self.audit.write("call", by=caller, function=name)

    def returned(self, function: Any, call: Call, value: Any) -> Any:
        """Convert what a function returned into what is sent."""
        if type(value) is types.CoroutineType:
            steps = (
                value if call.modes is None else torch_modes.carried(value, call.modes)
            )
            return Later(self._loops.run(steps))
        if hasattr(function, _MARK):
            if not isinstance(value, torch.Future):  # what `then` returns is no more
                raise TypeError(
                    f"{describe(function)} is marked async_execution and must return a "
                    f"torch.futures.Future, but returned {type(value).__qualname__}"
                )
            return Later(value)
        return value

    def raised(self, function: Any, error: Exception) -> None:
        """A hook for exceptions of functions: raise another one to replace them."""

    def close(self) -> None:
        self._loops.close()
