"""The mark for functions that return a future."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def async_execution(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function like `fn`, which returns a future: the caller gets the future's value.

    Unlike `gradwire.rpc.functions.async_execution` it is another function than `fn`, as in torch:
    scripted functions cannot be marked.
    """

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    wrapper._wrapped_async_rpc_function = fn  # type: ignore[attr-defined]
    return wrapper
