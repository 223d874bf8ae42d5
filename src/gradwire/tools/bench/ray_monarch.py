"""Other systems that call functions with tensors in other processes: Ray and Monarch actors.

Measured if they are installed. They have no distributed autograd; what they cannot do is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

from . import functions
from .tasks import Caller

_PACKAGES = {"Ray": "ray", "Monarch": "monarch"}


def installed() -> list[str]:
    """Those that can be measured here."""
    return [name for name, package in _PACKAGES.items() if find_spec(package)]


class Server:
    """What is called, as methods of an actor."""

    def nothing(self) -> None:
        return functions.nothing()

    def add(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return functions.add(a, b)

    def take(self, x: torch.Tensor) -> None:
        return functions.take(x)

    def give(self, length: int) -> torch.Tensor:
        return functions.give(length)

    def start_busy_thread(self) -> None:
        functions.start_busy_thread()

    def stop_busy_thread(self) -> None:
        functions.stop_busy_thread()

    def cpu_seconds(self) -> float:
        return functions.cpu_seconds()


class _Waiting:
    """An answer that comes; `get` waits for it."""

    __slots__ = ("_get",)

    def __init__(self, get: Callable[[], Any]) -> None:
        self._get = get

    def wait(self) -> Any:
        return self._get()

    to_here = wait


def ray_caller() -> Caller:
    """Calls of an actor on a node of its own."""
    import ray

    # "local": a new cluster, even if one runs on this machine.
    ray.init("local", num_cpus=1, include_dashboard=False, logging_level="ERROR")
    return caller_of(ray.remote(Server).remote())


def caller_of(server: Any) -> Caller:
    """Calls of a Ray actor's methods; its results stay there until they are asked for."""
    import ray

    def start(func: Any, args: tuple[Any, ...]) -> _Waiting:
        reference = getattr(server, func.__name__).remote(*args)
        return _Waiting(lambda: ray.get(reference))

    return Caller(sync=_synchronous(start), start=start, remote=start)


def monarch_caller() -> Caller:
    """Calls of an actor's endpoints."""
    from monarch.actor import Actor, endpoint, this_host

    methods = {n: f for n, f in vars(Server).items() if not n.startswith("_")}
    endpoints = {name: endpoint(method) for name, method in methods.items()}
    kind = type("Server", (Actor,), endpoints)
    server = this_host().spawn_procs(per_host={"servers": 1}).spawn("server", kind)

    def start(func: Any, args: tuple[Any, ...]) -> _Waiting:
        return _Waiting(getattr(server, func.__name__).call_one(*args).get)

    return Caller(sync=_synchronous(start), start=start)


def _synchronous(start: Callable[..., _Waiting]) -> Callable[..., Any]:
    return lambda func, args: start(func, args).wait()
