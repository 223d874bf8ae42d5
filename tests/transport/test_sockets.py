"""Calls over sockets: Unix and TCP, with and without shared memory, and addresses.

The workers live in this process; the sockets between them are real.
"""

import logging
import os
import resource
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

import gradwire as gw
from gradwire._transport import addresses, poller, shared_memory
from gradwire._transport.stores import Place
from gradwire.worker import Worker
from tests.transport.calls import (
    both_ways,
    check_calls,
    echo,
    kept_in,
    link,
    noise,
    pool,
)
from tests.worlds import (
    free_port,
    join_world,
    open_world,
    socket_world,
    together,
    wait_until,
)

SIZES = [0, 1, 32768, 32769, 1 << 20, 5 << 20]
"""Around the sizes from which on tensors travel beside the message, and in memory."""

# What travels


def test_a_synchronous_call_brings_back_what_was_sent(
    transport: dict[str, Any],
) -> None:
    with socket_world(2, **transport) as workers:
        for caller, to in both_ways(workers):
            for turn in range(3):  # the first of a size goes another way than the next
                for size in SIZES:
                    sent = noise(size, turn)
                    assert torch.equal(caller.rpc_sync(to, echo, (sent,)), sent)


def test_an_asynchronous_call_brings_back_what_was_sent(
    transport: dict[str, Any],
) -> None:
    with socket_world(2, **transport) as workers:
        for caller, to in both_ways(workers):
            sent = [noise(size, turn) for turn in range(3) for size in SIZES]
            futures = [caller.rpc_async(to, echo, (x,)) for x in sent]
            for future, x in zip(futures, sent, strict=True):
                assert torch.equal(future.wait(), x)


def test_large_and_small_tensors_travel_in_one_message(
    transport: dict[str, Any],
) -> None:
    with socket_world(2, **transport) as workers:
        sent = [noise(size, i) for i, size in enumerate(SIZES + SIZES[::-1])]
        for _ in range(3):
            came = workers[0].rpc_sync("worker1", list, (sent,))
            assert all(map(torch.equal, came, sent))


def test_many_threads_call_both_ways_at_the_same_time(
    transport: dict[str, Any],
) -> None:
    with socket_world(2, **transport) as workers:

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


def test_all_bytes_and_calls_are_counted(transport: dict[str, Any]) -> None:
    sizes = [
        size for size in SIZES for _ in range(3)
    ]  # also those by the first message
    with socket_world(2, **transport) as workers:
        for size in sizes:
            workers[0].rpc_sync("worker1", echo, (noise(size),))
        made, run = (worker.statistics() for worker in workers)
        assert made["calls_made"] == run["calls_run"] == len(sizes)
        for one, other in (workers, workers[::-1]):
            received = other.statistics()["bytes_received"]
            assert 0 < received - sum(sizes) < 10_000
            # What was sent is counted when the system has taken it; that may be later.
            wait_until(lambda: one.statistics()["bytes_sent"] == received)  # noqa: B023


# Falling back


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Nothing worth a warning happens meanwhile."""
    with caplog.at_level(logging.INFO, "gradwire"):
        yield
    assert not [r.getMessage() for r in caplog.records if r.name == "gradwire"]


@pytest.fixture
def asked_anew() -> Iterator[None]:
    """What this system offers is not remembered, neither from before nor for later."""
    shared_memory.is_available.cache_clear()
    yield
    shared_memory.is_available.cache_clear()


@pytest.mark.usefixtures("quiet", "asked_anew")
def test_it_works_where_there_is_no_memfd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with socket_world(2) as workers:
        check_calls(workers)
        assert repr(link(workers[0])).startswith(
            "<connections to worker1: Unix sockets, "
        )
        assert "shared memory" not in repr(link(workers[0]))


@pytest.mark.usefixtures("quiet", "asked_anew")
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
