"""What the benchmarks call on the other worker."""

from __future__ import annotations

import threading
import time

import torch

from .library import rpc

_given: dict[int, torch.Tensor] = {}
_busy = threading.Event()


def nothing() -> None:
    return None


def add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a + b


def take(x: torch.Tensor) -> None:
    return None


def give(length: int) -> torch.Tensor:
    """The same tensor each time: making it is not what is measured."""
    if length not in _given:
        _given.clear()
        _given[length] = torch.ones(length, dtype=torch.uint8)
    return _given[length]


def start_busy_thread() -> None:
    """A thread that computes in Python, as a server's own work would."""
    _busy.set()

    def compute() -> None:
        count = 0
        while _busy.is_set():
            count += 1

    threading.Thread(target=compute, daemon=True).start()


def stop_busy_thread() -> None:
    _busy.clear()


def cpu_seconds() -> float:
    return time.process_time()


def hop(left: int, to: int, x: torch.Tensor) -> torch.Tensor:
    """Go back and forth between two workers."""
    if left == 1:
        return x + x
    result: torch.Tensor = rpc.rpc_sync(
        f"worker{1 - to}", hop, args=(left - 1, 1 - to, x + x)
    )
    return result


_weights = [torch.ones(3, 3, requires_grad=True) for _ in range(10)]


def weights() -> list[torch.Tensor]:
    """Ten small parameters of this worker."""
    return _weights


def weight(index: int) -> torch.Tensor:
    return weights()[index]


def use_weights() -> torch.Tensor:
    return torch.stack(weights()).sum()
