"""References with torch's methods, messages and timeouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch

from ..._rpc.futures import CallFuture
from ..._rref.held_forks import Fork
from ..._rref.messages import maker_of, number_of
from ..._rref.owned_values import OwnedValue
from ..._rref.reference import Core, Service
from ..._rref.reference import RRef as _RRef
from ...errors import CallTimeout, ClosedError, StaleReferenceError
from ...uncompiled import uncompiled
from .. import state
from .constants import UNSET_RPC_TIMEOUT
from .errors import RpcTimeout, RRefCreationError, explain_creation
from .workers import WorkerInfo, known

T = TypeVar("T")


class RRef(_RRef[T]):
    """A reference to a value on some worker. The torch names of it are in `_names`."""

    __slots__ = ("_names", "_profiling", "_types", "made_by")

    @uncompiled
    def __init__(self, value: T, type_hint: Any = None) -> None:
        agent = state.get()
        if isinstance(value, torch.jit.ScriptModule) and type_hint is None:
            raise RuntimeError(
                "The RRef being created contains a ScriptModule, must provide its "
                "ModuleInterface type hint."
            )
        super().__init__(value, type_hint)
        self.name_by(agent.numbers)

    def _setup(self, core: Core, service: Service) -> None:
        super()._setup(core, service)
        self._names: tuple[int, ...] = ()
        self._profiling: Any = None
        self.made_by: Any = None  # the function, where that makes a difference
        self._types: dict[bool, Any] = {}  # asked for once only, in each way

    keeps_late_values = True
    explain = staticmethod(explain_creation)

    def name_by(self, numbers: Iterator[int]) -> None:
        """Give it its numbers, as torch counts: one for the value, one for a fork of it."""
        count = 1 if self.is_owner() else 2
        self._names = tuple(next(numbers) for _ in range(count))

    def owner(self) -> WorkerInfo:
        return known(super().owner())

    @uncompiled
    def to_here(self, timeout: float | None = UNSET_RPC_TIMEOUT) -> T:
        with _torch_texts(self, "to_here() on it"):
            value: T = self._agent().fetch(self, timeout)
            return value

    def to_here_async(self, timeout: float | None = UNSET_RPC_TIMEOUT) -> CallFuture:
        return super().to_here_async(self._agent().seconds(timeout))

    @uncompiled
    def local_value(self) -> T:
        if not self.is_owner():
            me, (value, fork) = known(self._service.me), self._spelled()
            raise RuntimeError(
                f"For UserRRef(rref_id={value}, fork_id={fork}), can't call localValue() "
                f"on user {me}. Call it on owner {self.owner()}"
            )
        return super().local_value()

    @uncompiled
    def rpc_sync(self, timeout: float | None = UNSET_RPC_TIMEOUT) -> Any:
        return Proxy(self, "sync", timeout)

    @uncompiled
    def rpc_async(self, timeout: float | None = UNSET_RPC_TIMEOUT) -> Any:
        return Proxy(self, "async", timeout)

    @uncompiled
    def remote(self, timeout: float | None = UNSET_RPC_TIMEOUT) -> Any:
        return Proxy(self, "remote", timeout)

    def invoke(
        self, mode: str, method: str, args: Any, kwargs: Any, timeout: float
    ) -> Any:
        """Call a method of the value, in one of the three ways."""
        with _torch_texts(self, f"{method}() on it"):
            if mode == "sync":
                return self._service.invoke(self._core, method, args, kwargs, timeout)
            if mode == "async":
                service = self._service
                return service.invoke_async(self._core, method, args, kwargs, timeout)
            made = self._service.invoke_remote(
                self._core, method, args, kwargs, timeout
            )
            made.name_by(state.get().numbers)
            return made

    def backward(
        self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False
    ) -> None:
        """Run a backward pass from the value; in a context, if it is elsewhere."""
        if self.is_owner():
            backward_from(self.local_value(), dist_autograd_ctx_id, retain_graph)
        elif dist_autograd_ctx_id == -1:
            raise RuntimeError(
                "User RRefs require 'dist_autograd_ctx_id' to be specified"
            )
        else:
            args = (self, dist_autograd_ctx_id, retain_graph)
            state.get().call_sync(self.owner(), _backward_on_owner, args, {}, 0)

    def _get_type(
        self, timeout: float | None = UNSET_RPC_TIMEOUT, blocking: bool = True
    ) -> Any:
        if blocking not in self._types:
            with _torch_texts(self, "_get_type() on it"):
                found = self._agent().fetch_type(self, timeout, blocking)
                self._types[blocking] = found
        return self._types[blocking]

    def _get_profiling_future(self) -> Any:
        if self._profiling is None:
            raise RuntimeError("Profiling future has not been set!")
        return self._profiling

    def _set_profiling_future(self, future: Any) -> None:
        self._profiling = future

    def _serialize(self) -> NoReturn:
        with _torch_texts(self, "fork an UserRRef"):
            self._agent()
            self.check()
        raise RuntimeError(
            "RRef._serialize() is not available in Gradwire: pass the RRef itself in a call, "
            "at any depth of its arguments (docs/migrate.md)"
        )

    @staticmethod
    def _deserialize(data: Any) -> NoReturn:
        raise RuntimeError(
            "RRef._deserialize() is not available in Gradwire: pass the RRef itself in a call"
        )

    def check(self) -> None:
        super().check()
        if isinstance(self._core, OwnedValue) and self._core.is_ready:
            try:
                self._core.get()
            except RRefCreationError:
                raise
            except Exception:  # noqa: BLE001 raised where the value is fetched
                pass

    def _agent(self) -> Any:
        if state.agent is None:
            raise ClosedError("this worker was shut down")
        return state.agent

    def _spelled(self) -> list[str]:
        """The numbers of the value and, if it is elsewhere, of the fork of it that is here."""
        core = self._core
        numbers = [core.id] + ([core.holding.fork] if isinstance(core, Fork) else [])
        names = self._names or tuple(map(number_of, numbers))
        return [
            f"GloballyUniqueId(created_on={maker_of(number)}, local_id={name})"
            for number, name in zip(numbers, names, strict=True)
        ]

    def __str__(self) -> str:
        value, *fork = self._spelled()
        if not fork:
            return f"OwnerRRef({value})"
        return f"UserRRef(RRefId = {value}, ForkId = {fork[0]})"

    def __reduce__(self) -> NoReturn:
        with _torch_texts(self, "fork an UserRRef"):
            self._agent()
        raise RuntimeError(
            "Can not pickle rref in python pickler, rref can only be pickled when using RPC"
        )


class Proxy:
    """The value, to call methods of in one of the three ways. Without slots, as ours."""

    def __init__(self, rref: RRef[Any], mode: str, timeout: float | None) -> None:
        self._rref = rref
        self._mode = mode
        self._timeout = timeout

    def __repr__(self) -> str:
        return f"<Proxy of {self._rref}>"

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._call, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call("__call__", *args, **kwargs)

    @uncompiled
    def _call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        rref, mode = self._rref, self._mode
        if mode == "remote":
            getattr(rref._get_type(self._timeout), method)  # at once, as in torch
        return state.get().invoke(rref, mode, method, args, kwargs, self._timeout)


def backward_from(value: Any, context_id: int, retain_graph: bool) -> None:
    """Run a backward pass from the value of a reference."""
    if not isinstance(value, torch.Tensor):
        raise RuntimeError(
            f"RRef should contain a tensor for .backward(), but got {type(value)}"
        )
    if context_id == -1:
        value.backward(retain_graph=retain_graph)
    else:
        agent = state.get()
        agent.worker.autograd.backward(context_id, [value], retain_graph)


def _backward_on_owner(rref: RRef[Any], context_id: int, retain_graph: bool) -> None:
    backward_from(rref.local_value(), context_id, retain_graph)


@contextmanager
def _torch_texts(rref: RRef[Any], what: str) -> Iterator[None]:
    """Errors of a use of a reference, with the words that torch has for them."""
    try:
        yield
    except (ClosedError, StaleReferenceError) as error:
        raise RuntimeError(
            f"{rref} has been deleted. Cannot call {what} after deletion. ({error})"
        ) from error
    except CallTimeout as error:
        if isinstance(error, RpcTimeout):
            raise
        raise RpcTimeout(error.call, error.worker, error.seconds) from error
