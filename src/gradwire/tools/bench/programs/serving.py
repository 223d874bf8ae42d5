"""One server and several callers: plain calls, and requests that are answered in batches."""

from __future__ import annotations

import threading
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


def _batching(callers: int, goal: float | None = None) -> Program:
    return Program(
        name=f"async_execution batching, {_callers(callers)}",
        goal=goal,
        group=f"one server, {_callers(callers)}",
        begin=partial(_predict, callers),
        serve=partial(_serve, callers),
        clients=callers,
        check=always(WIDTH),
        steps=600 // callers,
        warm_up=150 // callers,
    )


def _adding(callers: int, goal: float | None = None) -> Program:
    return Program(
        name=f"sync add, {_callers(callers)}",
        goal=goal,
        group=f"one server, {_callers(callers)}",
        begin=partial(_add, callers),
        clients=callers,
        check=always(18),
        steps=20_000,
        seconds=0.6,
        warm_up=300 // callers,
    )


PROGRAMS = [
    _batching(1),
    _batching(3),
    _batching(6, goal=3),
    _adding(1),
    _adding(3),
    _adding(6, goal=6),
]
