"""Calls over sockets: Unix and TCP, with and without shared memory, and what is left after.

The workers live in this process; the sockets between them are real.
"""

import logging
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

import gradwire as gw
from gradwire._transport import addresses, poller, shared_memory
from gradwire._transport.faulty import Faults
from gradwire._transport.rendezvous import Place
from gradwire._wire.messages import RESULT
from gradwire.worker import Worker
from tests.transport.slow_network import Proxy
from tests.worlds import (
    LIMIT,
    close_world,
    free_port,
    join_world,
    open_world,
    socket_world,
    together,
    vanish,
    wait_until,
)

SIZES = [0, 1, 32768, 32769, 1 << 20, 5 << 20]
"""Around the sizes from which on tensors travel beside the message, and in memory."""

MANNERS: dict[str, dict[str, Any]] = {
    "shared memory": {},
    "unix": {"shared_memory": False},
    "tcp": {"unix_sockets": False},
    "ipv6": {"unix_sockets": False, "bind": "::1"},
}


@pytest.fixture(params=MANNERS)
def manner(request: pytest.FixtureRequest) -> dict[str, Any]:
    if request.param == "ipv6" and not has_ipv6():
        pytest.skip("this host has no IPv6 loopback address")
    return MANNERS[request.param]


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def link(worker: Worker, to: int = 1) -> Any:
    """The link that a worker has made to another."""
    return worker._transport._out[to]


BYTES = torch.arange((5 << 20) + 256).to(torch.uint8)


def noise(size: int, seed: int = 0) -> torch.Tensor:
    return BYTES[seed % 256 : seed % 256 + size].clone()


def echo(x: torch.Tensor) -> torch.Tensor:
    return x


def both_ways(workers: list[Worker]) -> list[tuple[Worker, str]]:
    return [(workers[0], "worker1"), (workers[1], "worker0")]


# What travels


def test_a_synchronous_call_brings_back_what_was_sent(manner: dict[str, Any]) -> None:
    with socket_world(2, **manner) as workers:
        for caller, to in both_ways(workers):
            for turn in range(3):  # the first of a size goes another way than the next
                for size in SIZES:
                    sent = noise(size, turn)
                    assert torch.equal(caller.rpc_sync(to, echo, (sent,)), sent)


def test_an_asynchronous_call_brings_back_what_was_sent(manner: dict[str, Any]) -> None:
    with socket_world(2, **manner) as workers:
        for caller, to in both_ways(workers):
            sent = [noise(size, turn) for turn in range(3) for size in SIZES]
            futures = [caller.rpc_async(to, echo, (x,)) for x in sent]
            for future, x in zip(futures, sent, strict=True):
                assert torch.equal(future.wait(), x)


def test_large_and_small_tensors_travel_in_one_message(manner: dict[str, Any]) -> None:
    with socket_world(2, **manner) as workers:
        sent = [noise(size, i) for i, size in enumerate(SIZES + SIZES[::-1])]
        for _ in range(3):
            came = workers[0].rpc_sync("worker1", list, (sent,))
            assert all(map(torch.equal, came, sent))


def test_many_threads_call_both_ways_at_the_same_time(manner: dict[str, Any]) -> None:
    with socket_world(2, **manner) as workers:

        def call(caller: Worker, to: str, seed: int) -> None:
            for turn in range(5):
                for size in (1, 32769, 1 << 20):
                    sent = noise(size, seed + turn)
                    assert torch.equal(caller.rpc_sync(to, echo, (sent,)), sent)
                    assert torch.equal(caller.rpc_async(to, echo, (sent,)).wait(), sent)

        together(
            *(
                lambda w=w, to=to, i=i: call(w, to, 100 * i)  # type: ignore[misc]
                for w, to in both_ways(workers)
                for i in range(4)
            )
        )


@pytest.mark.parametrize(
    ("options", "way"),
    [
        ({}, "Unix sockets, shared memory"),
        ({"shared_memory": False}, "Unix sockets"),
        ({"unix_sockets": False}, "TCP"),
    ],
)
def test_options_choose_the_way(options: dict[str, Any], way: str) -> None:
    with socket_world(2, **options) as workers:
        workers[0].rpc_sync("worker1", max, (1, 2))
        assert repr(link(workers[0])) == f"<connections to worker1: {way}, 1 leased>"
        assert workers[0].statistics()["links"] == {"worker1": way}


def test_all_bytes_and_calls_are_counted(manner: dict[str, Any]) -> None:
    sizes = [
        size for size in SIZES for _ in range(3)
    ]  # also those by the first message
    with socket_world(2, **manner) as workers:
        for size in sizes:
            workers[0].rpc_sync("worker1", echo, (noise(size),))
        made, run = (worker.statistics() for worker in workers)
        assert made["calls_made"] == run["calls_run"] == len(sizes)
        for one, other in (workers, workers[::-1]):
            received = other.statistics()["bytes_received"]
            assert 0 < received - sum(sizes) < 10_000
            # What was sent is counted when the system has taken it; that may be later.
            wait_until(lambda: one.statistics()["bytes_sent"] == received)  # noqa: B023


# Shared memory


def pool(worker: Worker) -> shared_memory.SegmentPool:
    """The segments in which a worker's requests to worker1 travel."""
    return link(worker)._pool


def kept_in(segment_pool: shared_memory.SegmentPool) -> list[shared_memory.Segment]:
    """The segments that it keeps to send from."""
    return [s for many in segment_pool._by_size.values() for s in many]


def in_use(segment_pool: shared_memory.SegmentPool) -> int:
    return sum(not segment.is_free for segment in kept_in(segment_pool))


KEPT: list[torch.Tensor] = []


def keep(x: torch.Tensor) -> int:
    KEPT.append(x)
    return len(KEPT)


@pytest.fixture
def kept() -> Iterator[list[torch.Tensor]]:
    yield KEPT
    KEPT.clear()


@pytest.mark.parametrize("size", [100_000, 1 << 20])
def test_tensors_kept_over_there_stay_intact_while_more_arrive(
    size: int, kept: list[torch.Tensor]
) -> None:
    with socket_world(2) as workers:
        for i in range(60):
            workers[0].rpc_sync("worker1", keep, (noise(size, i),))
            if i % 3 == 0:
                kept[i] = noise(1)  # let go of some, so that segments come back
        assert len(kept_in(pool(workers[0]))) > 0
        for i, tensor in enumerate(kept):
            assert i % 3 == 0 or torch.equal(tensor, noise(size, i))
        kept.clear()


def test_results_kept_here_stay_intact_while_more_arrive() -> None:
    with socket_world(2) as workers:
        size = 1 << 20
        results = {}
        for i in range(30):
            result = workers[0].rpc_sync("worker1", noise, (size, i))
            if i % 2:
                results[i] = result
        future = workers[0].rpc_async("worker1", noise, (size, 99))
        assert all(torch.equal(results[i], noise(size, i)) for i in results)
        assert torch.equal(future.wait(), noise(size, 99))
        results.clear()


def test_a_view_keeps_the_segment_it_lies_in() -> None:
    with socket_world(2) as workers:
        rows = []
        for i in range(20):
            rows.append(workers[0].rpc_sync("worker1", noise, (1 << 20, i))[1000:1010])
        for i, row in enumerate(rows):
            assert torch.equal(row, noise(1 << 20, i)[1000:1010])
        rows.clear()


def test_what_arrived_can_be_written_to_without_harm() -> None:
    with socket_world(2) as workers:
        sent = noise(1 << 20)
        for _ in range(5):
            came = workers[0].rpc_sync("worker1", echo, (sent,))
            came.zero_()
            assert torch.equal(sent, noise(1 << 20))


def test_segments_are_used_again_when_their_tensors_are_dropped() -> None:
    with socket_world(2) as workers:
        for i in range(50):
            workers[0].rpc_sync("worker1", echo, (noise(1 << 20, i),))
        assert 1 <= len(kept_in(pool(workers[0]))) <= 2
        wait_until(lambda: in_use(pool(workers[0])) == 0)


def test_segments_that_do_not_come_back_are_not_made_for_ever(
    kept: list[torch.Tensor],
) -> None:
    with socket_world(2) as workers:
        for i in range(50):
            workers[0].rpc_sync("worker1", keep, (noise(1 << 20, i),))
        assert len(kept_in(pool(workers[0]))) < 10
        kept.clear()


def test_tensors_outlive_the_worker_that_received_them() -> None:
    with socket_world(2) as workers:
        results = [
            workers[0].rpc_sync("worker1", noise, (1 << 20, i)) for i in (1, 2, 3)
        ]
    for i, result in enumerate(results, start=1):
        assert torch.equal(result, noise(1 << 20, i))


def test_segments_need_no_descriptors() -> None:
    with socket_world(2) as workers:
        workers[0].rpc_sync("worker1", max, (1, 2))
        before = descriptors()
        for size in (100_000, 1 << 20, 3 << 20, 5 << 20):
            for _ in range(3):
                workers[0].rpc_sync("worker1", echo, (noise(size),))
        assert len(kept_in(pool(workers[0]))) == 4
        assert descriptors() == before


def test_trimmed_segments_are_used_again() -> None:
    with socket_world(2) as workers:
        for turn in range(3):
            for i in range(4):
                sent = noise(1 << 20, turn + i)
                result = workers[0].rpc_sync("worker1", echo, (sent,))
                assert torch.equal(result, sent)
                del result
            pool(workers[0]).trim(0.0)


# Falling back


def check_calls(workers: list[Worker]) -> None:
    for caller, to in both_ways(workers):
        for size in [1, 1 << 20, 1 << 20, 1 << 20]:
            assert torch.equal(caller.rpc_sync(to, echo, (noise(size),)), noise(size))


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Nothing worth a warning happens meanwhile."""
    with caplog.at_level(logging.INFO, "gradwire"):
        yield
    assert not [r.getMessage() for r in caplog.records if r.name == "gradwire"]


@pytest.mark.usefixtures("quiet")
def test_it_works_where_there_is_no_memfd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with socket_world(2) as workers:
        check_calls(workers)
        assert repr(link(workers[0])).startswith(
            "<connections to worker1: Unix sockets, "
        )
        assert "shared memory" not in repr(link(workers[0]))


@pytest.mark.usefixtures("quiet")
def test_it_works_where_memfd_is_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(name: str, flags: int) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", forbidden)
    with socket_world(2) as workers:
        check_calls(workers)


@pytest.mark.usefixtures("quiet")
def test_it_works_when_memory_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.ftruncate

    def full(fd: int, size: int) -> None:
        if size > shared_memory.START:
            raise OSError(28, "No space left on device")
        real(fd, size)

    monkeypatch.setattr(os, "ftruncate", full)
    with socket_world(2) as workers:
        check_calls(workers)
        assert "shared memory" in repr(link(workers[0]))
        assert len(kept_in(pool(workers[0]))) == 0


@pytest.mark.usefixtures("quiet")
def test_it_works_where_there_are_no_unix_sockets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing() -> tuple[socket.socket, str]:
        raise OSError("no such thing here")

    monkeypatch.setattr(addresses, "listen_unix", missing)
    with socket_world(2) as workers:
        check_calls(workers)
        assert repr(link(workers[0])).startswith("<connections to worker1: TCP")


@pytest.mark.usefixtures("quiet")
def test_tcp_is_used_when_a_unix_address_cannot_be_reached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = addresses.listen_unix

    def listen_elsewhere() -> tuple[socket.socket, str]:
        return real()[0], "@gradwire-nobody-listens-here"

    monkeypatch.setattr(addresses, "listen_unix", listen_elsewhere)
    with socket_world(2) as workers:
        check_calls(workers)
        assert repr(link(workers[0])).startswith("<connections to worker1: TCP")


def test_it_works_without_epoll(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poller, "_Epoll", poller._Portable)
    with socket_world(2) as workers:
        check_calls(workers)
        futures = [workers[0].rpc_async("worker1", max, (i, 7)) for i in range(200)]
        assert [f.wait() for f in futures] == [max(i, 7) for i in range(200)]
        assert isinstance(workers[0]._transport._poller._system, poller._Portable)


# Addresses


def test_it_listens_on_a_port_of_the_range_given() -> None:
    first = free_port()
    with socket_world(2, ports=(first, first + 20)) as workers:
        ports = [worker.card.tcp[1] for worker in workers]
        assert all(first <= port <= first + 20 for port in ports)
        assert ports[0] != ports[1]


def test_the_port_range_can_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port = free_port()
    monkeypatch.setenv("GRADWIRE_PORTS", str(port))
    with socket_world(1) as (worker,):
        assert worker.card.tcp == ("127.0.0.1", port)


def test_a_range_without_a_free_port_is_said_and_leaves_nothing_open() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        problem = (
            rf"cannot listen on '127\.0\.0\.1', port {port} .*set bind= and ports="
        )
        with pytest.raises(OSError, match=problem):
            open_world(1, ports=(port, port))


def test_who_could_not_listen_can_try_again_in_the_same_store() -> None:
    store = HashStore()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match="cannot listen"):
            join_world("worker0", Place(store, 0, 2, None), ports=(port, port))
    with socket_world(2, store=store, join_timeout=5.0) as workers:
        check_calls(workers)


def test_an_address_of_another_machine_cannot_be_bound() -> None:
    with pytest.raises(OSError, match=r"cannot listen on '203\.0\.113\.1'.*set bind="):
        open_world(1, bind="203.0.113.1")


def test_the_advertised_address_is_what_others_connect_to() -> None:
    away = {"unix_sockets": False, "advertise": "localhost"}
    with socket_world(2, **away) as workers:
        check_calls(workers)
        assert workers[0].card.tcp[0] == "localhost"


def test_a_worker_on_all_interfaces_advertises_this_machines_name() -> None:
    with socket_world(1, bind="0.0.0.0") as (worker,):
        assert worker.card.tcp[0] == socket.gethostname()


# Deep and many


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    """Both ends of every connection are in this process: twice as many as usual."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def other_of(name: str) -> str:
    return "worker1" if name == "worker0" else "worker0"


def descend(depth: int) -> int:
    """Call back and forth, that many calls deep."""
    if not depth:
        return 0
    to = other_of(gw.get_worker_info().name)
    return 1 + gw.rpc_sync(to, descend, (depth - 1,))


def descend_async(depth: int) -> int:
    if not depth:
        return 0
    to = other_of(gw.get_worker_info().name)
    return 1 + gw.rpc_async(to, descend_async, (depth - 1,)).wait()


@pytest.mark.usefixtures("many_descriptors")
@pytest.mark.parametrize("function", [descend, descend_async])
def test_calls_nest_five_hundred_deep(function: Callable[[int], int]) -> None:
    with socket_world(2, threads=4) as workers:
        assert workers[0].rpc_sync("worker1", function, (500,)) == 500


def call_back_sync(i: int) -> int:
    return gw.rpc_sync("worker0", max, (i, 10))


def call_back_async(i: int) -> int:
    return gw.rpc_async("worker0", max, (i, 10)).wait()


@pytest.mark.usefixtures("many_descriptors")
@pytest.mark.parametrize("function", [call_back_sync, call_back_async])
def test_a_thousand_calls_at_once_each_call_back(
    function: Callable[[int], int],
) -> None:
    with socket_world(2, threads=8) as workers:
        calls = range(1000)
        futures = [workers[0].rpc_async("worker1", function, (i,)) for i in calls]
        assert [future.wait() for future in futures] == [max(i, 10) for i in calls]


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


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


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
    gate: Gate, manner: dict[str, Any]
) -> None:
    with socket_world(2, **manner) as workers:
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
        pools = [one._pool for one in made if one._pool is not None]
        wait_until(lambda: not any(map(in_use, pools)))
        # The lanes that were owed an answer are closed; others were opened meanwhile.
        wait_until(lambda: descriptors() <= before + 2 * len(made))


def test_a_request_cut_short_by_its_timeout_leaves_no_half_open_lane() -> None:
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
        assert time.monotonic() - start < 2.0
        assert workers[0].rpc_sync("worker1", max, (1, 2), timeout=5) == 2
        gate.opened.set()
        assert [future.wait() for future in stuck] == [0, 1]
        assert workers[0].rpc_async("worker1", max, (1, 2)).wait() == 2


def test_a_call_times_out_also_while_it_connects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workers = open_world(2)
    taken: list[socket.socket] = []
    for listener in workers[1]._transport._listeners:
        monkeypatch.setattr(listener, "_accepted", taken.append)
    start = time.monotonic()
    with pytest.raises(gw.CallTimeout):
        workers[0].rpc_sync("worker1", max, (1, 2), timeout=0.2)
    assert time.monotonic() - start < 2.0
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
            threading.Event().wait(0.3)  # the time to measure over
            assert exhausted.tries < 30


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
