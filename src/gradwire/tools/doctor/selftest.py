"""The self test: a world of two processes, what it can do in a second, and whether it is right."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

import torch

from ..._transport.stores import find_place
from ...errors import GradwireError
from ...options import Options
from ...worker import Worker, open_worker
from .checks import Finding
from .selftest_worker import JOIN

_SLICE = 0.7  # seconds for each figure
_TIMEOUT = 20.0
_BURST = 1000
_BULK = 64 << 20


def self_test(unix_sockets: bool) -> Iterator[Finding]:
    """Figures of one way to talk; anything that fails is bad."""
    options = Options(unix_sockets=unix_sockets, join_timeout=JOIN, timeout=_TIMEOUT)
    try:
        with _world(options) as worker:
            worker.rpc_sync("partner", _nothing)
            yield Finding("transport", worker.statistics()["links"]["partner"])
            yield from _figures(worker)
    except (GradwireError, OSError, AssertionError) as error:
        yield Finding("failed", type(error).__name__, str(error), is_bad=True)


@contextmanager
def _world(options: Options) -> Iterator[Worker]:
    with tempfile.TemporaryDirectory(prefix="gradwire-doctor-") as folder:
        url = f"file://{folder}/meet"
        command = [sys.executable, "-m", f"{__package__}.selftest_worker", url]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as partner:
            try:
                place = find_place(url, None, 0, 2, JOIN)
                with open_worker("doctor", place, options) as worker:
                    yield worker
                    assert partner.stdin is not None
                    partner.stdin.close()
            finally:
                partner.kill()


def _figures(worker: Worker) -> Iterator[Finding]:
    nothing = _times(lambda: worker.rpc_sync("partner", _nothing))
    yield _latency("no-op call", nothing)
    x = torch.ones(3, 3)
    tensor = _times(lambda: worker.rpc_sync("partner", torch.add, args=(x, x)))
    yield _latency("call with a 3×3 tensor", tensor)
    burst = median(_times(lambda: _burst(worker, x)))
    yield Finding(f"{_BURST:,} concurrent calls", f"{_BURST / burst:,.0f} calls/s")
    bulk = torch.ones(_BULK, dtype=torch.uint8)
    sending = median(_times(lambda: worker.rpc_sync("partner", len, args=(bulk,))))
    yield Finding("sending 64 MiB", f"{_BULK / sending / 1e9:.1f} GB/s")
    yield _latency("forward and backward", _times(lambda: _train(worker)))
    yield Finding("gradients", "equal those of local autograd")


def _burst(worker: Worker, x: torch.Tensor) -> None:
    calls = [worker.rpc_async("partner", torch.add, args=(x, x)) for _ in range(_BURST)]
    for call in calls:
        call.wait()


def _train(worker: Worker) -> None:
    """A step through both workers; its gradient is what a local one would be."""
    x = torch.tensor([0.5, 2.0], requires_grad=True)
    with worker.autograd.context() as number:
        y = worker.rpc_sync("partner", torch.pow, args=(x, 3)).sum()
        worker.autograd.backward(number, [y])
        found = worker.autograd.get_gradients(number)[x]
    (local,) = torch.autograd.grad((x**3).sum(), x)
    assert torch.equal(found, local), f"{found} instead of {local}"


def _times(call: Callable[[], object]) -> list[float]:
    """How long it takes each time, for a while; the first ones do not count."""
    for _ in range(3):
        call()
    times = []
    end = time.perf_counter() + _SLICE
    while (begin := time.perf_counter()) < end:
        call()
        times.append(time.perf_counter() - begin)
    return times


def _latency(what: str, times: list[float]) -> Finding:
    worst = sorted(times)[int(len(times) * 0.99)]
    return Finding(
        what, f"{median(times) * 1e6:.0f} µs", f"99 % below {worst * 1e6:.0f} µs"
    )


def _nothing() -> None:
    return None
