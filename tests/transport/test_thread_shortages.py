"""A short shortage of threads ("can't start new thread") leaves nothing broken."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

import gradwire as gw
from gradwire.testing import World
from gradwire.threads import Executor
from gradwire.worker import Worker
from tests.worlds import (
    LIMIT,
    close_world,
    open_world,
    socket_world,
    together,
    wait_until,
)


class Shortage:
    """Python can start no thread for gradwire, while it is on; the test's own it can."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.refused = 0
        self._is_on = False
        start = threading.Thread.start

        def start_or_not(thread: threading.Thread) -> None:
            if self._is_on and thread.name.startswith("gradwire-"):
                self.refused += 1
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", start_or_not)

    @contextmanager
    def on(self) -> Iterator[None]:
        self._is_on = True
        try:
            yield
        finally:
            self._is_on = False


@pytest.fixture
def shortage(monkeypatch: pytest.MonkeyPatch) -> Shortage:
    return Shortage(monkeypatch)


# The executor


@pytest.fixture
def executor() -> Iterator[Executor]:
    opened = Executor("test", 4)
    opened.begin()
    yield opened
    opened.close()
    assert opened.join(LIMIT)


@pytest.mark.parametrize("how", ["submit", "host", "call_at"])
def test_tasks_run_when_there_are_threads_again(
    executor: Executor, shortage: Shortage, how: str
) -> None:
    ran = threading.Event()
    with shortage.on():
        if how == "call_at":
            executor.call_at(0.0, ran.set)
        else:
            getattr(executor, how)(ran.set)
        wait_until(lambda: shortage.refused > 3)
        assert not ran.is_set()
    assert ran.wait(LIMIT)
    wait_until(lambda: executor._active == 0)


def test_an_executor_that_cannot_begin_can_try_again(shortage: Shortage) -> None:
    executor = Executor("test", 4)
    with shortage.on(), pytest.raises(RuntimeError, match="can't start new thread"):
        executor.begin()
    executor.begin()
    ran = threading.Event()
    executor.submit(ran.set)
    assert ran.wait(LIMIT)
    executor.close()
    assert executor.join(LIMIT)


def test_a_monitor_that_could_not_be_started_is_tried_again(
    shortage: Shortage,
) -> None:
    executor = Executor("test", 4)
    early, late = threading.Event(), threading.Event()
    with shortage.on():
        executor.look_at(0.0, early.set)
        assert shortage.refused
    executor.look_at(0.0, late.set)  # wants it, too
    assert early.wait(LIMIT)
    assert late.wait(LIMIT)
    executor.close()
    assert executor.join(LIMIT)


def test_a_thread_that_waits_needs_no_other_to_go_on(
    executor: Executor, shortage: Shortage
) -> None:
    went_on, ran = threading.Event(), threading.Event()

    def wait() -> None:
        executor.submit(ran.set)
        with shortage.on(), executor.waiting():
            wait_until(lambda: shortage.refused > 3)
        went_on.set()

    executor.submit(wait)
    assert went_on.wait(LIMIT)
    assert ran.wait(LIMIT)


# Worlds

WAYS: dict[str, Callable[[Worker], Any]] = {
    "sync": lambda w: w.rpc_sync("worker1", max, (1, 2), None, LIMIT),
    "async": lambda w: w.rpc_async("worker1", max, (1, 2), None, LIMIT).wait(),
    "remote": lambda w: w.remote("worker1", max, (1, 2), None, LIMIT).to_here(),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "has_called", [True, False], ids=["again", "for the first time"]
)
def test_calls_over_sockets_succeed_when_it_is_over(
    shortage: Shortage, way: str, has_called: bool
) -> None:
    with socket_world(2) as workers:
        lost: list[object] = []
        for worker in workers:
            worker.on_leave(lost.append)
        if has_called:
            assert WAYS[way](workers[0]) == 2
        begun = threading.Event()

        def be_short() -> None:
            with shortage.on():
                begun.set()
                threading.Event().wait(0.3)  # the time that it lasts

        def call() -> Any:
            assert begun.wait(LIMIT)
            return WAYS[way](workers[0])

        results = together(be_short, *[call] * 20)
        assert results[1:] == [2] * 20
        assert not lost
        # what releases a reference may still be under way
        wait_until(lambda: workers[0].debug_info()["calls_in_flight"] == 0)
        assert WAYS[way](workers[0]) == 2


@pytest.mark.parametrize("way", WAYS)
def test_calls_in_one_process_succeed_when_it_is_over(
    shortage: Shortage, way: str
) -> None:
    with World(2) as world:
        begun = threading.Event()

        def be_short() -> None:
            with shortage.on():
                begun.set()
                wait_until(lambda: shortage.refused > 3)

        def call() -> Any:
            assert begun.wait(LIMIT)
            return WAYS[way](world[0])

        assert together(be_short, call)[1] == 2
        wait_until(lambda: world[0].debug_info()["calls_in_flight"] == 0)


def test_timers_and_listeners_go_on_after_it(shortage: Shortage) -> None:
    workers = open_world(2)
    with shortage.on():
        future = workers[0].rpc_async("worker1", max, (1, 2), timeout=0.2)
        with suppress(gw.CallTimeout):
            assert future.wait() == 2  # a thread that was there did it
    for worker, to in ((workers[0], "worker1"), (workers[1], "worker0")):
        assert worker.rpc_sync(to, max, (1, 2), timeout=LIMIT) == 2
        with pytest.raises(gw.CallTimeout):
            worker.rpc_async(to, nap, timeout=0.1).wait()
    close_world(workers)


def nap() -> None:
    threading.Event().wait(0.5)


def test_a_world_that_cannot_begin_leaves_nothing_behind(shortage: Shortage) -> None:
    with shortage.on(), pytest.raises(RuntimeError, match="can't start new thread"):
        open_world(1)
    with socket_world(1) as (worker,):
        assert worker.rpc_sync("worker0", max, (1, 2)) == 2
