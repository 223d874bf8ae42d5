"""What holds of every pass, wherever workers live: nothing is left, nobody waits, all is exact."""

import gc
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

import gradwire as gw
from gradwire._autograd.messages import (
    Answer,
    Delivery,
    Header,
    Load,
    request,
    unpack,
)
from gradwire.api import current_worker, enter
from gradwire.errors import GradwireError, WorkerLostError
from gradwire.testing import World
from tests.autograd.functions import doubles
from tests.processes import Processes
from tests.worlds import (
    LIMIT,
    Autograds,
    autograds,
    sockets_as_first,
    together,
    wait_until,
)

close = torch.testing.assert_close

torch.manual_seed(0)
weight = doubles(3)  # each process has its own, with the same numbers


def apply_weight(x: Tensor) -> Tensor:
    return torch.sin(x) * weight


def apply_along(x: Tensor, path: list[str]) -> Tensor:
    if not path:
        return apply_weight(x)
    h = apply_weight(x)
    result: Tensor = gw.rpc_sync(path[0], apply_along, (h, path[1:])) * h
    return result


def applied_along_locally(x: Tensor, path: list[str]) -> Tensor:
    """The sum of what `apply_along` returns, computed here."""
    if not path:
        return apply_weight(x).sum()
    steps = [apply_weight(x)]
    for _ in path:
        steps.append(apply_weight(steps[-1]))
    return torch.stack(steps).prod(0).sum()


def passes() -> int:
    count: int = gw.rpc.debug_info()["num_current_backward_passes"]
    return count


def contexts() -> int:
    count: int = gw.rpc.debug_info()["num_autograd_contexts"]
    return count


# Within one process


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_no_pass_is_under_way_when_backward_returns(seed: int | None) -> None:
    with World(3, seed=seed) as world, world.as_worker(0):
        for _ in range(20):
            with gw.context() as ctx:
                x = doubles(3)
                y = apply_along(x, ["worker1", "worker2", "worker0", "worker1"])
                gw.rpc_sync("worker2", apply_weight, (y,))  # not used
                gw.backward(ctx, [y.sum()])
                assert Autograds(world.workers).passes() == 0


def test_one_send_is_run_by_itself() -> None:
    with autograds(2) as world, world[0].context() as context:
        a, b = doubles(3), doubles(3)
        world.transfer(0, 1, context, [a * 2])
        world.transfer(0, 1, context, [b * 3])
        first, _ = world[0].contexts.get(context).sends
        gradient = torch.ones(3, dtype=torch.float64)
        number = world[1]._passes.next()
        load = Load([Delivery(first, (gradient,))])
        message = request(Header(context, number, 0, number), load)
        answer = unpack(world[1].request(0, message).wait(), 0)
        assert isinstance(answer, Answer)
        assert not answer.load
        close(world[0].get_gradients(context), {a: 2 * gradient})
        assert world.passes() == 0


class _Release(torch.autograd.Function):
    """Ends the context, on this worker, in its backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, context: int) -> Tensor:
        ctx.context = context
        return tensor * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        current_worker().autograd.release(ctx.context)
        return gradients[0], None


def release_in_backward(x: Tensor, context: int, path: list[str]) -> Tensor:
    if path:
        args = apply_weight(x), context, path[1:]
        result: Tensor = gw.rpc_sync(path[0], release_in_backward, args)
        return result * x
    return _Release.apply(apply_weight(x), context)


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("path", ["0", "1", "12", "121"])
def test_a_context_released_in_a_pass_on_any_worker(
    path: str, seed: int | None
) -> None:
    with World(3, seed=seed) as world, world.as_worker(0):
        services = Autograds(world.workers)
        for _ in range(5):
            with gw.context() as ctx:
                first, *rest = [f"worker{digit}" for digit in path]
                x = doubles(3)
                y = gw.rpc_sync(first, release_in_backward, (x * 2, ctx, rest))
                with pytest.raises(GradwireError, match="Could not find autograd cont"):
                    gw.backward(ctx, [(y * x).sum()])
            wait_until(lambda: not services.passes() + services.contexts())


def test_a_context_that_ends_while_another_thread_runs_its_pass() -> None:
    entered, go_on = threading.Event(), threading.Event()
    errors: list[Exception] = []

    def hook(gradient: Tensor) -> None:
        entered.set()
        assert go_on.wait(LIMIT)

    with World(2) as world, world.as_worker(0):
        with gw.context() as ctx:
            h = doubles(3) * 2
            h.register_hook(hook)
            loss = (gw.rpc_sync("worker1", apply_weight, (h,)) * 2).sum()

            def run() -> None:
                try:
                    world[0].autograd.backward(ctx, [loss])
                except GradwireError as error:
                    errors.append(error)

            thread = threading.Thread(target=run)
            thread.start()
            assert entered.wait(LIMIT)
        go_on.set()
        thread.join(LIMIT)
        assert "Could not find autograd context" in str(errors[0])
        services = Autograds(world.workers)
        wait_until(lambda: not services.passes() + services.contexts())


@contextmanager
def loopback() -> Iterator[None]:
    with World(2) as world, world.as_worker(0):
        yield


sockets = partial(sockets_as_first, 2)


def one_round(x: Tensor) -> None:
    with gw.context() as ctx:
        y = gw.rpc_sync("worker1", apply_weight, (x * 2,))
        z = gw.remote("worker1", apply_weight, (y,)).to_here()
        gw.backward(ctx, [(z * y).sum()])
        gw.get_gradients(ctx)


@pytest.mark.parametrize("make", [loopback, sockets])
@pytest.mark.parametrize("size", [3, 20_000])
def test_hundreds_of_passes_leave_memory_flat(make: Any, size: int) -> None:
    """Once what is kept for good is there."""
    global weight
    before, weight = weight, doubles(size)
    x, process = doubles(size), psutil.Process()
    try:
        with make():
            for _ in range(100):
                one_round(x)
            resident, objects = settled(process)
            for _ in range(400):
                one_round(x)
            # Notes that references and contexts are over leave a moment later.
            wait_until(lambda: settled(process)[1] - objects < 200)
            resident_after, _ = settled(process)
    finally:
        weight = before
    room = 8 << 20  # the allocator's, which has no use for all that it gets back
    assert resident_after - resident < room + 400 * x.nbytes / 2


@pytest.mark.parametrize("make", [loopback, sockets])
def test_a_pass_leaves_nothing_to_the_garbage_collector(make: Any) -> None:
    """Graphs go when their context does. Those in cycles would stay, and go in any thread."""
    x = doubles(3)
    with make():
        one_round(x)
        wait_until(lambda: contexts() == 0)
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            for _ in range(5):
                one_round(x)
            wait_until(lambda: contexts() == 0)
            gc.collect()
            kinds = {type(thing).__module__ for thing in gc.garbage}
            tensors = [thing for thing in gc.garbage if isinstance(thing, Tensor)]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
    assert not tensors
    assert not [kind for kind in kinds if kind.startswith("gradwire._autograd")]


def settled(process: psutil.Process) -> tuple[int, int]:
    """Memory and objects, once all contexts have ended."""
    wait_until(lambda: contexts() == 0)
    gc.collect()
    return process.memory_info().rss, len(gc.get_objects())


# Over processes


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    started = Processes(tmp_path)
    yield started
    started.close()


def train_in_threads(count: int, path: list[str]) -> int:
    """Passes at the same time, each in its own context; how many were exact."""
    worker, exact = current_worker(), []

    def train(number: int) -> None:
        enter(worker)
        for _ in range(3):
            x = doubles(3)
            with gw.context() as ctx:
                y = apply_along(x * number, path)
                gw.backward(ctx, [y.sum()])
                (expected,) = torch.autograd.grad(
                    applied_along_locally(x * number, path), [x]
                )
                close(gw.get_gradients(ctx)[x], expected)
        exact.append(number)

    together(*(partial(train, number) for number in range(1, count + 1)))
    return len(exact)


@pytest.mark.slow
def test_twenty_threads_of_three_workers_at_once(processes: Processes) -> None:
    with processes.serving_world(3):
        workers = ["worker0", "worker1", "worker2"]
        args = 20, ["worker1", "worker2"]
        futures = [gw.rpc_async(name, train_in_threads, args) for name in workers]
        assert [future.wait() for future in futures] == [20, 20, 20]
        wait_until(lambda: not any(gw.rpc_sync(w, contexts) for w in workers))
        assert [gw.rpc_sync(name, passes) for name in workers] == [0, 0, 0]


_entered = threading.Event()


def has_entered() -> None:
    _entered.set()


def weigh_for_ever(x: Tensor) -> Tensor:
    """Its backward tells worker 0, and does not end."""

    def hook(gradient: Tensor) -> None:
        gw.rpc_sync("worker0", has_entered)
        threading.Event().wait()

    result = apply_weight(x)
    result.register_hook(hook)
    return result


def wait_for_it(x: Tensor) -> Tensor:
    h = apply_weight(x)
    result: Tensor = gw.rpc_sync("worker2", weigh_for_ever, (h,)) * h
    return result


def waiting_in_passes() -> list[str]:
    """The threads of this process that are inside a pass."""
    found = []
    for number, frame in sys._current_frames().items():
        while frame is not None:
            if "gradwire/_autograd" in frame.f_code.co_filename.replace("\\", "/"):
                found.append(f"{number} in {frame.f_code.co_name}")
            frame = frame.f_back  # type: ignore[assignment]
    return found


def nobody_waits() -> bool:
    """But the thread that asks, which runs in a context."""
    return all(text.endswith(" in run") for text in waiting_in_passes())


@pytest.mark.slow
def test_a_worker_that_is_killed_in_a_pass(processes: Processes) -> None:
    _entered.clear()
    with processes.serving_world(4) as (_, victim, _):
        caught: list[tuple[float, BaseException]] = []
        with gw.context() as ctx:
            x = doubles(3)
            y = gw.rpc_sync("worker1", wait_for_it, (x * 2,))
            z = gw.rpc_sync("worker3", apply_weight, (y,))

            def run() -> None:
                try:
                    worker.autograd.backward(ctx, [(z * x).sum()])
                except Exception as error:  # noqa: BLE001 looked at below
                    caught.append((time.monotonic(), error))

            worker = current_worker()
            thread = threading.Thread(target=run)
            thread.start()
            assert _entered.wait(LIMIT)
            killed_at = time.monotonic()
            victim.kill()
            thread.join(LIMIT)
            ((raised_at, error),) = caught
            assert isinstance(error, WorkerLostError)
            assert "worker2" in str(error)
            assert raised_at - killed_at < 2
            left = ["worker1", "worker3"]
            wait_until(lambda: all(gw.rpc_sync(w, nobody_waits) for w in left), 2)
            assert [gw.rpc_sync(name, passes) for name in ["worker0", *left]] == [0] * 3
        wait_until(lambda: not any(gw.rpc_sync(w, contexts) for w in left))
        with gw.context() as ctx:
            gw.backward(ctx, [(gw.rpc_sync("worker1", apply_weight, (x,)) * x).sum()])
            expected = torch.autograd.grad((apply_weight(x) * x).sum(), [x])[0]
            close(gw.get_gradients(ctx)[x], expected)
