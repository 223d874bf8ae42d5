"""`torch.distributed.rpc.api`: calls, and the end of a world.

Programs put other functions in the place of some of these, and look at the module's variables; so
they are looked up here each time, by their names.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.jit import ScriptFunction

from ...uncompiled import uncompiled
from .. import state
from . import profiling
from .constants import DEFAULT_SHUTDOWN_TIMEOUT, UNSET_RPC_TIMEOUT
from .internal import PythonUDF, RPCExecMode, _internal_rpc_pickler, run_pickled
from .references import RRef
from .scripts import check_arguments
from .workers import WorkerInfo

__all__ = [
    "AllGatherStates",
    "RRef",
    "get_worker_info",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]

logger = logging.getLogger("gradwire.compat")

F = TypeVar("F", bound=Callable[..., Any])

_ignore_rref_leak = True
_default_pickler: Any = _internal_rpc_pickler
_thread_local_var = threading.local()
_UNSET = UNSET_RPC_TIMEOUT


def _is_current_rpc_agent_set() -> bool:
    return state.agent is not None


def _get_current_rpc_agent() -> Any:
    return state.get()


def _set_and_start_rpc_agent(agent: Any) -> None:
    state.put(agent)


def _reset_current_rpc_agent() -> None:
    state.put(None)


def get_rpc_timeout() -> float:
    """The timeout of calls that have none of their own."""
    return float(state.get().rpc_timeout)


def _set_rpc_timeout(timeout: float) -> None:
    state.get().rpc_timeout = float(timeout)


def _require_initialized(func: F) -> F:
    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if state.agent is None:
            raise _not_initialized()
        return func(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


def _not_initialized() -> RuntimeError:
    return RuntimeError(
        "RPC has not been initialized. Call torch.distributed.rpc.init_rpc first."
    )


@contextmanager
def _use_rpc_pickler(rpc_pickler: Any) -> Iterator[None]:
    """Have calls of Python functions packed by a pickler of the program's own."""
    global _default_pickler
    _default_pickler = rpc_pickler
    try:
        yield
    finally:
        _default_pickler = _internal_rpc_pickler


# Calls


@uncompiled
def rpc_sync(
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    args: Any = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = _UNSET,
) -> Any:
    """Call a function on a worker and wait for its result."""
    agent = state.agent
    if agent is None:
        raise _not_initialized()
    if type(func) is ScriptFunction:
        check_arguments(func, args, kwargs)
    elif _default_pickler is not _internal_rpc_pickler:
        func, args, kwargs = _packed(func, args, kwargs)
    if profiling.is_on():
        return profiling.call(
            agent, RPCExecMode.SYNC, (to, func, args, kwargs), timeout
        ).wait()
    return agent.call_sync(to, func, args, kwargs, timeout)


@uncompiled
def rpc_async(
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    args: Any = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = _UNSET,
) -> torch.futures.Future[Any]:
    """Call a function on a worker; the future of its result."""
    agent = state.agent
    if agent is None:
        raise _not_initialized()
    if type(func) is ScriptFunction:
        check_arguments(func, args, kwargs)
    elif _default_pickler is not _internal_rpc_pickler:
        func, args, kwargs = _packed(func, args, kwargs)
    future: torch.futures.Future[Any]
    if profiling.is_on():
        future = profiling.call(
            agent, RPCExecMode.ASYNC, (to, func, args, kwargs), timeout
        )
    else:
        future = agent.call_async(to, func, args, kwargs, timeout)
    if hasattr(_thread_local_var, "future_list"):
        _thread_local_var.future_list.append(future)
    return future


@uncompiled
def remote(
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    args: Any = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = _UNSET,
) -> RRef[Any]:
    """Call a function on a worker; at once, a reference to its result there."""
    agent = state.agent
    if agent is None:
        raise _not_initialized()
    if type(func) is ScriptFunction:
        check_arguments(func, args, kwargs)
    elif _default_pickler is not _internal_rpc_pickler:
        func, args, kwargs = _packed(func, args, kwargs)
    rref: RRef[Any]
    if profiling.is_on():
        rref = profiling.remote(agent, (to, func, args, kwargs), timeout)
    else:
        rref = agent.remote(to, func, args, kwargs, timeout)
    return rref


def _packed(func: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
    packed = _default_pickler.serialize(PythonUDF(func, args or (), kwargs or {}))
    return run_pickled, packed, None


@_require_initialized
def get_worker_info(worker_name: str | int | None = None) -> WorkerInfo:
    """Who a worker is; without a name, who this one is."""
    info: WorkerInfo = state.get().get_worker_info(worker_name)
    return info


def _to_worker_info(to: Any) -> WorkerInfo:
    info: WorkerInfo = state.get().find(to)
    return info


@contextmanager
def _wait_all() -> Iterator[None]:
    """Wait at the end of the block for all futures that `rpc_async` returned in it."""
    _thread_local_var.future_list = []
    try:
        yield
    finally:
        try:
            torch.futures.wait_all(_thread_local_var.future_list)
        finally:
            del _thread_local_var.future_list


# All workers together


class AllGatherStates:
    """The parts of one all-gather that have arrived."""

    def __init__(self) -> None:
        self.gathered_objects: dict[str, Any] = {}
        self.proceed_signal = threading.Event()


_ALL_WORKER_NAMES: set[str] = set()
_all_gather_dict_lock = threading.RLock()
_all_gather_sequence_id: dict[str, int] = {}
_all_gather_sequence_id_to_states: defaultdict[str, AllGatherStates] = defaultdict(
    AllGatherStates
)


def _init_rpc_states(agent: Any) -> None:
    """Make a new agent the one of this process."""
    global _ALL_WORKER_NAMES
    _ALL_WORKER_NAMES = {info.name for info in agent.get_worker_infos()}
    if not _is_current_rpc_agent_set():
        _set_and_start_rpc_agent(agent)


def _gather_to_leader(
    sequence_id: str, worker_name: str, obj: Any, worker_names: set[str] | None = None
) -> None:
    """A worker → the leader: my part."""
    names = worker_names or _ALL_WORKER_NAMES
    with _all_gather_dict_lock:
        assert worker_name in names, f"{worker_name} is not expected by leader."
        states = _all_gather_sequence_id_to_states[sequence_id]
        assert worker_name not in states.gathered_objects, (
            f"{worker_name} reported intent sequence id {sequence_id} twice."
        )
        states.gathered_objects[worker_name] = obj
        if names == states.gathered_objects.keys():
            states.proceed_signal.set()


def _broadcast_to_followers(sequence_id: str, objects_map: dict[str, Any]) -> None:
    """The leader → the others: all parts."""
    with _all_gather_dict_lock:
        states = _all_gather_sequence_id_to_states[sequence_id]
    assert not states.proceed_signal.is_set(), (
        f"Termination signal sequence id {sequence_id} got set twice."
    )
    states.gathered_objects = objects_map
    states.proceed_signal.set()


@_require_initialized
def _all_gather(
    obj: Any, worker_names: set[str] | None = None, timeout: float = _UNSET
) -> dict[str, Any]:
    """What all workers gave, by name. The one with the smallest name collects."""
    names = worker_names or _ALL_WORKER_NAMES
    leader, me = min(names), state.get().get_worker_info().name
    with _all_gather_dict_lock:
        together = "".join(sorted(names))
        number = _all_gather_sequence_id.get(together, 0)
        _all_gather_sequence_id[together] = number + 1
    sequence_id = f"{together}{number}"
    seconds = state.get().seconds(timeout)
    part = (sequence_id, me, obj, names)
    if me == leader:
        _gather_to_leader(*part)
    else:
        rpc_sync(leader, _gather_to_leader, args=part, timeout=seconds)
    with _all_gather_dict_lock:
        states = _all_gather_sequence_id_to_states[sequence_id]
    patience = None if timeout in (_UNSET, DEFAULT_SHUTDOWN_TIMEOUT) else timeout
    _await(states, names if me == leader else {leader}, patience)
    if me == leader:
        _tell_followers(names - {leader}, sequence_id, states.gathered_objects, seconds)
    with _all_gather_dict_lock:
        return _all_gather_sequence_id_to_states.pop(sequence_id).gathered_objects


def _await(states: AllGatherStates, needed: set[str], patience: float | None) -> None:
    """Wait until all parts have arrived, the time is up, or a worker that owes one is gone.

    Raises:
        RuntimeError: a worker is gone; names it.
    """
    signal, worker = states.proceed_signal, state.get().worker
    stop = worker.on_leave(lambda info: signal.set() if info.name in needed else None)
    try:
        gone = needed - {info.name for info in worker.get_worker_infos()}
        if not gone:
            with state.waiting():
                signal.wait(patience)
            gone = needed - {info.name for info in worker.get_worker_infos()}
    finally:
        stop()
    gone -= states.gathered_objects.keys()
    if gone:
        raise RuntimeError(f"workers {sorted(gone)} are lost: they cannot take part")


def _tell_followers(
    followers: set[str], sequence_id: str, objects: dict[str, Any], seconds: float
) -> None:
    told = {
        name: rpc_async(
            name, _broadcast_to_followers, args=(sequence_id, objects), timeout=seconds
        )
        for name in sorted(followers)
    }
    errors = []
    for name, future in told.items():
        try:
            future.wait()
        except RuntimeError as error:
            errors.append((name, error))
    if errors:
        raise RuntimeError(
            f"Followers {[name for name, _ in errors]} timed out in _all_gather after "
            f"{seconds:.2f} seconds. The first exception is {errors[0][1]}"
        )


@_require_initialized
def _barrier(worker_names: set[str]) -> None:
    """Wait until these workers are here."""
    try:
        _all_gather(None, set(worker_names))
    except RuntimeError:
        logger.exception("Failed to complete barrier")


@_require_initialized
def _wait_all_workers(timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Wait until all workers are here."""
    try:
        _all_gather(None, timeout=timeout)
    except RuntimeError:
        logger.exception("Failed to respond to 'Shutdown Proceed' in time")
        raise


# Shutdown


def _delete_all_user_and_unforked_owner_rrefs(timeout: float = _UNSET) -> None:
    """Let go of all references to values of others."""
    state.get().delete_references()


def _destroy_rref_context(ignore_leak: bool) -> None:
    """Raises a RuntimeError if others still hold values of this worker."""
    state.get().check_leaks(ignore_leak)


@_require_initialized
def shutdown(graceful: bool = True, timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Leave the world: together with all others when graceful, else at once."""
    try:
        if graceful:
            agent = _get_current_rpc_agent()
            if getattr(agent, "is_static_group", True):
                _wait_all_workers(timeout)
                _delete_all_user_and_unforked_owner_rrefs()
            agent.join(shutdown=True, timeout=timeout)
    finally:
        _finalize_shutdown()


def _finalize_shutdown() -> None:
    try:
        _destroy_rref_context(_ignore_rref_leak)
    finally:
        _get_current_rpc_agent().shutdown()
        _reset_current_rpc_agent()
        _all_gather_sequence_id.clear()  # the next world begins to count anew
        _all_gather_sequence_id_to_states.clear()
