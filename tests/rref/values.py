"""Values to refer to, which tell of their end, and what workers do with references.

The workers of a world live in this process, so a test sees the values of all of them.
"""

from collections import Counter, defaultdict
from typing import Any

import gradwire as gw
from tests.rpc.functions import Boom
from tests.worlds import wait_until

ended: Counter[str] = Counter()
"""How often each value has come to its end."""


class Value:
    """A value that can be called, changed, and counted. A copy of it is its name only."""

    def __init__(self, name: str) -> None:
        ended[name] = 0
        self.name = name
        self.kept: Any = None

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (self.name,)

    def __del__(self) -> None:
        ended[self.name] += 1

    def __call__(self, *words: str, end: str = "") -> str:
        return " ".join([self.name, *words]) + end

    def keep(self, thing: Any) -> None:
        self.kept = thing

    def give(self) -> Any:
        return self.kept

    def where(self) -> str:
        return gw.get_worker_info().name


def local(name: str) -> gw.RRef[Value]:
    """A reference to a value of the current worker."""
    return gw.RRef(Value(name))


def fetched(rref: gw.RRef[Any]) -> Any:
    return rref.to_here()


def name_of(rref: gw.RRef[Any]) -> str:
    """A copy of a value is its name only."""
    return rref.local_value().name if rref.is_owner() else rref.to_here()


def passed(rref: gw.RRef[Any], *route: str) -> Any:
    """What the last one on the route gets by a reference that everyone passes on."""
    if not route:
        return name_of(rref)
    return gw.rpc_sync(route[0], passed, (rref, *route[1:]))


def make_at(to: str, name: str) -> gw.RRef[Any]:
    return gw.remote(to, Value, (name,))


kept: dict[str, list[Any]] = defaultdict(list)
"""What each worker keeps."""


def keep(thing: Any) -> None:
    kept[gw.get_worker_info().name].append(thing)


def let_go() -> None:
    """Keep nothing any more."""
    kept.clear()


def same(thing: Any) -> Any:
    return thing


def nothing(*_: Any) -> None:
    return None


def wait_until_freed(*names: str) -> None:
    """Until these values are freed; it happens once."""
    wait_until(lambda: all(ended[name] for name in names), show=lambda: ended)
    assert {name: ended[name] for name in names} == dict.fromkeys(names, 1)


def hop(rref: gw.RRef[Any], hops: int) -> str:
    if not hops:
        return passed(rref)
    me = gw.get_worker_info().id
    return gw.rpc_sync((me + 1) % 3, hop, (rref, hops - 1))


class Holder:
    def __init__(self, rref: gw.RRef[Any]) -> None:
        self.rref = rref

    def fetch(self) -> Any:
        return self.rref.to_here()


def fail(*_: Any) -> None:
    raise Boom("with references")
