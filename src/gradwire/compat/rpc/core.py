"""`torch._C._distributed_rpc`, the C++ half of torch's RPC, with Gradwire behind it.

Programs look into it for classes (`isinstance(value, PyRRef)`) and for whether there is an agent.
What is there for torch's own Python half alone is an `Absent`: it can be imported, and its use is
an error that names it.
"""

from __future__ import annotations

from typing import Any, NoReturn

from . import (
    _disable_jit_rref_pickle,
    _enable_jit_rref_pickle,
    _rref_context_get_debug_info,
    constants,
    enable_gil_profiling,
)
from .agents import RpcAgent, TensorPipeAgent
from .api import (
    RRef,
    _delete_all_user_and_unforked_owner_rrefs,
    _destroy_rref_context,
    _get_current_rpc_agent,
    _is_current_rpc_agent_set,
    _reset_current_rpc_agent,
    _set_and_start_rpc_agent,
    _set_rpc_timeout,
    get_rpc_timeout,
)
from .options import RpcBackendOptions, TensorPipeRpcBackendOptions
from .workers import WorkerInfo

NAME = "torch._C._distributed_rpc"

PyRRef = RRef
_TensorPipeRpcBackendOptionsBase = TensorPipeRpcBackendOptions
_UNSET_RPC_TIMEOUT = constants.UNSET_RPC_TIMEOUT
_DEFAULT_RPC_TIMEOUT_SEC = constants.DEFAULT_RPC_TIMEOUT_SEC
_DEFAULT_INIT_METHOD = constants.DEFAULT_INIT_METHOD
_DEFAULT_NUM_WORKER_THREADS = constants.DEFAULT_NUM_WORKER_THREADS

__all__ = [
    "NAME",
    "Absent",
    "PyRRef",
    "RemoteProfilerManager",
    "RpcAgent",
    "RpcBackendOptions",
    "TensorPipeAgent",
    "WorkerInfo",
    "_DEFAULT_INIT_METHOD",
    "_DEFAULT_NUM_WORKER_THREADS",
    "_DEFAULT_RPC_TIMEOUT_SEC",
    "_TensorPipeRpcBackendOptionsBase",
    "_UNSET_RPC_TIMEOUT",
    "_cleanup_python_rpc_handler",
    "_delete_all_user_and_unforked_owner_rrefs",
    "_destroy_rref_context",
    "_disable_jit_rref_pickle",
    "_disable_server_process_global_profiler",
    "_enable_jit_rref_pickle",
    "_enable_server_process_global_profiler",
    "_get_current_rpc_agent",
    "_invoke_remote_builtin",
    "_invoke_remote_python_udf",
    "_invoke_remote_torchscript",
    "_invoke_rpc_builtin",
    "_invoke_rpc_python_udf",
    "_invoke_rpc_torchscript",
    "_is_current_rpc_agent_set",
    "_reset_current_rpc_agent",
    "_rref_context_get_debug_info",
    "_set_and_start_rpc_agent",
    "_set_profiler_node_id",
    "_set_rpc_timeout",
    "enable_gil_profiling",
    "get_rpc_timeout",
]


class Absent:
    """A name of torch's that has nothing behind it here."""

    def __init__(self, name: str, instead: str) -> None:
        self._why = f"{NAME}.{name} is not available in Gradwire: {instead}"

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(self._why)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(self._why)

    def __repr__(self) -> str:
        return f"<{self._why}>"


def _cleanup_python_rpc_handler() -> None:
    """Nothing to do: Gradwire keeps no handler between worlds."""


def _absent(name: str, instead: str) -> Any:
    return Absent(name, instead)


_PROFILER = "profile with torch.autograd.profiler_legacy.profile"
_SERVER = "use torch.distributed.rpc._server_process_global_profile"

RemoteProfilerManager = _absent("RemoteProfilerManager", _PROFILER)
_set_profiler_node_id = _absent("_set_profiler_node_id", _PROFILER)
_enable_server_process_global_profiler = _absent(
    "_enable_server_process_global_profiler", _SERVER
)
_disable_server_process_global_profiler = _absent(
    "_disable_server_process_global_profiler", _SERVER
)

_REMOTE = "call torch.distributed.rpc.remote"
_RPC = "call torch.distributed.rpc.rpc_sync or rpc_async"

_invoke_remote_builtin = _absent("_invoke_remote_builtin", _REMOTE)
_invoke_remote_python_udf = _absent("_invoke_remote_python_udf", _REMOTE)
_invoke_remote_torchscript = _absent("_invoke_remote_torchscript", _REMOTE)
_invoke_rpc_builtin = _absent("_invoke_rpc_builtin", _RPC)
_invoke_rpc_python_udf = _absent("_invoke_rpc_python_udf", _RPC)
_invoke_rpc_torchscript = _absent("_invoke_rpc_torchscript", _RPC)


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(
        f"{NAME}.{name} is not available: Gradwire replaces this "
        "module (docs/migrate.md lists what it has)"
    )
