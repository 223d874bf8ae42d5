"""Distributed autograd: the names and signatures of `torch.distributed.autograd`, and more.

The layer's own modules are beside this file. What users see comes from `gradwire.api`, looked up
on first use, because that stands above this layer.
"""

from __future__ import annotations

import typing

if typing.TYPE_CHECKING:
    from ..api import backward, context, get_gradients, grad

__all__ = ["backward", "context", "get_gradients", "grad"]


def __getattr__(name: str) -> typing.Any:
    import importlib

    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module("..api", __name__), name)
    globals()[name] = found  # to look it up takes longer than to begin a context
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
