"""A remote value as if it were here: attribute calls, and calls of the object itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ..tracebacks import hide_frames
from ..uncompiled import uncompiled

Invoke = Callable[[Any, str, Any, Any, "float | None"], Any]


class Proxy:
    """Calls methods of a value in one of the three ways."""

    __slots__ = ("_core", "_invoke", "_timeout")

    def __init__(self, invoke: Invoke, core: Any, timeout: float | None) -> None:
        self._invoke = invoke
        self._core = core
        self._timeout = timeout

    def __repr__(self) -> str:
        return f"<Proxy of {self._core!r}>"

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._call, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call("__call__", *args, **kwargs)

    @uncompiled
    def _call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._invoke(self._core, method, args, kwargs, self._timeout)
        except Exception as error:
            hide_frames(error)
            raise
