"""Calls between workers: the names and signatures of `torch.distributed.rpc`.

The layer's own modules are beside this file. What users see comes from `gradwire.api`, looked up
on first use, because that stands above this layer.
"""

from __future__ import annotations

import typing

if typing.TYPE_CHECKING:
    from ..api import (
        all_gather,
        barrier,
        debug_info,
        get_worker_info,
        get_worker_infos,
        init_rpc,
        on_join,
        on_leave,
        register_reducer,
        remote,
        rpc_async,
        rpc_sync,
        shutdown,
        statistics,
    )
    from ..ids import WorkerInfo
    from ..rref.reference import RRef
    from . import functions

__all__ = [
    "RRef",
    "WorkerInfo",
    "all_gather",
    "barrier",
    "debug_info",
    "functions",
    "get_worker_info",
    "get_worker_infos",
    "init_rpc",
    "on_join",
    "on_leave",
    "register_reducer",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
    "statistics",
]


def __getattr__(name: str) -> typing.Any:
    import importlib

    if name == "functions":
        return importlib.import_module(".functions", __name__)
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    elsewhere = {"WorkerInfo": "..ids", "RRef": "..rref.reference"}
    module = importlib.import_module(elsewhere.get(name, "..api"), __name__)
    found = getattr(module, name)
    globals()[name] = found  # to look it up takes a tenth of a small call
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
