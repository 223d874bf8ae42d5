"""`torch.distributed.rpc._testing`: importing it adds the backend with faults."""

from __future__ import annotations

from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from .. import backend_registry
from ..faults import FaultyTensorPipeAgent, FaultyTensorPipeRpcBackendOptions


def is_available() -> bool:
    return True


def _construct_options(
    rpc_timeout: float, init_method: str, **options: Any
) -> FaultyTensorPipeRpcBackendOptions:
    return FaultyTensorPipeRpcBackendOptions(
        rpc_timeout=rpc_timeout, init_method=init_method, **options
    )


def _init_backend(
    store: Store,
    name: str,
    rank: int,
    world_size: int | None,
    rpc_backend_options: Any,
) -> FaultyTensorPipeAgent:
    if not isinstance(rpc_backend_options, FaultyTensorPipeRpcBackendOptions):
        raise TypeError(
            "`rpc_backend_options` must be a `FaultyTensorPipeRpcBackendOptions`. "
            f"{rpc_backend_options}"
        )
    return FaultyTensorPipeAgent(store, name, rank, world_size, rpc_backend_options)


backend_registry.register_backend(
    "FAULTY_TENSORPIPE", _construct_options, _init_backend
)
