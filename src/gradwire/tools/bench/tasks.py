"""What is measured, inside the calling worker. Each task returns seconds, lower is better.

A task is run in short slices, alternating between the contenders, so that a slow minute of the
machine hits all of them. A slice of small calls begins with the same calls, not counted: a
processor that was idle may take a quarter of a second to come up to its speed, from half of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from . import functions

Call = Callable[[Any, tuple[Any, ...]], Any]
Sample = dict[str, float]

MB = 1 << 20
_WARM_UP = 0.3  # seconds


@dataclass(frozen=True, slots=True)
class Caller:
    """One way to call the other worker. What it cannot do is None."""

    sync: Call
    start: Call
    remote: Any = None
    autograd: Any = None
    """The module with `context` and `backward`."""
    own: Any = None
    """A reference to a value of the calling worker."""
    optimizer: Any = None
    """The class `DistributedOptimizer`."""
    scripted: Any = None
    """A function that TorchScript has compiled: adds two tensors on the other worker."""


@dataclass(frozen=True, slots=True)
class Task:
    """Something to measure, and what we promise: a ratio to torch RPC, or to plain torch."""

    name: str
    run: Callable[[Caller], Sample]
    goal: float | None = None
    tcp_goal: float | None = None
    unit: str = "µs"
    local_goal: float | None = None
    """How much more time than plain torch on one worker it may take, as a fraction."""
    needs: str = ""
    """What of a `Caller` it uses beside plain calls."""

    def can_run(self, caller: Caller) -> bool:
        return not self.needs or getattr(caller, self.needs) is not None


def _each(call: Callable[[], object], count: int) -> list[float]:
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return times


def _warm_up(call: Callable[[], object]) -> None:
    end = time.perf_counter() + _WARM_UP
    while time.perf_counter() < end:
        call()


def _summary(times: list[float]) -> Sample:
    ordered = sorted(times)
    p99 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    return {"median": median(ordered), "p99": p99}


def _latency(
    func: Any, args: tuple[Any, ...], count: int
) -> Callable[[Caller], Sample]:
    def run(caller: Caller) -> Sample:
        _warm_up(lambda: caller.sync(func, args))
        here, there = time.process_time(), caller.sync(functions.cpu_seconds, ())
        times = _each(lambda: caller.sync(func, args), count)
        here = time.process_time() - here
        there = caller.sync(functions.cpu_seconds, ()) - there
        return {**_summary(times), "cpu": (here + there) / count}

    return run


def _outstanding(caller: Caller, count: int = 2000) -> Sample:
    a, b = torch.ones(3, 3), torch.ones(3, 3)

    def burst() -> None:
        futures = [caller.start(functions.add, (a, b)) for _ in range(count)]
        for future in futures:
            future.wait()

    _each(burst, 2)
    return {"median": median(_each(burst, 5)) / count}


def _one_async(caller: Caller, count: int = 300) -> Sample:
    a, b = torch.ones(3, 3), torch.ones(3, 3)
    _warm_up(lambda: caller.start(functions.add, (a, b)).wait())
    return _summary(_each(lambda: caller.start(functions.add, (a, b)).wait(), count))


def _remote(caller: Caller, count: int = 300) -> Sample:
    remote, tensors = caller.remote, _tensors()
    _warm_up(lambda: remote(functions.add, tensors).to_here())
    return _summary(_each(lambda: remote(functions.add, tensors).to_here(), count))


def _scripted(caller: Caller, count: int = 400) -> Sample:
    tensors = _tensors()
    _warm_up(lambda: caller.scripted(*tensors))
    return _summary(_each(lambda: caller.scripted(*tensors), count))


Forward = Callable[[Caller, torch.Tensor, torch.Tensor], torch.Tensor]


def _train(forward: Forward, count: int) -> Callable[[Caller], Sample]:
    """A forward pass over workers, and its backward; also the time of the backward alone."""

    x, y = torch.ones(3, 3, requires_grad=True), torch.ones(3, 3, requires_grad=True)

    def step(caller: Caller) -> float:
        return _backward_time(caller, lambda: forward(caller, x, y).sum())

    def run(caller: Caller) -> Sample:
        _warm_up(lambda: step(caller))
        alone: list[float] = []
        times = _each(lambda: alone.append(step(caller)), count)
        return {**_summary(times), "alone": median(alone)}

    return run


def _backward_time(caller: Caller, forward: Callable[[], torch.Tensor]) -> float:
    with caller.autograd.context() as number:
        loss = forward()
        return _each(lambda: caller.autograd.backward(number, [loss]), 1)[0]


def _backward(caller: Caller) -> Sample:
    return {"median": _train(_add, 200)(caller)["alone"]}


def _add(caller: Caller, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = caller.sync(functions.add, (x, y))
    return result


def _hops(caller: Caller, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = caller.sync(functions.hop, (4, 1, x))
    return result


def local_nodes() -> torch.Tensor:
    """The end of a graph of 5,000 nodes on this worker.

    Half of them are sines, half additions. The tensors are 3×3: what is done for each node shows
    where the node itself does little.
    """
    x = torch.ones(3, 3, requires_grad=True)
    y = x
    for _ in range(2499):  # two nodes each; the leaf and the sum are the other two
        y = torch.sin(y) + x
    return y.sum()


def backward_over_local_nodes(caller: Caller, count: int = 15) -> Sample:
    """In a context, in turn with torch's own; graphs are built before the clock starts."""

    def plain() -> float:
        loss = local_nodes()
        return _each(lambda: torch.autograd.backward([loss]), 1)[0]

    def both() -> tuple[float, float]:
        return plain(), _backward_time(caller, local_nodes)

    both()
    pairs = [both() for _ in range(count)]
    local = median(plain for plain, _ in pairs)
    sample = _summary([ours for _, ours in pairs])
    return {**sample, "local": local, "over_local": sample["median"] / local - 1}


def _step(caller: Caller, count: int = 100) -> Sample:
    """A step of 20 small parameters, half of them on each of the two workers."""
    here = [caller.own(weight) for weight in functions.weights()]
    there = [caller.remote(functions.weight, (index,)) for index in range(10)]
    optimizer = caller.optimizer(torch.optim.SGD, here + there, lr=0.01, momentum=0.9)
    with caller.autograd.context() as number:
        loss = functions.use_weights() + caller.sync(functions.use_weights, ())
        caller.autograd.backward(number, [loss])
        _warm_up(lambda: optimizer.step(number))
        return _summary(_each(lambda: optimizer.step(number), count))


def _send(length: int, count: int) -> Callable[[Caller], Sample]:
    def run(caller: Caller) -> Sample:
        x = torch.ones(length, dtype=torch.uint8)
        _each(lambda: caller.sync(functions.take, (x,)), 3)
        return _summary(_each(lambda: caller.sync(functions.take, (x,)), count))

    return run


def _receive(length: int, count: int) -> Callable[[Caller], Sample]:
    def run(caller: Caller) -> Sample:
        _each(lambda: caller.sync(functions.give, (length,)), 3)
        return _summary(_each(lambda: caller.sync(functions.give, (length,)), count))

    return run


def _busy(caller: Caller) -> Sample:
    caller.sync(functions.start_busy_thread, ())
    try:
        end = time.perf_counter() + 1.5
        times = []
        while time.perf_counter() < end:
            times += _each(lambda: caller.sync(functions.nothing, ()), 1)
    finally:
        caller.sync(functions.stop_busy_thread, ())
    return _summary(times)


def _tensors() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(3, 3), torch.ones(3, 3)


TASKS = [
    Task("no-op call", _latency(functions.nothing, (), 400), 12, 7),
    Task("3×3 tensor add", _latency(functions.add, _tensors(), 400), 10),
    Task("scripted 3×3 tensor add", _scripted, needs="scripted"),
    Task("one asynchronous add at a time", _one_async),
    Task("2,000 outstanding adds, each", _outstanding, 10),
    Task("remote 3×3 add, to_here", _remote, 8, needs="remote"),
    Task("tiny forward and backward", _train(_add, 200), 6, needs="autograd"),
    Task("backward of it alone", _backward, 4, needs="autograd"),
    Task("four hops, forward and backward", _train(_hops, 100), 5, needs="autograd"),
    Task(
        "backward over 5,000 local nodes",
        backward_over_local_nodes,
        unit="ms",
        local_goal=0.20,
        needs="autograd",
    ),
    Task("optimizer step, 20 parameters on 2 owners", _step, 3, needs="optimizer"),
    Task("no-op, busy thread on the server", _busy),
    Task("send 1 MB", _send(MB, 40), 4),
    Task("receive 1 MB", _receive(MB, 40), 4),
    Task("send 16 MB", _send(16 * MB, 15), 2),
    Task("receive 16 MB", _receive(16 * MB, 15), 2),
    Task("send 64 MB", _send(64 * MB, 5), 6, 1.2, "ms"),
    Task("receive 64 MB", _receive(64 * MB, 5), 6, 1.2, "ms"),
    Task("send 256 MB", _send(256 * MB, 3), 5, None, "ms"),
    Task("receive 256 MB", _receive(256 * MB, 3), 5, None, "ms"),
]
