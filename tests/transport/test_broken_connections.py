"""Connections that are slow, silent or broken, calls whose time is up, and what idle workers cost.

The workers live in this process; the sockets between them are real.
"""

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire._transport.faulty import Faults
from gradwire._wire.messages import RESULT
from gradwire.worker import Worker
from tests.transport.calls import (
    check_calls,
    descriptors,
    echo,
    in_use,
    link,
    noise,
)
from tests.transport.slow_network import Proxy
from tests.worlds import (
    LIMIT,
    SOON,
    close_world,
    meanwhile,
    open_world,
    socket_world,
    together,
    vanish,
    wait_until,
)

# When time is up


class Gate:
    """Holds calls up until it is opened; tests know it as a global."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.entered = threading.Semaphore(0)

    def __call__(self) -> None:
        self.entered.release()
        assert self.opened.wait(LIMIT)


GATE = Gate()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    fresh = Gate()
    monkeypatch.setitem(globals(), "GATE", fresh)
    yield fresh
    fresh.opened.set()


def pass_gate(x: Any) -> Any:
    GATE()
    return x


def test_all_threads_that_wait_for_one_answer_get_it(gate: Gate) -> None:
    with socket_world(2) as workers, ThreadPoolExecutor(4) as threads:
        future = workers[0].rpc_async("worker1", pass_gate, (7,))
        waits = [threads.submit(future.wait, LIMIT) for _ in range(4)]
        assert gate.entered.acquire(timeout=LIMIT)
        gate.opened.set()
        assert [wait.result(LIMIT / 2) for wait in waits] == [7] * 4


def test_a_call_that_takes_too_long_says_what_and_where(gate: Gate) -> None:
    with socket_world(2) as workers:
        late = workers[0].rpc_async("worker1", pass_gate, (1,), timeout=0.1)
        for wait in (
            late.wait,
            lambda: workers[0].rpc_sync("worker1", pass_gate, (1,), timeout=0.1),
        ):
            with pytest.raises(gw.CallTimeout, match="pass_gate on worker 'worker1'"):
                wait()
        assert workers[0].rpc_sync("worker1", max, (1, 2)) == 2
        assert workers[0].rpc_async("worker1", max, (1, 2)).wait() == 2
        gate.opened.set()


def test_an_answer_that_came_too_late_gives_its_memory_back(
    gate: Gate, transport: dict[str, Any]
) -> None:
    with socket_world(2, **transport) as workers:
        sent = noise(1 << 20)
        for _ in range(3):  # so that segments are in use
            workers[0].rpc_sync("worker1", echo, (sent,))
        before = descriptors()
        for _ in range(3):
            with pytest.raises(gw.CallTimeout):
                workers[0].rpc_sync("worker1", pass_gate, (sent,), timeout=0.05)
        late = workers[0].rpc_async("worker1", pass_gate, (sent,), timeout=0.05)
        with pytest.raises(gw.CallTimeout):
            late.wait()
        gate.opened.set()
        check_calls(workers)
        made = [*workers[0]._transport._links(), *workers[1]._transport._links()]
        memories = [one._memory.pool for one in made]
        pools = [one for one in memories if one is not None]
        wait_until(lambda: not any(map(in_use, pools)))
        # The connections that were owed a response are closed; others were opened meanwhile.
        wait_until(lambda: descriptors() <= before + 2 * len(made))


def test_a_request_cut_short_by_its_timeout_leaves_no_half_open_connection() -> None:
    with socket_world(2, unix_sockets=False) as workers:
        workers[0].rpc_sync("worker1", max, (1, 2))
        before = descriptors()
        large = torch.zeros(256 << 20, dtype=torch.uint8)
        with pytest.raises(gw.CallTimeout):
            workers[0].rpc_sync("worker1", torch.numel, (large,), timeout=0.005)
        wait_until(lambda: descriptors() <= before)
        assert workers[0].rpc_sync("worker1", max, (1, 2)) == 2


def test_calls_time_out_while_all_threads_over_there_are_stuck(gate: Gate) -> None:
    with socket_world(2, threads=2) as workers:
        stuck = [workers[0].rpc_async("worker1", pass_gate, (i,)) for i in range(2)]
        for _ in stuck:
            gate.entered.acquire()
        start = time.monotonic()
        with pytest.raises(gw.CallTimeout):
            workers[0].rpc_async("worker1", max, (1, 2), timeout=0.2).wait()
        assert time.monotonic() - start < SOON
        assert workers[0].rpc_sync("worker1", max, (1, 2), timeout=SOON) == 2
        gate.opened.set()
        assert [future.wait() for future in stuck] == [0, 1]
        assert workers[0].rpc_async("worker1", max, (1, 2)).wait() == 2


def test_a_call_times_out_also_while_it_connects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gradwire._transport.connector._PATIENCE", 2 * SOON)
    workers = open_world(2)
    taken: list[socket.socket] = []
    for listener in workers[1]._transport._listeners:
        monkeypatch.setattr(listener, "_accepted", taken.append)
    start = time.monotonic()
    with pytest.raises(gw.CallTimeout):
        workers[0].rpc_sync("worker1", max, (1, 2), timeout=0.2)
    assert time.monotonic() - start < SOON
    for sock in taken:
        sock.close()
    close_world(workers, graceful=False)


# Links that break, and those that do not


BY_TCP: dict[str, Any] = {"unix_sockets": False, "heartbeat": 0.5}


def test_who_gives_up_while_it_connects_is_not_taken_for_lost() -> None:
    with socket_world(2) as (one, two):
        gone: list[object] = []
        two.on_leave(gone.append)
        for _ in range(20):  # some of them after the other end has accepted
            with pytest.raises(gw.CallTimeout):
                one.rpc_async("worker1", time.sleep, args=(0.01,), timeout=1e-4).wait()
        assert one.rpc_sync("worker1", max, args=(1, 2)) == 2
        assert two.rpc_sync("worker0", max, args=(1, 2)) == 2
        assert gone == []


def test_a_link_that_went_silent_is_found_by_the_heartbeat(gate: Gate) -> None:
    with Proxy() as proxy:
        workers = open_world(2, apart={1: proxy.options}, **BY_TCP)
        waiting: list[Callable[[], Any]] = [
            lambda: workers[0].rpc_sync("worker1", pass_gate, (1,)),
            workers[0].rpc_async("worker1", pass_gate, (2,)).wait,
        ]

        def fails(wait: Callable[[], Any]) -> float:
            with pytest.raises(gw.WorkerLostError, match="lost worker 'worker1'"):
                wait()
            return time.monotonic()

        def freeze() -> float:
            for _ in waiting:
                assert gate.entered.acquire(timeout=LIMIT)
            proxy.frozen.set()
            return time.monotonic()

        frozen_at, *lost_at = together(
            freeze,
            lambda: fails(waiting[0]),
            lambda: fails(waiting[1]),
        )
        assert max(lost_at) - frozen_at < 2.5
        wait_until(lambda: workers[1].get_worker_infos() == [("worker1", 1)])
        gate.opened.set()
        close_world(workers, graceful=False)


def test_a_link_with_nothing_to_say_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    lost = threading.Event()
    with socket_world(2, **BY_TCP) as workers:
        workers[0].rpc_async("worker1", max, (1, 2)).wait()
        for worker in workers:
            worker.on_leave(lambda _: lost.set())
        assert not lost.wait(1.5)
        check_calls(workers)


@pytest.mark.parametrize("direction", ["request", "answer"])
def test_a_slow_link_is_not_taken_for_a_broken_one(direction: str) -> None:
    # Some megabytes fit into buffers on the way, so that pings come late behind them;
    # the heartbeat allows for that, but not for the time that all of it takes.
    options = {"unix_sockets": False, "heartbeat": 1.2}
    large = torch.ones(4 << 20)
    with (
        Proxy() as proxy,
        socket_world(2, apart={1: proxy.options}, **options) as workers,
    ):
        proxy.pause = 0.005
        if direction == "request":
            future = workers[0].rpc_async("worker1", torch.numel, (large,))
            size = future.wait()
        else:
            future = workers[0].rpc_async("worker1", torch.ones, (4 << 20,))
            size = future.wait().numel()
        proxy.pause = 0.0
        assert size == 4 << 20


@pytest.mark.parametrize("dead", [0, 1, 2])
def test_a_dead_worker_that_nobody_spoke_to_holds_no_shutdown_up(dead: int) -> None:
    workers = open_world(3)
    vanish(workers.pop(dead))
    close_world(workers)


def test_calls_are_served_until_all_want_to_end() -> None:
    workers = open_world(2)

    def early() -> None:
        workers[0].shutdown()

    def late() -> None:
        # The part of the other has come when it wants to end.
        wait_until(lambda: len(workers[0]._collectives._gatherings))
        assert workers[1].rpc_sync("worker0", max, (1, 2)) == 2
        assert workers[1].rpc_async("worker0", max, (1, 2)).wait() == 2
        workers[1].shutdown()

    together(early, late)


# What it costs to do nothing


def threads_of(worker: Worker) -> int:
    prefix = f"gradwire-{worker.name}-"
    return sum(t.name.startswith(prefix) for t in threading.enumerate())


def burst(workers: list[Worker]) -> None:
    def call() -> None:
        for i in range(50):
            assert workers[0].rpc_sync("worker1", max, (i, 7)) == max(i, 7)

    together(*[call] * 8)


def test_after_a_burst_threads_and_descriptors_are_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gradwire._transport.connection_pool._LEASE_IDLE", 0.2)
    monkeypatch.setattr("gradwire._transport.connection._QUIET", 0.1)
    monkeypatch.setattr("gradwire._transport.sockets._TICK", 0.1)
    monkeypatch.setattr("gradwire.threads._IDLE", 0.2)
    with socket_world(2) as workers:
        before = descriptors()
        burst(workers)
        # Both ends of the link are in this process.
        wait_until(lambda: descriptors() - before <= 2 * 8, limit=15.0)
        wait_until(lambda: max(map(threads_of, workers)) <= 12, limit=15.0)
        check_calls(workers)


def test_workers_that_only_wait_use_less_than_one_percent_of_a_processor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gradwire._transport.connection._QUIET", 0.1)
    with socket_world(2) as workers:
        burst(workers)

        def is_at_rest() -> bool:
            before = time.process_time()
            threading.Event().wait(1.0)  # the time to measure over
            return time.process_time() - before < 0.01 * 1.0

        wait_until(is_at_rest)


def test_a_worker_that_can_accept_nobody_does_not_spin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Exhausted:
        """A listening socket of a process that has no descriptors left."""

        def __init__(self, sock: socket.socket) -> None:
            self._sock = sock
            self.tries = 0

        def fileno(self) -> int:
            return self._sock.fileno()

        def accept(self) -> None:
            self.tries += 1
            raise OSError(24, "Too many open files")

        def close(self) -> None:
            self._sock.close()

    with socket_world(1) as (worker,):
        listener = worker._transport._listeners[-1]
        exhausted = Exhausted(listener._sock)
        monkeypatch.setattr(listener, "_sock", exhausted)
        with socket.create_connection(worker.card.tcp):
            wait_until(lambda: exhausted.tries)
            began = time.monotonic()
            threading.Event().wait(0.3)  # the time to measure over, or longer
            assert exhausted.tries < 30 + 20 * (time.monotonic() - began)


def test_nobody_counts_as_lost_when_all_shut_down_together(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "gradwire"):
        for _ in range(10):
            workers = open_world(3)
            for worker in workers:
                for i in range(3):
                    worker.rpc_sync(i, max, (1, 2))
            close_world(workers)
    assert not [record.getMessage() for record in caplog.records]


# Answers that nobody must miss


def test_a_waiter_is_woken_although_the_answer_came_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    twice = {"faults": Faults(repeat=1.0, kinds=frozenset([RESULT]))}
    with socket_world(2, apart={1: twice}) as workers:
        assert workers[0].rpc_sync("worker1", max, (1, 2)) == 2  # connected by now
        caller, shared = workers[0]._agent.caller, link(workers[0]).shared
        is_open, opening, answered = caller._open, threading.Event(), shared._answered
        go_on = threading.Event()

        def open_slowly(*args: Any) -> Any:
            opening.set()
            assert go_on.wait(LIMIT)
            return is_open(*args)

        monkeypatch.setattr(caller, "_open", open_slowly)
        future = workers[0].rpc_async("worker1", max, (3, 4))
        assert opening.wait(LIMIT)
        wait_until(lambda: shared._answered == answered + 2)  # and the second was late
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(future.wait, LIMIT / 2)
            wait_until(lambda: shared._role.sleeping or shared._role.is_taken)
            go_on.set()
            assert waiting.result(LIMIT / 4) == 4


def test_a_burst_that_is_over_at_once_leaves_its_connection_watched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket_world(2) as workers:
        assert workers[0].rpc_async("worker1", max, (1, 2)).wait() == 2
        shared = link(workers[0]).shared
        with monkeypatch.context() as patch:
            patch.setattr(workers[0]._executor, "call_at", lambda when, task: task())
            shared._start_timer()
        future = workers[0].rpc_async("worker1", max, (3, 4))
        wait_until(future.done)  # nobody waits for it, so the poller has to read it


GATES: list[threading.Event] = []


def pass_one_of(gates: int) -> None:
    assert GATES[gates].wait(LIMIT)


def test_a_callback_that_waits_for_another_response_gets_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(globals(), "GATES", [threading.Event(), threading.Event()])
    other_came, seen = threading.Event(), []
    with socket_world(2) as workers:
        assert workers[0].rpc_async("worker1", max, (1, 2)).wait() == 2
        one, other = (
            workers[0].rpc_async("worker1", pass_one_of, (i,)) for i in range(2)
        )

        def keep_the_reader(_: Any) -> None:
            GATES[1].set()
            seen.append(other_came.wait(LIMIT / 2))

        def open_when_read() -> None:
            role = link(workers[0]).shared._role
            wait_until(lambda: role.waiters and role.is_taken)
            GATES[0].set()

        one.add_done_callback(keep_the_reader)
        other.add_done_callback(lambda _: other_came.set())
        with meanwhile(open_when_read):
            one.wait(LIMIT)  # reads its response, and is kept by what that calls
        assert seen == [True]
