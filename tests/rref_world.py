"""What the tests of references share: values that tell of their end, and how to wait for it.

The workers of a world live in this process, so a test sees the values of all of them.
"""

import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import gradwire as gw
from gradwire._rref.messages import ADOPT, NOTES, RECALL
from gradwire._transport.base import Transport
from gradwire._transport.loopback import LoopbackNetwork, LoopbackTransport
from gradwire._wire.frames import Parcel
from gradwire.testing import World
from gradwire.threads import Executor
from tests.calls_world import ENOUGH

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


def tables(worker: gw.Worker) -> dict[str, Any]:
    """What a worker knows of references: all empty when all is over."""
    info = worker.debug_info()
    return {name: info[name] for name in ("owned", "held", "on_their_way")}


def see(condition: Callable[[], object], tell: Callable[[], object] = str) -> None:
    """Look until it is so, for what no event tells; else say how it is."""
    deadline = time.monotonic() + ENOUGH
    while not condition():
        assert time.monotonic() < deadline, tell()
        time.sleep(0.001)


def see_nothing_left(workers: Iterable[gw.Worker]) -> None:
    """Wait until no worker owns, holds or carries anything."""
    living = [worker for worker in workers if not worker.is_closed]
    see(
        lambda: not any(any(tables(worker).values()) for worker in living),
        lambda: {worker.name: tables(worker) for worker in living},
    )


def see_end(*names: str) -> None:
    """Wait until these values are freed; it happens once."""
    see(lambda: all(ended[name] for name in names), lambda: ended)
    assert {name: ended[name] for name in names} == dict.fromkeys(names, 1)


def see_held(worker: gw.Worker, count: int) -> None:
    """Wait until so many forks keep the values of a worker alive."""
    see(
        lambda: sum(len(v["forks"]) for v in tables(worker)["owned"]) == count,
        lambda: tables(worker),
    )


CONTROL = frozenset((ADOPT, NOTES, RECALL))


class Post:
    """What workers send each other: held back, lost or repeated, as a test wants it.

    The kind of an answer is that of the request, negative.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._random = None if seed is None else random.Random(seed)
        self._lock = threading.Lock()
        self._held: set[int] = set()
        self._waiting: list[tuple[int, Callable[[], object]]] = []
        self.lost = 0

    def hold(self, *kinds: int) -> None:
        self._held.update(kinds)

    def waits(self, kind: int) -> bool:
        """Whether a message of that kind is held back."""
        with self._lock:
            return any(waiting == kind for waiting, _ in self._waiting)

    def release(self) -> None:
        """Deliver what was held back, and hold no more."""
        with self._lock:
            self._held.clear()
            waiting, self._waiting = self._waiting, []
        for _, send in waiting:
            try:
                send()
            except gw.WorkerLostError:
                pass  # who waits for an answer knows

    def carry(self, kind: int, send: Callable[[], object]) -> None:
        with self._lock:
            if kind in self._held:
                self._waiting.append((kind, send))
                return
        for _ in range(self._times(kind)):
            send()

    def _times(self, kind: int) -> int:
        if self._random is None or abs(kind) not in CONTROL:
            return 1
        times = self._random.choice((0, 1, 1, 2))
        self.lost += times == 0
        return times


class PostedTransport(LoopbackTransport):
    """Sends by the post."""

    def __init__(
        self, network: LoopbackNetwork, executor: Executor, post: Post
    ) -> None:
        super().__init__(network, executor)
        self._post = post
        self._kinds: dict[tuple[int, int], int] = {}

    def _send(
        self, other: LoopbackTransport, call: int, parcel: Parcel, *, is_request: bool
    ) -> None:
        send = partial(super()._send, other, call, parcel, is_request=is_request)
        kind = parcel.kind
        if is_request:
            other._kinds[self.me, call] = kind  # type: ignore[attr-defined]
        else:
            kind = -self._kinds.get((other.me, call), 0)
        if other is self:
            send()  # nothing a worker says to itself gets lost
        else:
            self._post.carry(kind, send)


class PostedWorld(World):
    """A world whose messages about references get lost or come twice, by a seed."""

    def __init__(self, size: int, seed: int | None = None, **options: Any) -> None:
        self.post = Post(seed)
        super().__init__(size, **options)

    def _make_transport(self, executor: Executor) -> Transport:
        transport = PostedTransport(self._network, executor, self.post)
        self._transports.append(transport)
        return transport
