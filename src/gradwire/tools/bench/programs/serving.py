"""One server and several callers: plain calls, and requests that are answered in batches."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import functions
from ..library import rpc
from ..program import Program, Step, always

WIDTH = 16


class BatchServer:
    """Runs the model once for a batch: one request of each caller."""

    def __init__(self, size: int) -> None:
        self.weight = torch.full((WIDTH, WIDTH), 1 / WIDTH)
        self.size = size
        self.lock = threading.Lock()
        self.batch: list[Tensor] = []
        self.results: Any = torch.futures.Future()

    @staticmethod
    @rpc.functions.async_execution  # type: ignore[untyped-decorator]
    def predict(server_rref: Any, x: Tensor) -> Any:
        self = server_rref.local_value()
        with self.lock:
            place, results = len(self.batch), self.results
            self.batch.append(x)
            result = results.then(lambda done: done.wait()[place])
            if len(self.batch) == self.size:
                batch, self.batch = self.batch, []
                self.results = torch.futures.Future()
                results.set_result(torch.stack(batch) @ self.weight)
        return result


_server: BatchServer


def get_server() -> BatchServer:
    return _server


def _serve(callers: int) -> None:
    global _server
    _server = BatchServer(callers)


def _predict(callers: int, rank: int) -> Step:
    to, x = f"worker{callers}", torch.full((WIDTH,), float(rank + 1))
    server = rpc.remote(to, get_server)

    def step() -> float:
        result = rpc.rpc_sync(to, BatchServer.predict, args=(server, x))
        return result.sum().item() / (rank + 1)  # type: ignore[no-any-return]

    return step


def _add(callers: int, rank: int) -> Step:
    to, x, y = f"worker{callers}", torch.ones(3, 3), torch.ones(3, 3)

    def step() -> float:
        result = rpc.rpc_sync(to, functions.add, args=(x, y))
        return result.sum().item()  # type: ignore[no-any-return]

    return step


def _callers(count: int) -> str:
    return "1 caller" if count == 1 else f"{count} callers"


def _program(
    title: str,
    begin: Callable[[int, int], Step],
    callers: int,
    steps: int,
    expected: float,
) -> Program:
    return Program(
        name=f"{title}, {_callers(callers)}",
        group=f"one server, {_callers(callers)}",
        begin=partial(begin, callers),
        serve=partial(_serve, callers),
        clients=callers,
        check=always(expected),
        steps=steps,
        warm_up=steps // 4,
    )


_BATCHED, _SYNC = "async_execution batching", "sync add"
PROGRAMS = [
    *(_program(_BATCHED, _predict, n, 600 // n, float(WIDTH)) for n in (1, 3, 6)),
    *(_program(_SYNC, _add, n, 1200 // n, 18.0) for n in (1, 3, 6)),
]
