"""Marks on functions that say how they are to be run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_MARK = (
    "_wrapped_async_rpc_function"  # the attribute torch uses: its functions work too
)


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


def is_async_execution(func: Any) -> bool:
    return hasattr(func, _MARK)
