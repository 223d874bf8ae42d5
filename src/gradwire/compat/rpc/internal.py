"""Names that torch's RPC keeps for itself, and that programs use all the same."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

import torch

from ... import api as gradwire_api
from ..._wire.pickling import PickleSerializer


class RPCExecMode(Enum):
    """The ways to call a function."""

    SYNC = "sync"
    ASYNC = "async"
    ASYNC_JIT = "async_jit"
    REMOTE = "remote"


class PythonUDF(NamedTuple):
    """A function to be called, with its arguments."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class RemoteException(NamedTuple):
    """How torch puts an exception into a message. Gradwire has its own way."""

    msg: str
    exception_type: type[BaseException]


class _InternalRPCPickler:
    """Objects as bytes, with their tensors beside them. Programs derive their own from it."""

    def _register_reducer(
        self, obj_class: type, reducer: Callable[[Any], tuple[Any, ...]]
    ) -> None:
        gradwire_api.register_reducer(obj_class, reducer)

    def serialize(self, obj: Any) -> tuple[bytes, list[torch.Tensor]]:
        tensors: list[torch.Tensor] = []
        return _serializer().dumps(obj, tensors), tensors

    def deserialize(self, binary_data: bytes, tensor_table: list[torch.Tensor]) -> Any:
        return _serializer().loads(binary_data, tensor_table)


def _serializer() -> PickleSerializer:
    return PickleSerializer({}, same_main=True)


_internal_rpc_pickler = _InternalRPCPickler()


def serialize(obj: Any) -> tuple[bytes, list[torch.Tensor]]:
    return _internal_rpc_pickler.serialize(obj)


def deserialize(binary_data: bytes, tensor_table: list[torch.Tensor]) -> Any:
    return _internal_rpc_pickler.deserialize(binary_data, tensor_table)


def run_pickled(binary_data: bytes, tensors: list[torch.Tensor]) -> Any:
    """Run a call that a program's own pickler has packed."""
    call = deserialize(binary_data, tensors)
    return call.func(*call.args, **call.kwargs)


def _build_rpc_profiling_key(
    exec_type: RPCExecMode,
    func_name: str,
    current_worker_name: str,
    dst_worker_name: str,
) -> str:
    """The name under which profiles show a call."""
    return (
        f"rpc_{exec_type.value}#{func_name}({current_worker_name} -> {dst_worker_name})"
    )
