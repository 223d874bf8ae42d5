"""Requests that are held back: only where that pays, never for long, and never lost."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gradwire import WorkerLostError
from gradwire._rpc import deferred_requests
from gradwire._rpc.calls import Pending
from gradwire._rpc.deferred_requests import Held, HeldBack
from gradwire._rpc.members import Peer, Seen
from gradwire._transport.base import Card
from gradwire._wire.frames import Parcel
from gradwire.threads import Bell
from gradwire.worker import Worker
from tests.manual_time import ManualExecutor
from tests.worlds import close_world, open_world, socket_world, wait_until

LIMIT = 60.0
CONVINCED = 3
MOMENT = deferred_requests._HOLD


class Outbox:
    """A `HeldBack` whose clock is moved by hand, and what it has sent."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.executor = ManualExecutor()
        executor: Any = self.executor
        self.held = HeldBack(executor, self._send, clock=self.executor.clock)

    def _send(self, held: Held) -> None:
        self.sent.append(held.pending.call)


@pytest.fixture
def outbox() -> Outbox:
    return Outbox()


@pytest.fixture
def convinced() -> Outbox:
    """One that has had requests taken back until holding them pays."""
    outbox = Outbox()
    for call in range(100, 100 + CONVINCED):
        outbox.held.hold(request(call))
        assert outbox.held.take(1, call) is None
    outbox.sent.clear()
    return outbox


def request(call: int, to: int = 1) -> Held:
    peer = Peer(Card(name=f"worker{to}", id=to), Card(name="me", id=9), False)
    return Held(peer, Parcel(1, 1, b""), Pending(call, to, 0, 0, None))


def test_requests_go_out_at_once_until_they_would_have_been_taken_back(
    outbox: Outbox,
) -> None:
    outbox.held.hold(request(1))
    outbox.held.hold(request(2))
    assert outbox.sent == [1, 2]
    assert not outbox.held.requests


def test_a_request_that_is_held_back_can_be_taken_once(convinced: Outbox) -> None:
    held, first = convinced.held, request(1)
    held.hold(first)
    assert not convinced.sent
    assert held.take(1, 2) is None
    assert held.take(1, 1) is first
    assert held.take(1, 1) is None
    convinced.executor.advance(3600)
    assert not convinced.sent


def test_the_next_request_sends_the_one_before_and_ends_the_holding(
    convinced: Outbox,
) -> None:
    for call in (1, 2, 3):
        convinced.held.hold(request(call))
    assert convinced.sent == [1, 2, 3]


@pytest.mark.parametrize("later", [0.0, 0.1, 0.9])
def test_what_nobody_takes_goes_out_by_itself(convinced: Outbox, later: float) -> None:
    held, executor = convinced.held, convinced.executor
    held.hold(request(1))
    assert held.take(1, 1) is not None
    executor.advance(MOMENT * later)  # the timer of the first is under way
    held.hold(request(2))
    executor.advance(MOMENT * 0.9)
    assert not convinced.sent
    executor.advance(MOMENT * 1.1)
    assert convinced.sent == [2]
    held.hold(request(3))  # it did not pay
    assert convinced.sent == [2, 3]


def test_without_requests_no_timer_runs(convinced: Outbox) -> None:
    convinced.held.hold(request(1))
    assert not convinced.executor.is_idle
    assert convinced.held.take(1, 1) is not None
    convinced.executor.advance(3 * MOMENT)
    assert convinced.executor.is_idle


def test_each_worker_has_a_place_of_its_own(convinced: Outbox) -> None:
    held = convinced.held
    held.hold(request(1, to=1))
    assert held.take(1, 1) is not None
    held.hold(request(2, to=2))
    held.flush(1)
    assert not convinced.sent
    held.flush(2)
    assert convinced.sent == [2]
    assert held.drop(2) is None
    assert held.drop_all() == []


# Through `remote` and `to_here`

Workers = list[Worker]


@pytest.fixture
def workers() -> Iterator[Workers]:
    workers = open_world(2)
    yield workers
    close_world(workers, graceful=False)


def add(worker: Worker, number: int) -> Any:
    return worker.remote("worker1", torch.add, args=(torch.ones(2), number))


def test_values_are_right_whether_or_not_they_travel_with_their_call(
    workers: Workers,
) -> None:
    for number in range(10):
        rref = add(workers[0], number)
        assert rref.to_here().tolist() == [number + 1] * 2
        wait_until(rref.confirmed_by_owner)  # its answer may come after the value
    apart = [add(workers[0], number) for number in range(5)]
    assert [rref.to_here().tolist() for rref in apart] == [
        [n + 1] * 2 for n in range(5)
    ]


def test_a_call_whose_value_nobody_asks_for_is_run_all_the_same(
    workers: Workers,
) -> None:
    for number in range(5):
        add(workers[0], number).to_here()
    rref = add(workers[0], 1)
    wait_until(rref.confirmed_by_owner)


def test_a_call_that_is_held_back_fails_with_its_worker(workers: Workers) -> None:
    for number in range(5):
        add(workers[0], number).to_here()
    rref = add(workers[0], 1)
    gone = Bell()
    workers[0].on_leave(lambda info: gone.ring())
    workers[1].close()
    assert gone.wait(LIMIT)
    with pytest.raises(WorkerLostError, match="worker1"):
        rref.to_here()


def test_a_request_that_goes_as_another_one_keeps_its_number() -> None:
    """The other side remembers every number that never comes."""
    with socket_world(2) as workers:
        for count in range(20):
            assert workers[0].remote("worker1", abs, (-count,)).to_here() == count
        seen = workers[1]._agent._peers[0]._seen
        wait_until(lambda: seen == Seen(seen._below, most=seen.most))
