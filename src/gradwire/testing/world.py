"""A world of workers inside one process, over the loopback transport.

>>> with World(2) as world:
...     world[0].rpc_sync("worker1", max, args=(1, 2))
2
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .._transport.base import Transport
from .._transport.faulty import Faults, FaultyTransport
from .._transport.loopback import LoopbackNetwork, LoopbackTransport
from ..api import enter, prepare
from ..options import Options
from ..threads import Executor
from ..worker import Worker


class World:
    """Workers `worker0`, `worker1`, … in this process.

    With a `seed`, messages are reordered as the seed decides; with `faults`, they are also dropped,
    duplicated, delayed or cut off. Further keywords are fields of `Options`.

    >>> with World(2, seed=1) as world:
    ...     world.run(lambda worker: worker.id)
    [0, 1]
    """

    def __init__(
        self,
        size: int,
        *,
        seed: int | None = None,
        faults: Faults | None = None,
        **options: Any,
    ) -> None:
        self._network = LoopbackNetwork(seed)
        self._transports: list[LoopbackTransport] = []
        self._faults = faults
        self._seed = seed or 0
        self.workers = [
            Worker(
                f"worker{i}",
                i,
                options=Options(**options),
                make_transport=self._make_transport,
                on_thread=enter,
            )
            for i in range(size)
        ]
        for worker in self.workers:
            prepare(worker)
        cards = [worker.card for worker in self.workers]
        try:
            for worker in self.workers:
                worker.start(cards, tuple, None)  # no keys
            for worker in self.workers:
                worker.check_device_maps()
        except BaseException:
            for worker in self.workers:
                worker.close()
            raise

    def __repr__(self) -> str:
        return f"<World of {[worker.name for worker in self.workers]}>"

    def __len__(self) -> int:
        return len(self.workers)

    def __getitem__(self, index: int) -> Worker:
        return self.workers[index]

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.shutdown(graceful=kind is None and self._faults is None)

    @contextmanager
    def as_worker(self, index: int) -> Iterator[Worker]:
        """Act as a worker in this thread: `gw.rpc_sync` and the other functions are its own."""
        before = enter(self.workers[index])
        try:
            yield self.workers[index]
        finally:
            enter(before)

    def run(self, func: Callable[[Worker], Any]) -> list[Any]:
        """Run `func(worker)` as each worker, concurrently, and return the results.

        Raises:
            Exception: what the first of them raised.
        """
        results: list[Any] = [None] * len(self)
        errors: list[BaseException] = []

        def body(index: int) -> None:
            try:
                with self.as_worker(index) as worker:
                    results[index] = func(worker)
            except BaseException as error:  # noqa: BLE001 user code
                errors.append(error)

        threads = [threading.Thread(target=body, args=(i,)) for i in range(len(self))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results

    def kill(self, index: int) -> None:
        """Kill a worker without a goodbye, as if its process had crashed."""
        self._transports[index].kill()
        self.workers[index].close()

    def shutdown(self, graceful: bool = True) -> None:
        """End all workers."""
        self.run(lambda worker: worker.shutdown(graceful))

    def _make_transport(self, executor: Executor) -> Transport:
        inner = LoopbackTransport(self._network, executor)
        self._transports.append(inner)
        if self._faults is None:
            return inner
        seed = self._seed + len(self._transports)
        return FaultyTransport(inner, executor, seed=seed, faults=self._faults)
