"""Single calls, and forward + backward, with something else in between; the same tensor twice.

Times are those of the single call. In a loop caches are warm and threads awake; a program that
sleeps or computes between its calls meets neither.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from .. import functions
from ..library import dist_autograd, rpc
from ..program import Program, Step, always


def _compute(seconds: float) -> None:
    """Multiply matrices for that long."""
    end = time.perf_counter() + seconds
    a = torch.ones(128, 128)
    while time.perf_counter() < end:
        torch.mm(a, a)


def _add(rank: int) -> Step:
    x, y = torch.ones(3, 3), torch.ones(3, 3)
    return lambda: rpc.rpc_sync("worker1", functions.add, args=(x, y)).sum().item()


def _add_same(rank: int) -> Step:
    x = torch.ones(3, 3)
    return lambda: rpc.rpc_sync("worker1", functions.add, args=(x, x)).sum().item()


def _forward_and_backward(rank: int) -> Step:
    x = torch.ones(3, 3, requires_grad=True)
    y = torch.ones(3, 3, requires_grad=True)

    def step() -> float:
        with dist_autograd.context() as context_id:
            result = rpc.rpc_sync("worker1", functions.add, args=(x, y))
            dist_autograd.backward(context_id, [result.sum()])
            gradients = dist_autograd.get_gradients(context_id)
        total: Tensor = gradients[x] + gradients[y]
        return total.sum().item()

    return step


def _detect_anomalies() -> None:
    torch.autograd.set_detect_anomaly(True)


def _with_anomaly_mode(rank: int) -> Step:
    _detect_anomalies()
    return _forward_and_backward(rank)


def _paced(
    name: str, begin: Callable[[int], Step], pause: Callable[[], None], steps: int
) -> Program:
    return Program(
        name=name,
        begin=begin,
        check=always(18),
        pause=pause,
        steps=steps,
        warm_up=steps // 5,
        group="paced calls",
    )


def _every(
    milliseconds: int, name: str, pause: Callable[[float], None]
) -> list[Program]:
    steps = 300 if milliseconds == 1 else 80
    between = partial(pause, milliseconds / 1000)
    title = f"every {milliseconds} ms of {name}"
    add = _paced(f"add, {title}", _add, between, steps)
    both = f"forward + backward, {title}"
    programs = [add, _paced(both, _forward_and_backward, between, steps)]
    if milliseconds == 10 and name == "sleep":
        return [replace(program, goal=2, p90_goal=1.8) for program in programs]
    return programs


def _no_pause() -> None:
    return None


PROGRAMS = [
    _paced("add(x, y), in a loop", _add, _no_pause, 1000),
    _paced("add(x, x), in a loop", _add_same, _no_pause, 1000),
    *_every(1, "sleep", time.sleep),
    *_every(10, "sleep", time.sleep),
    _paced("add(x, x), every 10 ms of sleep", _add_same, partial(time.sleep, 0.01), 80),
    *_every(1, "computation", _compute),
    *_every(10, "computation", _compute),
    Program(
        name="forward + backward, anomaly mode",
        goal=1.5,
        begin=_with_anomaly_mode,
        serve=_detect_anomalies,
        check=always(18),
        steps=200,
        warm_up=40,
    ),
]
