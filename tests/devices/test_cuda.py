"""CUDA tensors between two processes: which way they take, and what streams have to do with it.

Only where there is a GPU. Long kernels before and after each hop make what is not waited for wrong.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gradwire as gw
from gradwire.api import enter
from gradwire.worker import Worker
from tests.processes import Process, Processes
from tests.worlds import LIMIT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="NOT RUN: needs a GPU"),
]

_A_WHILE = 5_000_000  # cycles: some milliseconds
_LONG = 1_000_000_000


def add(x: Tensor, y: Any) -> Tensor:
    return x + y


def same(x: Any) -> Any:
    return x


def twice_slowly(x: Tensor, cycles: int = _A_WHILE) -> Tensor:
    torch.cuda._sleep(cycles)
    twice = x * 2
    torch.cuda._sleep(cycles)
    return twice


def begin(x: Tensor) -> None:
    """Something that takes a while, and is not waited for."""
    torch.cuda._sleep(_A_WHILE)
    x.add_(1)


def total(x: Tensor) -> float:
    return x.double().sum().item()


def total_of_fetched(rref: Any) -> float:
    return total(rref.to_here())


def make(count: int) -> Tensor:
    torch.cuda._sleep(_A_WHILE)
    return torch.arange(count, device="cuda", dtype=torch.float32)


def statistics() -> dict[str, Any]:
    return gw.rpc.statistics()


@pytest.fixture(scope="module", autouse=True)
def awake() -> None:
    """The GPU is opened before what is left behind is looked for."""
    torch.ones(1, device="cuda", requires_grad=True).sum().backward()
    torch.cuda._sleep(1)


@contextmanager
def two(processes: Processes, **options: Any) -> Iterator[tuple[Worker, Process]]:
    """This process as worker0, and another one."""
    process = processes.serve(1, 2)
    with processes.world(2, **options) as worker:
        before = enter(worker)
        try:
            yield worker, process
        finally:
            enter(before)


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    made = Processes(tmp_path)
    yield made
    made.close()


@pytest.fixture
def pair(processes: Processes) -> Iterator[tuple[Worker, Process]]:
    """This process and another one, between which memory is shared already."""
    with two(processes) as made:
        for _ in range(2):
            gw.rpc_sync("worker1", add, (torch.ones(3, device="cuda"), 1))
        yield made


def directly(worker: Worker) -> int:
    sent: int = worker.statistics()["device_bytes_sent_directly"]
    return sent


def test_they_go_from_gpu_to_gpu(pair: tuple[Worker, Process]) -> None:
    worker, _ = pair
    for count in (1, 1000, 100_000, 1 << 20, 5 << 20, 40 << 20):
        x = torch.rand(count, device="cuda")
        gw.rpc_sync("worker1", same, (x,))
        before = directly(worker)
        assert torch.equal(gw.rpc_sync("worker1", same, (x,)), x)
        assert directly(worker) - before >= x.nbytes
    there = gw.rpc_sync("worker1", statistics)
    assert there["device_bytes_sent_directly"] > 4 << 20
    assert "memory of GPUs" in worker.statistics()["links"]["worker1"]


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.t(),
        lambda x: x[:, 1:],
        lambda x: x.expand(4, 3, 3),
        lambda x: x.bfloat16(),
        lambda x: x > 4,
        lambda x: torch.complex(x, x).conj(),
        lambda x: x[0, 0],
        lambda x: x[:0],
    ],
)
@pytest.mark.usefixtures("pair")
def test_every_kind_arrives_as_it_was(change: Any) -> None:
    x = change(torch.arange(9.0, device="cuda").reshape(3, 3))
    back = gw.rpc_sync("worker1", same, ({"a": [x, torch.ones(2)]},))["a"]
    assert back[0].is_cuda
    assert not back[1].is_cuda
    assert back[0].dtype == x.dtype
    assert torch.equal(back[0], x)


# Streams


@pytest.mark.parametrize("count", [100, 1 << 20])
@pytest.mark.usefixtures("pair")
def test_what_is_sent_is_what_it_was_when_it_was_sent(count: int) -> None:
    x = torch.zeros(count, device="cuda")
    for i in range(3):
        torch.cuda._sleep(_A_WHILE)
        x.fill_(i)
        future = gw.rpc_async("worker1", total, (x,))
        x.fill_(-100)
        assert future.wait() == i * count


@pytest.mark.usefixtures("pair")
def test_no_host_waits_for_a_gpu() -> None:
    x = torch.ones(1000, device="cuda")
    y = gw.rpc_sync("worker1", twice_slowly, (x,))
    y += 1  # loading a kernel waits for the GPU: both are loaded now
    torch.cuda.synchronize()
    began = time.perf_counter()
    torch.cuda._sleep(_LONG)
    y = gw.rpc_sync("worker1", twice_slowly, (x,))
    torch.cuda._sleep(_A_WHILE)
    y += 1
    returned = time.perf_counter() - began
    assert total(y) == 3000
    assert returned < (time.perf_counter() - began) / 2


def test_threads_with_streams_of_their_own(pair: tuple[Worker, Process]) -> None:
    worker, _ = pair
    wrong: list[Any] = []

    def run(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for i in range(20):
                x = torch.full((50_000,), float(100 * number + i), device="cuda")
                torch.cuda._sleep(_A_WHILE)
                x += 1
                future = worker.rpc_async("worker1", twice_slowly, (x,))
                x.fill_(-1)
                y = future.wait()
                del future
                if i % 2:
                    y = worker.rpc_sync("worker1", add, (y, 0))
                torch.cuda._sleep(_A_WHILE)
                y = y + 1
                if not bool((y == 2 * (100 * number + i + 1) + 1).all()):
                    wrong.append((number, i))

    threads = [threading.Thread(target=run, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []


@pytest.mark.usefixtures("pair")
def test_references_and_callbacks_on_a_stream_of_ones_own() -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10 * _A_WHILE)
        own = gw.RRef(torch.full((1000,), 3.0, device="cuda"))
    assert gw.rpc_sync("worker1", total_of_fetched, (own,)) == 3000
    with torch.cuda.stream(stream):
        there = gw.remote("worker1", make, (1000,)).to_here() + 1
        future = gw.rpc_async("worker1", make, (1000,))
        then = future.then(lambda done: done.value() + 1).wait() + 1
    torch.cuda.current_stream().wait_stream(stream)
    assert total(there) == 999 * 500 + 1000
    assert total(then) == 999 * 500 + 2000


@pytest.mark.parametrize("on_own_stream", [False, True])
@pytest.mark.usefixtures("pair")
def test_gradients_are_exact_on_any_stream(*, on_own_stream: bool) -> None:
    stream = torch.cuda.Stream() if on_own_stream else None
    for _ in range(5):
        x, y = (torch.rand(1000, device="cuda", requires_grad=True) for _ in range(2))
        torch.cuda.synchronize()
        with torch.cuda.stream(stream), gw.context() as context:
            torch.cuda._sleep(_A_WHILE)
            h = x * y
            there = gw.rpc_sync("worker1", twice_slowly, (h,))
            last = gw.rpc_sync("worker1", add, (there * y, h))
            gw.backward(context, [last.sum()])
            found = gw.get_gradients(context)
            of_x, of_y = found[x] + 0, found[y] + 0
        torch.cuda.synchronize()
        x, y = (z.detach().clone().requires_grad_() for z in (x, y))
        h = x * y
        expected = torch.autograd.grad((h * 2 * y + h).sum(), [x, y])
        torch.testing.assert_close((of_x, of_y), expected)


@pytest.mark.usefixtures("pair")
def test_steps_of_an_optimizer_come_after_the_passes_before_them() -> None:
    def make_weight() -> Tensor:
        return torch.ones(1000, device="cuda", requires_grad=True)

    weight = gw.remote("worker1", make_weight)
    optimizer = gw.DistributedOptimizer(torch.optim.SGD, [weight], lr=0.125)
    with torch.cuda.stream(torch.cuda.Stream()):
        for step in range(5):
            with gw.context() as context:
                x = torch.ones(1000, device="cuda")
                torch.cuda._sleep(_A_WHILE)
                y = weight.rpc_sync().mul(twice_slowly(x))
                assert total(y.detach()) == 1000 * 2 * (1 - 0.25 * step)
                gw.backward(context, [y.sum()])
                optimizer.step(context)


# Failures


def test_who_waits_for_a_killed_worker_goes_on(pair: tuple[Worker, Process]) -> None:
    _, process = pair
    x = torch.ones(1000, device="cuda")
    gw.rpc_sync("worker1", twice_slowly, (x, 1))
    gw.rpc_sync("worker1", twice_slowly, (x, 20 * _LONG))  # its result is not there yet
    process.kill()
    done = threading.Event()

    def wait() -> None:
        torch.cuda.synchronize()
        done.set()

    threading.Thread(target=wait, daemon=True).start()
    assert done.wait(LIMIT)
    assert total(torch.ones(10, device="cuda")) == 10


def test_a_worker_that_sees_no_gpu_gets_copies_on_the_cpu(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # too late for this process
    with two(processes, device_maps={"worker1": {"cuda:0": "cpu"}}) as (worker, _):
        for _ in range(3):
            x = torch.rand(1000, device="cuda")
            assert gw.rpc_sync("worker1", total, (x,)) == total(x.cpu())
        assert directly(worker) == 0
        assert "by way of the CPU" in worker.statistics()["links"]["worker1"]
