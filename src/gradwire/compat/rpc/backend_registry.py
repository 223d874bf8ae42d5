"""The backends that `init_rpc` can be asked for: Gradwire itself, and what programs register.

torch makes a new `BackendType` each time one is registered. Here it is one class for good, so that
its members stay members.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from . import constants

Construct = Callable[..., Any]
Init = Callable[..., Any]


class BackendValue(NamedTuple):
    """What makes a backend's options, and what makes its agent."""

    construct_rpc_backend_options_handler: Construct
    init_backend_handler: Init


class _Backends(type):
    """Looks like an enumeration."""

    members: dict[str, Any]

    def __getitem__(cls, name: str) -> Any:
        return cls.members[name]

    def __iter__(cls) -> Iterator[Any]:
        return iter(list(cls.members.values()))

    def __len__(cls) -> int:
        return len(cls.members)

    def __getattr__(cls, name: str) -> Any:
        try:
            return cls.members[name]
        except KeyError:
            raise AttributeError(
                f"there is no RPC backend {name!r}; there are {list(cls.members)}"
            ) from None


class BackendType(metaclass=_Backends):
    """A backend: `BackendType.TENSORPIPE`, `BackendType["TENSORPIPE"]`."""

    members: dict[str, BackendType] = {}  # noqa: RUF012 the class is a registry

    def __init__(self, name: str, value: BackendValue) -> None:
        self.name = name
        self.value = value

    def __repr__(self) -> str:
        return f"BackendType.{self.name}"


def backend_registered(backend_name: str) -> bool:
    return backend_name in BackendType.members


def register_backend(
    backend_name: str,
    construct_rpc_backend_options_handler: Construct,
    init_backend_handler: Init,
) -> BackendType:
    """Add a backend.

    Raises:
        RuntimeError: there is one of that name.
    """
    if backend_registered(backend_name):
        raise RuntimeError(f"RPC backend {backend_name}: already registered")
    value = BackendValue(construct_rpc_backend_options_handler, init_backend_handler)
    backend = BackendType.members[backend_name] = BackendType(backend_name, value)
    return backend


def construct_rpc_backend_options(
    backend: BackendType,
    rpc_timeout: float = constants.DEFAULT_RPC_TIMEOUT_SEC,
    init_method: str = constants.DEFAULT_INIT_METHOD,
    **kwargs: Any,
) -> Any:
    return backend.value.construct_rpc_backend_options_handler(
        rpc_timeout, init_method, **kwargs
    )


def init_backend(backend: BackendType, *args: Any, **kwargs: Any) -> Any:
    return backend.value.init_backend_handler(*args, **kwargs)
