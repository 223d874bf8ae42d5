"""Calls between workers: the names and signatures of `torch.distributed.rpc`, and more."""

from .._rref.reference import RRef
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
