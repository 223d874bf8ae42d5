"""A worker of Gradwire, seen as the agent that torch's RPC has in each process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from ... import api as gradwire_api
from ..._rref.reference import RRef as _RRef
from ..._transport.base import Transport
from ..._transport.stores import find_place
from ...errors import GradwireError, WorkerLostError
from ...ids import WorkerInfo as _WorkerInfo
from ...options import Options
from ...threads import Executor
from ...worker import Kinds, Worker, open_worker
from . import constants, profiling, reducers
from .errors import RpcTimeout
from .internal import RPCExecMode
from .options import TensorPipeRpcBackendOptions
from .references import RRef
from .runner import TorchRunner
from .workers import WorkerInfo, known

KINDS = Kinds(
    reference=RRef,
    runner=TorchRunner,
    timeout=RpcTimeout,
    keep_gaps=True,
    no_map=(
        "TensorPipe RPC backend only supports CPU tensors by default, please move your "
        "tensors to CPU before sending them over RPC, or call `set_device_map` on "
        "`TensorPipeRpcBackendOptions` to explicitly configure device mapping."
    ),
    warns=False,  # as torch
)

Around = Callable[[Transport, Executor], Transport]


class RpcAgent:
    """The base class of all agents, as in torch."""


class TensorPipeAgent(RpcAgent):
    """One worker in this process."""

    def __init__(
        self,
        store: Store,
        name: str,
        rank: int,
        world_size: int | None,
        options: TensorPipeRpcBackendOptions,
        around: Around | None = None,
    ) -> None:
        self.store = store
        self.rpc_timeout = options.rpc_timeout
        self.is_static_group = bool(world_size)
        self.profiles_gil = False
        self._options = options
        self.numbers: Iterator[int] = itertools.count()
        """For the names of references."""
        WorkerInfo(name, rank)  # torch's check of the name
        _check_kind(store, self.is_static_group)
        self.worker = self._open(name, rank, world_size, around)
        self._infos: dict[Any, WorkerInfo] = {}
        reducers.register()
        gradwire_api.adopt(self.worker)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.worker!r}>"

    def _open(
        self, name: str, rank: int, world_size: int | None, around: Around | None
    ) -> Worker:
        settings = _settings(self._options)
        place = find_place(
            None, self.store, rank, world_size or None, settings.join_timeout
        )
        try:
            return open_worker(name, place, settings, gradwire_api.enter, KINDS, around)
        except (ValueError, GradwireError) as error:
            if "names must differ" in str(error) or "is taken by" in str(error):
                raise RuntimeError(
                    f"RPC worker name {name} is not unique: {error}"
                ) from error
            raise

    # Members

    def get_worker_info(self, worker: str | int | None = None) -> WorkerInfo:
        """Who a worker is; without a name or id, who this one is."""
        if worker is None:
            return known(self.worker.info)
        return self.find(worker)

    def get_worker_infos(self) -> list[WorkerInfo]:
        return [known(info) for info in self.worker.get_worker_infos()]

    def find(self, to: str | int | _WorkerInfo) -> WorkerInfo:
        """The worker that a program names.

        Raises:
            RuntimeError: there is none.
            ValueError: not a valid way to name a worker.
        """
        found = self._infos.get(to)
        if found is not None:
            return found
        if not isinstance(to, str | int | _WorkerInfo):
            raise ValueError(f"Cannot get WorkerInfo from name {to}")
        try:
            to = to if isinstance(to, str | int) else to.id
            info = known(self.worker.get_worker_info(to))
        except ValueError as error:
            kind = "name" if isinstance(to, str) else "id"
            me = self.worker
            raise RuntimeError(
                f"name:{me.name},rank:{me.id} could not find destination {kind} {to}: "
                f"{error}"
            ) from error
        self.worker.meet(info.id)  # before a call's time begins to count
        if self.is_static_group:
            self._infos[to] = info
        return info

    def _get_device_map(self, worker: _WorkerInfo) -> dict[torch.device, torch.device]:
        return self._options.device_maps.get(worker.name, {})

    # Calls

    def seconds(self, timeout: float | None) -> float:
        """How long a call may take; 0 for no limit."""
        return self.rpc_timeout if timeout is None or timeout < 0 else timeout

    def call_sync(
        self, to: Any, func: Any, args: Any, kwargs: Any, timeout: float
    ) -> Any:
        info = self.find(to)
        return self.worker.rpc_sync(info, func, args, kwargs, self.seconds(timeout))

    def call_async(
        self, to: Any, func: Any, args: Any, kwargs: Any, timeout: float
    ) -> torch.futures.Future[Any]:
        info, seconds = self.find(to), self.seconds(timeout)
        try:
            return self.worker.rpc_async(info, func, args, kwargs, seconds)
        except WorkerLostError as error:
            future: torch.futures.Future[Any] = torch.futures.Future()
            future.set_exception(error)
            return future

    def remote(self, to: Any, func: Any, args: Any, kwargs: Any, timeout: float) -> Any:
        info = self.find(to)
        rref = self.worker.remote(info, func, args, kwargs, self.seconds(timeout))
        assert isinstance(rref, RRef)
        rref.name_by(self.numbers)
        return rref

    def fetch(self, rref: RRef[Any], timeout: float | None) -> Any:
        """The value of a reference."""
        return self.worker.references.fetch(rref._core, self.seconds(timeout))

    def fetch_type(self, rref: RRef[Any], timeout: float | None, blocking: bool) -> Any:
        """The type of the value of a reference, or the future of it."""
        if profiling.is_on() and not rref.is_owner():
            what = rref.owner(), _rref_typeof_on_owner, (rref,), None
            future = profiling.call(self, RPCExecMode.ASYNC, what, timeout)
            return future.wait() if blocking else future
        return _RRef._get_type(rref, self.seconds(timeout), blocking)

    def invoke(
        self,
        rref: RRef[Any],
        mode: str,
        method: str,
        args: Any,
        kwargs: Any,
        timeout: float,
    ) -> Any:
        """Call a method of a value."""
        if profiling.is_on():
            what = rref.owner(), invoke_on_owner, (rref, method, args, kwargs), None
            if mode == "remote":
                return profiling.remote(self, what, timeout)
            future = profiling.call(self, RPCExecMode(mode), what, timeout)
            return future.wait() if mode == "sync" else future
        return rref.invoke(mode, method, args, kwargs, self.seconds(timeout))

    # Debug information

    def get_debug_info(self) -> dict[str, str]:
        worker = self.worker
        info = {
            "agent.thread_pool_size": self._options.num_worker_threads,
            "agent.num_idle_threads": self._options.num_worker_threads,
            "agent.client_active_calls": worker.debug_info()["calls_in_flight"],
            "agent.server_active_calls": 0,
            "agent.server_active_async_calls": 0,
        }
        if self.profiles_gil:
            info["agent.gil_average_wait_time_us"] = 0
        return {key: str(value) for key, value in info.items()}

    def rref_info(self) -> dict[str, str]:
        references = self.worker.references
        owned = references.owned_values.lent()
        pending = references.unconfirmed
        info = {
            "num_owner_rrefs": len(owned),
            "num_forks": sum(len(value["forks"]) for value in owned),
            "num_pending_users": pending,
            "num_pending_futures": pending,
        }
        return {key: str(value) for key, value in info.items()}

    # Shutdown

    def join(self, shutdown: bool = False, timeout: float = 0) -> None:
        """Wait until all workers are here and nothing is under way."""
        self.worker.join(timeout)

    def delete_references(self) -> None:
        """Let go of all references to values of others, also of those in use."""
        self.worker.references.let_go_of_all()

    def check_leaks(self, ignore: bool) -> None:
        """Raises a RuntimeError if others still hold values of this worker."""
        references = self.worker.references
        owned = references.lent or references.owned_values.lent()
        if owned and not ignore:
            named = ", ".join(
                f"RRef {value['value']} ({value['state']}, held by {value['forks']})"
                for value in owned
            )
            raise RuntimeError(f"Leaking RRef: {named}")

    def shutdown(self) -> None:
        gradwire_api.shutdown(graceful=False)


def _rref_typeof_on_owner(rref: RRef[Any]) -> type:
    return type(rref.local_value())


def invoke_on_owner(rref: RRef[Any], method: str, args: Any, kwargs: Any) -> Any:
    return getattr(rref.local_value(), method)(*args, **kwargs)


def _settings(options: TensorPipeRpcBackendOptions) -> Options:
    """Gradwire's own, where the program has said something."""
    said: dict[str, Any] = {"device_maps": options.device_maps}
    if options.num_worker_threads != constants.DEFAULT_NUM_WORKER_THREADS:
        said["threads"] = options.num_worker_threads
    return Options(timeout=options.rpc_timeout, **said)


def _check_kind(store: Store, is_static: bool) -> None:
    """All workers of a world say how large it is, or none does."""
    mine = "static" if is_static else "dynamic"
    found = PrefixStore("gradwire", store).compare_set("kind", "", mine).decode()
    if found != mine:
        raise RuntimeError(
            "RPC group mixes statically and dynamically initialized members which is not "
            "supported."
        )
