"""Calls in signal handlers and finalizers: they work or raise at once, wherever they come."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire._wire.frames import note
from gradwire._wire.messages import PING
from gradwire.locks import CheckedLock
from gradwire.worker import Worker
from tests.interruption import Calling, Interruption, Way, collecting, ticking
from tests.worlds import LIMIT, SOON, socket_world

SECONDS = 0.5  # for which calls are interrupted


def pause_and_add(x: torch.Tensor) -> torch.Tensor:
    time.sleep(0.002)
    return x + 1


def call_sync(worker: Worker, function: Any) -> Any:
    return worker.rpc_sync("worker1", function, (torch.ones(2),), timeout=SOON)


def call_async(worker: Worker, function: Any) -> Any:
    return worker.rpc_async("worker1", function, (torch.ones(2),), timeout=SOON).wait()


def make_and_fetch(worker: Worker, function: Any) -> Any:
    return worker.remote("worker1", function, (torch.ones(2),), timeout=SOON).to_here()


def call_here(worker: Worker, function: Any) -> Any:
    return worker.rpc_sync("worker0", function, (torch.ones(2),), timeout=SOON)


WAYS = [call_sync, call_async, make_and_fetch, call_here]


@pytest.fixture
def workers() -> Iterator[list[Worker]]:
    with socket_world(2) as world:
        yield world


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("interrupting", WAYS)
def test_a_signal_handler_may_call(
    workers: list[Worker], way: Way, interrupting: Way
) -> None:
    interruption = Interruption(workers[0], interrupting)
    end = time.monotonic() + SECONDS
    with ticking(interruption):
        while time.monotonic() < end or not interruption.results:
            assert torch.equal(way(workers[0], pause_and_add), 2 * torch.ones(2))
            assert torch.equal(way(workers[0], torch.neg), -torch.ones(2))
    interruption.check()


def test_a_signal_handler_may_call_where_its_thread_decrypts() -> None:
    with socket_world(2, unix_sockets=False, tls=True) as workers:
        interruption = Interruption(workers[0], call_async)
        x = torch.ones(60_000)  # several records of TLS
        with ticking(interruption):
            end = time.monotonic() + 3 * SECONDS
            while time.monotonic() < end or not interruption.results:
                found = workers[0].rpc_async("worker1", torch.neg, (x,), timeout=SOON)
                assert torch.equal(found.wait(), -x)
        interruption.check()


def test_what_could_not_be_sent_there_goes_with_the_next() -> None:
    with socket_world(2, unix_sockets=False, tls=True) as workers:
        call_async(workers[0], torch.neg)
        shared = workers[0]._transport._out[1].shared  # type: ignore[attr-defined]
        decrypting = shared.framed.sock._lock
        with decrypting, pytest.raises(gw.GradwireError, match="signal handler"):
            shared.note(PING)
        assert [*shared.queue._unsent] == [note(PING)]
        shared.queue.flush()
        assert not shared.queue._unsent


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("interrupting", WAYS)
def test_a_finalizer_may_call(
    workers: list[Worker], way: Way, interrupting: Way
) -> None:
    interruption = Interruption(workers[0], interrupting)
    end = time.monotonic() + SECONDS / 2
    with collecting():
        while time.monotonic() < end or not interruption.results:
            Calling(interruption)
            assert torch.equal(way(workers[0], torch.neg), -torch.ones(2))
    interruption.check()


def test_where_it_would_wait_for_its_own_thread_a_call_raises(
    workers: list[Worker],
) -> None:
    worker = workers[0]
    call_async(worker, torch.neg)
    shared = worker._transport._out[1].shared  # type: ignore[attr-defined]
    for lock in (shared._lock, shared.queue.lock, worker._agent.caller._lock):
        with lock, pytest.raises(gw.GradwireError, match="signal handler"):
            call_async(worker, torch.neg)
    assert torch.equal(call_async(worker, torch.neg), -torch.ones(2))


@pytest.mark.parametrize("way", [call_sync, call_async, call_here])
def test_where_others_wait_for_its_own_thread_a_call_raises(
    workers: list[Worker], way: Way
) -> None:
    callee = workers[0] if way is call_here else workers[1]
    lock = callee._agent._peers[0]._lock  # of which requests have come
    way(workers[0], torch.neg)
    with lock, pytest.raises(gw.GradwireError, match="signal handler"):
        way(workers[0], torch.neg)
    assert torch.equal(way(workers[0], torch.neg), -torch.ones(2))


def test_where_its_thread_takes_a_frame_apart_a_call_raises(
    workers: list[Worker],
) -> None:
    call_async(workers[0], torch.neg)
    framed = workers[0]._transport._out[1].shared.framed  # type: ignore[attr-defined]
    pull, refused = framed._pull, list[BaseException]()

    def interrupted() -> None:
        if threading.current_thread() is threading.main_thread() and not refused:
            with pytest.raises(gw.GradwireError, match="signal handler") as caught:
                call_async(workers[0], torch.neg)
            refused.append(caught.value)
        pull()

    framed._pull = interrupted
    end = time.monotonic() + LIMIT
    while not refused and time.monotonic() < end:
        assert torch.equal(call_async(workers[0], torch.neg), -torch.ones(2))
    assert refused


def test_a_wait_for_what_its_thread_delivers_just_now_raises(
    workers: list[Worker],
) -> None:
    agent: Any = workers[0]._agent
    complete, refused = agent.complete, list[BaseException]()
    future: Any = None

    def interrupted(sender: int, frame: Any) -> None:
        if threading.current_thread() is threading.main_thread() and not refused:
            with pytest.raises(gw.GradwireError, match="signal handler") as caught:
                future.wait()
            refused.append(caught.value)
        complete(sender, frame)

    agent.complete = interrupted
    end = time.monotonic() + LIMIT
    while not refused and time.monotonic() < end:
        future = workers[0].rpc_async("worker1", abs, (-1,), timeout=SOON)
        assert future.wait() == 1
    assert refused


def test_a_checked_lock_is_a_lock() -> None:
    lock = CheckedLock()
    with lock:
        with pytest.raises(gw.GradwireError), lock:
            pass
        for arguments in ((), (False,), (True, 0.1)):
            with pytest.raises(gw.GradwireError):
                lock.acquire(*arguments)
        taken: list[bool] = []
        other = threading.Thread(target=lambda: taken.append(lock.acquire(False)))
        other.start()
        other.join()
        assert taken == [False]
    assert lock.acquire(timeout=0.1)
    lock.release()
