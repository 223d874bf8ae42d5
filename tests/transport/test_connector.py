"""What goes wrong for a while when a worker connects to another, and what does not keep it out.

None of it makes a living worker lost; calls succeed, or say at their end what was wrong.
"""

import os
import re
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import gradwire as gw
from gradwire._transport.addresses import unix_address
from gradwire.worker import Worker
from tests.processes import Processes
from tests.worlds import LIMIT, SOON, close_world, open_world, together, wait_until

A_WHILE = 0.3
"""Seconds for which something is wrong."""

Call = Callable[[Worker, float], Any]

CALLS: dict[str, Call] = {
    "sync": lambda worker, limit: worker.rpc_sync("worker1", max, (1, 2), None, limit),
    "async": lambda worker, limit: worker.rpc_async(
        "worker1", max, (1, 2), None, limit
    ).wait(),
    "remote": lambda worker, limit: worker.remote(
        "worker1", max, (1, 2), None, limit
    ).to_here(),
}


@pytest.fixture(params=CALLS.values(), ids=CALLS.keys())
def call(request: pytest.FixtureRequest) -> Call:
    return request.param


@pytest.fixture(params=[True, False], ids=["unix", "tcp"])
def workers(request: pytest.FixtureRequest) -> Iterator[list[Worker]]:
    """Two that have not spoken yet; at the end both are there, and speak."""
    opened = open_world(2, unix_sockets=request.param)
    lost: list[object] = []
    for worker in opened:
        worker.on_leave(lost.append)
    yield opened
    assert opened[0].rpc_sync("worker1", max, (1, 2), timeout=LIMIT) == 2
    assert opened[1].rpc_sync("worker0", max, (1, 2), timeout=LIMIT) == 2
    assert not lost
    close_world(opened)


@contextmanager
def no_descriptors() -> Iterator[None]:
    """This process can open nothing."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.open("/dev/null", os.O_RDONLY)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(taken) + 64, before[1]))
    try:
        while True:
            try:
                taken.append(os.dup(taken[0]))
            except OSError:
                break
        yield
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@contextmanager
def full_backlog(worker: Worker) -> Iterator[None]:
    """It accepts nobody, and as many wait as may."""
    transport = worker._transport
    crowd = []
    for listener in transport._listeners:
        transport._poller.drop(listener)
        listener._sock.listen(1)
    if worker.card.unix:
        while True:
            sock = socket.socket(socket.AF_UNIX)
            crowd.append(sock)
            sock.setblocking(False)
            try:
                sock.connect(unix_address(worker.card.unix))
            except BlockingIOError:
                break
    else:
        for _ in range(4):
            sock = socket.socket()
            crowd.append(sock)
            sock.setblocking(False)
            sock.connect_ex(worker.card.tcp)
    try:
        yield
    finally:
        for sock in crowd:
            sock.close()
        for listener in transport._listeners:
            transport._poller.watch(listener)


@contextmanager
def refused_for_load(
    worker: Worker, refused: threading.Event | None = None
) -> Iterator[None]:
    """It closes all connections before it has heard who connects."""

    def refuse(sock: socket.socket) -> None:
        sock.close()
        if refused is not None:
            refused.set()

    listeners = worker._transport._listeners
    before = [listener._accepted for listener in listeners]
    for listener in listeners:
        listener._accepted = refuse
    try:
        yield
    finally:
        for listener, accepted in zip(listeners, before, strict=True):
            listener._accepted = accepted


TROUBLES: dict[str, Any] = {
    "descriptors": lambda worker: no_descriptors(),
    "backlog": full_backlog,
    "load": refused_for_load,
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_call_succeeds_when_a_passing_trouble_is_over(
    workers: list[Worker], call: Call, trouble: str
) -> None:
    began, over = threading.Event(), threading.Event()

    def be_in_trouble() -> None:
        with TROUBLES[trouble](workers[1]):
            began.set()
            over.wait(A_WHILE)

    def work() -> Any:
        assert began.wait(LIMIT)
        return call(workers[0], LIMIT)

    assert together(be_in_trouble, work)[1] == 2


@pytest.mark.parametrize("trouble", ["descriptors", "load"])
def test_a_call_that_can_get_no_connection_of_its_own_goes_by_the_shared_one(
    workers: list[Worker], trouble: str
) -> None:
    assert CALLS["async"](workers[0], LIMIT) == 2  # that opens it
    with TROUBLES[trouble](workers[1]):
        assert CALLS["sync"](workers[0], LIMIT) == 2


REASONS = {
    "descriptors": "Too many open files",
    "backlog": "cannot connect",
    "load": "connection closed in the handshake|[Rr]eset|Broken pipe",
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_at_the_end_of_its_time_a_call_names_the_reason(
    workers: list[Worker], call: Call, trouble: str
) -> None:
    def ends(limit: float) -> gw.CallTimeout:
        with pytest.raises(gw.CallTimeout) as caught:
            call(workers[0], limit)
        return caught.value

    with TROUBLES[trouble](workers[1]):
        # On a busy machine a while may be over before the first attempt has failed.
        errors = map(ends, [A_WHILE, 3 * A_WHILE, 20 * A_WHILE])
        named = next(e for e in errors if re.search(REASONS[trouble], str(e)))
    assert named.worker == "worker1"


def test_a_call_without_a_deadline_ends_all_the_same(
    workers: list[Worker], call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradwire._transport.connector._LONGEST", A_WHILE)
    with (
        refused_for_load(workers[1]),
        pytest.raises(gw.GradwireError, match="'worker1': cannot connect") as caught,
    ):
        call(workers[0], 0)
    assert not isinstance(caught.value, gw.WorkerLostError)


def test_a_worker_that_shuts_down_stops_to_connect() -> None:
    workers = open_world(2)
    refused = threading.Event()

    def call() -> None:
        with pytest.raises(gw.ClosedError):
            workers[0].rpc_sync("worker1", max, (1, 2))

    def close() -> None:
        assert refused.wait(LIMIT)
        workers[0].close()

    with refused_for_load(workers[1], refused):
        together(call, close)
    close_world(workers, graceful=False)


@pytest.mark.slow
def test_a_thousand_threads_call_at_once(tmp_path: Path) -> None:
    processes = Processes(tmp_path)
    server = processes.serve(1, 2)
    try:
        with processes.world(2, timeout=LIMIT) as worker:
            gate = threading.Barrier(1000)

            def calls() -> int:
                gate.wait(LIMIT)
                return sum(worker.rpc_sync("worker1", int, (1,)) for _ in range(3))

            assert sum(together(*[calls] * 1000)) == 3000
        assert server.wait() == 0
    finally:
        processes.close()


# Connections that say nothing


@pytest.mark.parametrize("count", [64, 400])
def test_silent_strangers_keep_nobody_out(
    workers: list[Worker], call: Call, count: int
) -> None:
    crowd: list[socket.socket] = []
    acceptor = workers[1]._transport._acceptor  # type: ignore[attr-defined]
    acceptor.patience = LIMIT  # none of them goes because its time is up
    try:
        for _ in range(count):
            crowd.append(socket.create_connection(workers[1].card.tcp, LIMIT))
            if workers[1].card.unix:
                crowd.append(socket.socket(socket.AF_UNIX))
                crowd[-1].connect(unix_address(workers[1].card.unix))
        wait_until(lambda: len(acceptor._strangers) >= 64)
        assert call(workers[0], SOON) == 2
    finally:
        for sock in crowd:
            sock.close()


def test_refusals_are_logged_once_in_an_interval(
    workers: list[Worker],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gradwire._transport.acceptor._LOG_INTERVAL", 0.5)
    for _ in range(20):
        with socket.create_connection(workers[1].card.tcp, LIMIT) as sock:
            sock.sendall(b"x" * 200)
            try:
                assert sock.recv(1) == b""
            except ConnectionResetError:
                pass
    wait_until(lambda: "refused 19 more connections" in caplog.text)
    assert caplog.text.count("refused") == 2
