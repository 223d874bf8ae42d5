"""A warning where gradients are lost: a tensor that requires grad is sent without a context.

It arrives as a leaf, so no gradients flow back, which would go unnoticed. The warning is issued
once for each calling line, or for each function that returns such a result.
"""

from __future__ import annotations

import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import torch

from .._wire.functions import resolve
from ..errors import LostGradientWarning

_OURS = str(Path(__file__).parents[1])
_TORCH = str(Path(torch.__file__).parent)
_REMEDY = (
    "make the call in `with gradwire.context() as ctx:`, and run `gradwire.backward(ctx, [loss])`; "
    "or, if you want none, use torch.no_grad() or detach()"
)
_IN_THREADS = (
    ". There are contexts in other threads: give them to one that is started with "
    "Thread(target=contextvars.copy_context().run, args=(work,))"
)


class LostGradients:
    """What one worker has warned of."""

    def __init__(self) -> None:
        self._known: set[tuple[str, int]] = set()

    def in_arguments(self, *, are_contexts: bool) -> None:
        """The call that this thread is making has such arguments."""
        frame: Any = sys._getframe(1)
        # The user's line, not torch's own that calls each module's forward.
        while frame and frame.f_code.co_filename.startswith((_OURS, _TORCH)):
            frame = frame.f_back
        if frame is None or frame.f_code.co_filename == threading.__file__:
            return  # a call of our own
        self._warn(
            "an argument that requires grad",
            frame.f_code.co_filename,
            frame.f_lineno,
            frame.f_globals.get("__name__"),
            _IN_THREADS if are_contexts else "",
        )

    def in_result(self, function: Any) -> None:
        """The result of this function, or of the one with this name, is such a tensor."""
        if isinstance(function, str):
            function = resolve(function)
        code = getattr(function, "__code__", None)
        if code is not None and not code.co_filename.startswith(_OURS):
            self._warn(
                f"the result of {function.__qualname__}, which requires grad,",
                code.co_filename,
                code.co_firstlineno,
                function.__module__,
                "",
            )

    def _warn(
        self, what: str, path: str, line: int, module: str | None, more: str
    ) -> None:
        if (path, line) in self._known:
            return
        self._known.add((path, line))
        text = (
            f"{what} is sent to another worker while no context is active: no gradients will "
            f"flow back; {_REMEDY}{more}; see LostGradientWarning in docs/errors.md"
        )
        warnings.warn_explicit(text, LostGradientWarning, path, line, module)
