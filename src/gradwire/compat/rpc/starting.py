"""How a process joins a world: `init_rpc`, and the backend behind it."""

from __future__ import annotations

import logging
import os
import threading
from numbers import Integral
from typing import Any
from urllib.parse import urlparse

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import _create_store_from_options, rendezvous

from ..._transport.stores import find_place, make_private
from ...options import Options
from .. import autograd
from . import api, backend_registry, constants
from .agents import TensorPipeAgent
from .backend_registry import BackendType
from .options import RpcBackendOptions, TensorPipeRpcBackendOptions

logger = logging.getLogger("gradwire.compat")

_counter_lock = threading.Lock()
_counter = 0
_rendezvous: Any = None  # holds the store that others may still need


def init_rpc(
    name: str,
    backend: BackendType | None = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: Any = None,
) -> None:
    """Join a world as worker `name`."""
    if backend is not None and not isinstance(backend, backend_registry.BackendType):
        raise TypeError("Argument backend must be a member of BackendType")
    if rpc_backend_options is not None and not isinstance(
        rpc_backend_options, RpcBackendOptions
    ):
        raise TypeError(
            "Argument rpc_backend_options must be an instance of RpcBackendOptions"
        )
    if backend is None:
        backend = _infer_backend(rpc_backend_options)
    if rpc_backend_options is None:
        rpc_backend_options = backend_registry.construct_rpc_backend_options(backend)
    store = _store(rpc_backend_options, rank, world_size)
    autograd._init(rank)
    _init_rpc_backend(backend, store, name, rank, world_size, rpc_backend_options)


def _infer_backend(options: RpcBackendOptions | None) -> BackendType:
    if options is None:
        return BackendType.TENSORPIPE  # type: ignore[no-any-return]
    for candidate in BackendType:
        made = backend_registry.construct_rpc_backend_options(candidate)
        if isinstance(options, type(made)):
            return candidate  # type: ignore[no-any-return]
    raise TypeError(f"Could not infer backend for options {options}")


def _store(options: RpcBackendOptions, rank: int, world_size: int | None) -> Store:
    """Where the workers of this world meet; worlds of one store are told apart by a count."""
    global _counter, _rendezvous
    url = urlparse(options.init_method)
    if url.scheme == "file" and url.path:
        make_private(url.path)  # torch opens it, and removes it in the end
    # torchrun's agent may host the store, and torch has an error for a rank that is missing.
    is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if url.scheme == "tcp" and rank != -1 and not is_agents:
        _rendezvous = store = _tcp_store(options.init_method, rank, world_size)
    elif world_size:
        _rendezvous = rendezvous(options.init_method, rank=rank, world_size=world_size)
        store, _, _ = next(_rendezvous)
    else:
        create: Any = _create_store_from_options
        store = create(options, rank)
    with _counter_lock:
        number, _counter = _counter, _counter + 1
    return PrefixStore(f"rpc_prefix_{number}", store)


def _tcp_store(method: str, rank: int, world_size: int | None) -> Store:
    """As torch's, but it listens on the address asked for."""
    patience = Options().join_timeout
    size = world_size or None
    place = find_place(method, None, rank, size, patience, multi_tenant=True)
    return place.store


def _init_rpc_backend(
    backend: Any = None,
    store: Store | None = None,
    name: str | None = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
) -> None:
    backend = backend or BackendType.TENSORPIPE
    expected: list[tuple[Any, Any]] = [
        (backend, backend_registry.BackendType),
        (store, Store),
        (name, str),
        (rank, Integral),
        (world_size, (Integral, type(None))),
        (rpc_backend_options, RpcBackendOptions),
    ]
    for value, kind in expected:
        if not isinstance(value, kind):
            raise RuntimeError(
                f"Argument {value} must be of type {kind} but got type {type(value)}"
            )
    if api._is_current_rpc_agent_set():
        raise RuntimeError("RPC is already initialized")
    agent = backend_registry.init_backend(
        backend,
        store=store,
        name=name,
        rank=rank,
        world_size=world_size,
        rpc_backend_options=rpc_backend_options,
    )
    api._init_rpc_states(agent)


def _construct_options(
    rpc_timeout: float,
    init_method: str,
    num_worker_threads: int = constants.DEFAULT_NUM_WORKER_THREADS,
    _transports: Any = None,
    _channels: Any = None,
    **_: Any,
) -> TensorPipeRpcBackendOptions:
    return TensorPipeRpcBackendOptions(
        rpc_timeout=rpc_timeout,
        init_method=init_method,
        num_worker_threads=num_worker_threads,
    )


def _init_tensorpipe(
    store: Store,
    name: str,
    rank: int,
    world_size: int | None,
    rpc_backend_options: RpcBackendOptions,
) -> TensorPipeAgent:
    if not isinstance(rpc_backend_options, TensorPipeRpcBackendOptions):
        raise TypeError(
            "`rpc_backend_options` must be a `TensorPipeRpcBackendOptions`. "
            f"{rpc_backend_options}"
        )
    agent = TensorPipeAgent(store, name, rank, world_size, rpc_backend_options)
    api._init_rpc_states(agent)
    if agent.is_static_group:
        agent.worker.barrier(0)  # nobody continues before all have arrived
    return agent


backend_registry.register_backend("TENSORPIPE", _construct_options, _init_tensorpipe)
