"""What users hold: a reference to a value that lives on some worker.

An `RRef` is backed by one of two things: on the owner, by the value itself (`OwnedValue`);
elsewhere, by a fork of it (`Fork`), which is released when its last handle is dropped. Several
handles can share one. Everything else is done by the service of the worker they are on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from functools import partial
from typing import Any, Generic, NoReturn, Protocol, TypeVar

from .._rpc.futures import CallFuture
from ..errors import ClosedError, GradwireError
from ..ids import WorkerInfo
from ..tracebacks import hidden_frames, hide_frames
from ..uncompiled import uncompiled
from .held_forks import Fork
from .messages import spell
from .owned_values import OwnedValue

T = TypeVar("T")
Core = OwnedValue | Fork


class Service(Protocol):
    """The implementation (`service.py`)."""

    me: WorkerInfo

    def own(self, value: Any) -> OwnedValue: ...

    def fetch(self, core: Core, timeout: float | None, part: str = "value") -> Any: ...

    def fetch_async(
        self, core: Core, timeout: float | None, part: str = "value"
    ) -> CallFuture: ...

    def creation(self, core: Core) -> CallFuture: ...

    @property
    def invoke(self) -> Callable[..., Any]: ...

    @property
    def invoke_async(self) -> Invoke: ...

    @property
    def invoke_remote(self) -> Invoke: ...


class RRef(Generic[T]):
    """A reference to a value on some worker, which lives at least as long as this reference.

    `RRef(value)` creates one to a value of this worker; `remote` to the result of a function on
    another. Pass it in calls, return it, keep it in containers; drop it when you are done.

    >>> rref = gw.remote("worker1", torch.add, args=(torch.ones(2), 1))
    >>> rref.to_here()
    tensor([2., 2.])
    >>> rref.owner_name()
    'worker1'
    """

    __slots__ = ("__weakref__", "_core", "_service", "_type_future")

    @uncompiled
    def __init__(self, value: T, type_hint: Any = None) -> None:
        service = find_service()
        self._setup(service.own(value), service)

    @classmethod
    def over(cls, core: Core, service: Service) -> RRef[Any]:
        """A handle backed by what the service has."""
        rref: RRef[Any] = cls.__new__(cls)
        rref._setup(core, service)
        return rref

    def _setup(self, core: Core, service: Service) -> None:
        self._core = core
        self._service = service
        self._type_future: CallFuture | None = None

    keeps_late_values = False
    """Whether a value whose making took too long is kept as long as the reference is."""

    @staticmethod
    def explain(error: Exception) -> Exception:
        """The exception that uses of a reference raise if the creation of its value failed."""
        return error

    def owner(self) -> WorkerInfo:
        """The worker that owns the value."""
        return self._core.owner

    def owner_name(self) -> str:
        """The name of the worker that owns the value."""
        return self._core.owner.name

    def is_owner(self) -> bool:
        """Whether this worker owns the value."""
        return isinstance(self._core, OwnedValue)

    def confirmed_by_owner(self) -> bool:
        """Whether the owner has confirmed that it has the value."""
        core = self._core
        try:
            if isinstance(core, Fork):
                core.register()
            return isinstance(core, OwnedValue) or core.is_confirmed
        except Exception:  # noqa: BLE001 whatever the creating call met with
            return False

    def check(self) -> None:
        """Raise why it cannot be passed on, if the creation of its value failed."""
        if not isinstance(self._core, OwnedValue):
            _ = self._core.is_confirmed

    @uncompiled
    def local_value(self) -> T:
        """The value itself, on its owner.

        Raises:
            GradwireError: this worker is not the owner.
            Exception: what the function that creates the value raised.
        """
        if not isinstance(self._core, OwnedValue):
            raise GradwireError(
                f"{self!r} has no local value on worker {self._service.me.name!r}: ask for it "
                f"on its owner {self.owner_name()!r}, or get a copy with to_here()"
            )
        with hidden_frames:
            value: T = self._service.fetch(self._core, None)
        return value

    @uncompiled
    def to_here(self, timeout: float | None = None) -> T:
        """A copy of the value; on its owner, the value itself.

        Raises:
            CallTimeout: it did not arrive within `timeout` seconds (0: no limit).
            WorkerLostError: the owner is lost.
            Exception: what the function that creates the value raised.
        """
        try:
            value: T = self._service.fetch(self._core, timeout)
        except Exception as error:
            hide_frames(error)
            raise
        return value

    @uncompiled
    def to_here_async(self, timeout: float | None = None) -> CallFuture:
        """A future of a copy of the value; `await rref` does the same."""
        return self._service.fetch_async(self._core, timeout)

    def __await__(self) -> Generator[Any, None, T]:
        return self._service.fetch_async(self._core, None).__await__()

    @uncompiled
    def rpc_sync(self, timeout: float | None = None) -> Any:
        """Call a method of the value, and wait: `rref.rpc_sync().forward(x)` returns the result."""
        return Proxy(self._service.invoke, self._core, timeout)

    @uncompiled
    def rpc_meanwhile(
        self, func: Callable[[], object], timeout: float | None = None
    ) -> Any:
        """As `rpc_sync`; calls `func()`, in this thread, once the request has been sent."""
        invoke = partial(self._service.invoke, meanwhile=func)
        return Proxy(invoke, self._core, timeout)

    @uncompiled
    def rpc_async(self, timeout: float | None = None) -> Any:
        """Call a method of the value: `rref.rpc_async().forward(x)` returns a future."""
        return Proxy(self._service.invoke_async, self._core, timeout)

    @uncompiled
    def remote(self, timeout: float | None = None) -> Any:
        """Call a method of the value: `rref.remote().forward(x)` returns another reference."""
        return Proxy(self._service.invoke_remote, self._core, timeout)

    def _get_type(self, timeout: float | None = None, blocking: bool = True) -> Any:
        """The type of the value; if not blocking, the future of it, the same one each time."""
        if blocking:
            return self._service.fetch(self._core, timeout, "type")
        if self._type_future is None:
            future = self._service.fetch_async(self._core, timeout, "type")
            self._type_future = future
        return self._type_future

    def _get_future(self) -> CallFuture:
        """Done when the owner has the value."""
        return self._service.creation(self._core)

    def __repr__(self) -> str:
        core = self._core
        where = "here" if isinstance(core, OwnedValue) else repr(core.owner.name)
        return f"<RRef {spell(core.id)}, owner {where}: {core.state}>"

    def __copy__(self) -> RRef[T]:
        return self

    def __deepcopy__(self, memo: Any) -> RRef[T]:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{self!r} can only be sent in calls: a pickle may outlive its value"
        )


def no_service() -> NoReturn:
    raise ClosedError("there is no worker in this process: call init_rpc first")


find_service: Callable[[], Service] = no_service
"""The service of the current worker; `api.py` knows which that is, and puts its answer here."""


def calling_line() -> str:
    """The file and line of the user's code that we are called from."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__package__") in _PACKAGES:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


_OURS = "_rref nn optim compat compat.rpc".split()
_PACKAGES = frozenset(("gradwire", *(f"gradwire.{name}" for name in _OURS)))


Invoke = Callable[[Any, str, Any, Any, "float | None"], Any]


class Proxy:
    """Calls methods of a value in one of the three ways.

    Without slots: `torch.compile` looks into the `__dict__` of objects with a `__getattr__`.
    """

    def __init__(self, invoke: Invoke, core: Any, timeout: float | None) -> None:
        self._invoke = invoke
        self._core = core
        self._timeout = timeout

    def __repr__(self) -> str:
        return f"<Proxy of {self._core!r}>"

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._call, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call("__call__", *args, **kwargs)

    @uncompiled
    def _call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._invoke(self._core, method, args, kwargs, self._timeout)
        except Exception as error:
            hide_frames(error)
            raise
