"""All ways to use a reference."""

from collections.abc import Callable, Iterator
from typing import Any

import gradwire as gw
from tests.rref.values import fetched


class Ways:
    """The three ways to call a method, each giving the result."""

    def __init__(self, rref: gw.RRef[Any]) -> None:
        self._rref = rref

    def __iter__(self) -> Iterator[Callable[..., Any]]:
        for way in ("rpc_sync", "rpc_async", "remote"):
            yield lambda name, *args, way=way, **kwargs: self._call(
                way, name, args, kwargs
            )

    def _call(self, way: str, name: str, args: Any, kwargs: Any) -> Any:
        proxy = getattr(self._rref, way)()
        method = proxy if name == "()" else getattr(proxy, name)
        result = method(*args, **kwargs)
        if way == "rpc_sync":
            return result
        return result.wait() if way == "rpc_async" else result.to_here()


def uses(rref: gw.RRef[Any]) -> list[Callable[[], Any]]:
    """All ways to get at a value that is not here."""
    return [
        rref.to_here,
        rref.to_here_async().wait,
        lambda: rref._get_type(),
        lambda: rref._get_type(blocking=False).wait(),
        lambda: rref.rpc_sync().anything(),
        lambda: rref.rpc_async().anything().wait(),
        lambda: rref.remote().anything().to_here(),
    ]


def attempts(rref: gw.RRef[Any]) -> list[Callable[[], Any]]:
    """Uses that fail before anything is sent."""
    return [
        rref.to_here,
        rref._get_type,
        rref.to_here_async,
        lambda: rref.rpc_sync().where(),
        lambda: rref.rpc_async().where(),
        lambda: rref.remote().where(),
        lambda: gw.rpc_sync("worker1", fetched, (rref,)),
        lambda: gw.remote("worker1", fetched, ([rref],)),
    ]
