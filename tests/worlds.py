"""Every world that tests build, and every way in which they wait.

Worlds of several workers live in this process. Over loopback: `World`, which users have too, and
those with more to them here. Over sockets: they meet in a store in memory, all at the same time,
because joining blocks until all are there. (Worlds of processes: `processes.py`.) What a worker
runs for others runs as it: `gw.rpc_sync` in it is its own.
"""

import random
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import pytest
from torch import Tensor
from torch.distributed import HashStore, Store

import gradwire as gw
from gradwire._autograd.recording import Recording
from gradwire._autograd.service import Autograd
from gradwire._rref.messages import ADOPT, NOTES, RECALL
from gradwire._transport.base import Transport
from gradwire._transport.faulty import Faults, FaultyTransport
from gradwire._transport.loopback import LoopbackNetwork, LoopbackTransport
from gradwire._transport.stores import Place
from gradwire._wire.frames import Frame, Parcel
from gradwire._wire.messages import CALL
from gradwire.api import enter
from gradwire.events import Event
from gradwire.options import Options
from gradwire.testing import World
from gradwire.threads import Executor
from gradwire.worker import Worker, open_worker

T = TypeVar("T")

LIMIT = 60.0
"""Seconds after which what a test waits for will not come any more."""
SOON = 30.0
"""Seconds that even a busy machine does not need for what does not wait for a timeout."""


# Waiting


def wait_until(
    condition: Callable[[], object],
    limit: float = LIMIT,
    show: Callable[[], object] = lambda: "it did not come to be",
) -> None:
    """Look until a condition holds, for what no event tells; else show how it is."""
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, show()
        time.sleep(0.001)


@contextmanager
def meanwhile(*bodies: Callable[[], object]) -> Iterator[None]:
    """Run the bodies in threads beside this block, and see them end well."""
    errors: list[BaseException] = []

    def run(body: Callable[[], object]) -> None:
        try:
            body()
        except BaseException as error:  # noqa: BLE001 raised in the test
            errors.append(error)

    threads = [
        threading.Thread(target=run, args=(body,), daemon=True) for body in bodies
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        deadline = time.monotonic() + LIMIT
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
    if errors:
        raise errors[0]
    hanging = [i for i, thread in enumerate(threads) if thread.is_alive()]
    assert not hanging, f"functions {hanging} of {len(threads)} hang"


def together(*functions: Callable[[], T]) -> list[T]:
    """What the functions return, run at the same time; raises what one of them raised."""
    results: dict[int, T] = {}

    def run(index: int) -> None:
        results[index] = functions[index]()

    with meanwhile(*(partial(run, index) for index in range(len(functions)))):
        pass
    return [results[index] for index in range(len(functions))]


def tables(worker: Worker) -> dict[str, Any]:
    """What a worker knows of references: all empty when all is over."""
    info = worker.debug_info()
    return {name: info[name] for name in ("owned", "held", "on_their_way")}


def wait_until_no_references(workers: Iterable[Worker]) -> None:
    """Until no worker owns, holds or sends any."""
    living = [worker for worker in workers if not worker.is_closed]
    wait_until(
        lambda: not any(any(tables(worker).values()) for worker in living),
        show=lambda: {worker.name: tables(worker) for worker in living},
    )


def wait_until_held(worker: Worker, count: int) -> None:
    """Until so many forks keep the values of a worker alive."""
    wait_until(
        lambda: sum(len(v["forks"]) for v in tables(worker)["owned"]) == count,
        show=lambda: tables(worker),
    )


def wait_until_no_contexts(workers: Iterable[Worker]) -> None:
    """Until no worker has any, nor anything else of autograd's."""
    infos = [w.autograd.debug_info for w in workers if not w.is_closed]
    wait_until(lambda: not any(count for info in infos for count in info().values()))


def in_flight(worker: Worker) -> str:
    return repr(worker).partition(": ")[2].rstrip(">")


# Worlds over loopback

SEEDS, ORDERS = (None, 1, 2), ("fifo", "seed1", "seed2")
orders = pytest.mark.parametrize("seed", SEEDS, ids=ORDERS)
"""In order, and with messages that overtake each other."""


@contextmanager
def three_workers(**options: Any) -> Iterator[World]:
    """A world of three, in which this thread is worker0."""
    with World(3, **options) as world, world.as_worker(0):
        yield world


@contextmanager
def scripting_world(size: int = 2) -> Iterator[World]:
    """A world with scripting on, seen as its first worker."""
    gw.script.enable()
    try:
        with World(size) as world, world.as_worker(0):
            yield world
    finally:
        gw.script.disable()


class Autograds:
    """The autograd services of some workers, without the codec: tensors cross by hand.

    `transfer` does what a message that carries tensors does: record at the one end, copy, record at
    the other.
    """

    world: World

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.services = [worker.autograd for worker in workers]

    def __getitem__(self, index: int) -> Autograd:
        return self.services[index]

    def __len__(self) -> int:
        return len(self.services)

    def transfer(
        self, src: int, dst: int, context_id: int, tensors: Sequence[Tensor]
    ) -> list[Tensor]:
        """The tensors as they arrive."""
        mark = self.leave(src, dst, context_id, tensors)
        copies = [tensor.detach().clone() for tensor in tensors]
        pairs = zip(tensors, copies, strict=True)
        recorded = [copy for tensor, copy in pairs if mark and tensor.requires_grad]
        frame = Frame(CALL, 0, 0, b"")
        frame.scope, frame.mark = context_id, mark
        self._recording(dst).arrived(frame, src, recorded)
        return copies

    def leave(
        self, src: int, dst: int, context_id: int, tensors: Sequence[Tensor]
    ) -> int:
        """Record that tensors leave; their mark."""
        context, parcel = self[src].contexts.arrived(context_id), Parcel(CALL, 0, b"")
        wanted = [tensor for tensor in tensors if tensor.requires_grad]
        self._recording(src).leaving(context, dst, parcel, wanted)
        return parcel.mark

    def _recording(self, index: int) -> Recording:
        return Recording(self[index])

    def close(self) -> None:
        for service in self.services:
            service.close()

    def passes(self) -> int:
        return sum(s.debug_info()["num_current_backward_passes"] for s in self.services)

    def contexts(self) -> int:
        return sum(s.debug_info()["num_autograd_contexts"] for s in self.services)


@contextmanager
def autograds(size: int, **options: Any) -> Iterator[Autograds]:
    """A world with distributed autograd."""
    with World(size, **options) as world:
        services = Autograds(world.workers)
        services.world = world
        try:
            yield services
        finally:
            services.close()


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


# Worlds over sockets


def free_port() -> int:
    """A port that nothing uses.

    None that the system gives to connections: tests beside this one get such in the meantime.
    """
    while True:
        port = secrets.choice(range(10_000, 32_000))
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        return port


def join_world(
    name: str,
    place: Place,
    *,
    seed: int = 0,
    faults: Faults | None = None,
    **options: Any,
) -> Worker:
    """A worker in the world at `place`; blocks until the others are there too."""

    def wrap(sockets: Transport, executor: Executor) -> Transport:
        if faults is None:
            return sockets
        return FaultyTransport(sockets, executor, seed=seed, faults=faults)

    # Those of one process would take each other for processes that share its cores.
    settings = Options(**{"torch_threads": 0, **options})
    return open_worker(name, place, settings, enter, around=wrap)


def open_world(
    size: int,
    *,
    store: Store | None = None,
    apart: dict[int, dict[str, Any]] | None = None,
    **options: Any,
) -> list[Worker]:
    """Workers `worker0`, `worker1`, …; `apart` has options of single workers."""
    meet = HashStore() if store is None else store

    def joiner(rank: int) -> Callable[[], Worker]:
        own = {**options, **(apart or {}).get(rank, {})}
        place = Place(meet, rank, size, None)
        return lambda: join_world(f"worker{rank}", place, **own)

    return together(*map(joiner, range(size)))


def close_world(workers: list[Worker], *, graceful: bool = True) -> None:
    """Shut all of them down, at the same time."""
    together(*(lambda w=w: w.shutdown(graceful) for w in workers))  # type: ignore[misc]


def vanish(worker: Worker) -> None:
    """Make a worker go without a goodbye, as a killed process would."""
    worker._meeting = None  # nothing is told to the store either
    worker._agent.gone = Event("gone")
    worker._agent._closed = True  # it responds to nothing any more
    for link in worker._transport._links():
        link.close(goodbye=False)
    worker.close()


@contextmanager
def socket_world(size: int, **options: Any) -> Iterator[list[Worker]]:
    """Workers as `open_world` makes them, shut down in the end."""
    workers = open_world(size, **options)
    try:
        yield workers
    except BaseException:
        close_world(workers, graceful=False)
        raise
    close_world(workers)


@contextmanager
def limited_world(
    release: Callable[[], object], **limits: Any
) -> Iterator[list[Worker]]:
    """Three workers, of which the first has these limits, and serves the second to the end.

    `release` ends the functions that a test has started.
    """
    workers = open_world(3, unix_sockets=False, apart={0: limits})
    try:
        yield workers
        release()
        assert workers[1].rpc_sync("worker0", max, (1, 2), timeout=LIMIT) == 2
        assert workers[1].rpc_async("worker0", max, (1, 2), timeout=LIMIT).wait() == 2
    finally:
        release()
        close_world(workers, graceful=False)


@contextmanager
def sockets_as_first(size: int) -> Iterator[None]:
    """A world over sockets, whose first worker is the current one here."""
    with socket_world(size) as workers:
        before = enter(workers[0])
        try:
            yield
        finally:
            enter(before)
