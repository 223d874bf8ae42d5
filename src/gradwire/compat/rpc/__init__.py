"""`torch.distributed.rpc`, with Gradwire behind it."""

from __future__ import annotations

import typing

from ..._script import pickled as _pickled
from .. import autograd as _autograd
from .. import state as _state
from . import api, backend_registry, constants, functions, internal, options
from .agents import RpcAgent, TensorPipeAgent
from .api import (
    AllGatherStates,
    RRef,
    _delete_all_user_and_unforked_owner_rrefs,
    _destroy_rref_context,
    _get_current_rpc_agent,
    _is_current_rpc_agent_set,
    _reset_current_rpc_agent,
    _set_and_start_rpc_agent,
    _set_rpc_timeout,
    _wait_all,
    get_rpc_timeout,
    get_worker_info,
    remote,
    rpc_async,
    rpc_sync,
    shutdown,
)
from .backend_registry import (
    BackendType,
    backend_registered,
    construct_rpc_backend_options,
    init_backend,
    register_backend,
)
from .options import RpcBackendOptions, TensorPipeRpcBackendOptions
from .profiling import ServerProfile as _server_process_global_profile
from .starting import _init_rpc_backend, init_rpc
from .workers import WorkerInfo

PyRRef = RRef
_UNSET_RPC_TIMEOUT = constants.UNSET_RPC_TIMEOUT
_DEFAULT_RPC_TIMEOUT_SEC = constants.DEFAULT_RPC_TIMEOUT_SEC
_DEFAULT_INIT_METHOD = constants.DEFAULT_INIT_METHOD
_DEFAULT_NUM_WORKER_THREADS = constants.DEFAULT_NUM_WORKER_THREADS
_is_tensorpipe_available = True

__all__ = [
    "AllGatherStates",
    "BackendType",
    "PyRRef",
    "RRef",
    "RpcAgent",
    "RpcBackendOptions",
    "TensorPipeAgent",
    "TensorPipeRpcBackendOptions",
    "WorkerInfo",
    "api",
    "backend_registered",
    "backend_registry",
    "constants",
    "construct_rpc_backend_options",
    "enable_gil_profiling",
    "functions",
    "get_rpc_timeout",
    "get_worker_info",
    "init_backend",
    "init_rpc",
    "internal",
    "is_available",
    "options",
    "register_backend",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]


def is_available() -> bool:
    return True


def enable_gil_profiling(flag: bool) -> None:
    """Have the agent's debug info tell how long calls waited for Python's lock."""
    _state.get().profiles_gil = flag


def _rref_context_get_debug_info() -> dict[str, str]:
    info: dict[str, str] = _state.get().rref_info()
    return info


def _enable_jit_rref_pickle() -> None:
    """Have references saved with scripted modules; each is kept for as long as its worker lives."""
    _pickled.allow(True)


def _disable_jit_rref_pickle() -> None:
    _pickled.allow(False)


@api._require_initialized
def _get_debug_info() -> dict[str, str | int]:
    agent: dict[str, str] = _state.get().get_debug_info()
    return {**_rref_context_get_debug_info(), **agent, **_autograd._get_debug_info()}


def __getattr__(name: str) -> typing.Any:
    raise AttributeError(
        f"torch.distributed.rpc.{name} is not available: Gradwire replaces this "
        "module (docs/migrate.md lists what it has)"
    )
