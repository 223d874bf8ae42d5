"""Workers in this process that talk by sockets, as workers in processes would.

They meet in a store in memory, all at the same time, because joining blocks until all
are there. What they run for others runs as them: `gw.rpc_sync` in it is their own.
"""

import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch.distributed import HashStore, Store

from gradwire._transport.base import Transport
from gradwire._transport.faulty import Faults, FaultyTransport
from gradwire._transport.rendezvous import Place
from gradwire.api import enter
from gradwire.events import Event
from gradwire.options import Options
from gradwire.threads import Executor
from gradwire.worker import Worker, open_worker

T = TypeVar("T")

LIMIT = 20.0
"""Seconds after which what a test waits for will not come any more."""


def together(*functions: Callable[[], T]) -> list[T]:
    """What the functions return, run at the same time; raises what one of them raised."""
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            results[index] = functions[index]()
        except BaseException as error:  # noqa: BLE001 raised below
            errors.append(error)

    threads = [
        threading.Thread(target=run, args=(i,), daemon=True)
        for i in range(len(functions))
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + LIMIT
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if errors:
        raise errors[0]
    hanging = [i for i, thread in enumerate(threads) if thread.is_alive()]
    assert not hanging, f"functions {hanging} of {len(functions)} hang"
    return [results[i] for i in range(len(functions))]


def wait_until(condition: Callable[[], object], limit: float = LIMIT) -> None:
    """Look until a condition holds, for what no event tells."""
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, "it did not come to be"
        time.sleep(0.005)


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


class Proxy:
    """A piece of network between workers: forwards TCP connections, slowly or not at all.

    Listens on 127.0.0.2, at the port where a worker listens on 127.0.0.1 that advertises
    the former: `Proxy.options` has the worker do so.
    """

    _CHUNK = 32 << 10

    def __init__(self) -> None:
        self.port = free_port()
        self.pause = 0.0
        """Seconds before each 32 KiB."""
        self.frozen = threading.Event()
        """Forward nothing, and tell nobody."""
        self._closing = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._CHUNK)
        self._listener.bind(("127.0.0.2", self.port))
        self._listener.listen()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def __enter__(self) -> "Proxy":
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()

    @property
    def options(self) -> dict[str, Any]:
        """For the worker behind the proxy."""
        return {"ports": (self.port, self.port), "advertise": "127.0.0.2"}

    def _run(self) -> None:
        while not self._closing.is_set():
            for key, _ in self._selector.select(0.02):
                if self.frozen.is_set():
                    self._closing.wait(0.02)
                elif key.data is None:
                    self._accept()
                else:
                    self._forward(key.fileobj, key.data)  # type: ignore[arg-type]

    def _accept(self) -> None:
        near, _ = self._listener.accept()
        far = socket.create_connection(("127.0.0.1", self.port))
        self._selector.register(near, selectors.EVENT_READ, far)
        self._selector.register(far, selectors.EVENT_READ, near)

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        if source.fileno() < 0:
            return  # ended with the other direction, just now
        self._closing.wait(self.pause)
        try:
            data = source.recv(self._CHUNK)
            target.sendall(data)
        except OSError:
            data = b""
        if not data:
            for one in (source, target):
                self._selector.unregister(one)
                one.close()


@contextmanager
def sockets_as_first(size: int) -> Iterator[None]:
    """A world over sockets, whose first worker is the current one here."""
    with socket_world(size) as workers:
        before = enter(workers[0])
        try:
            yield
        finally:
            enter(before)
