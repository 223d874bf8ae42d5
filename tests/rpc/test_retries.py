"""Idempotent calls that go on when their worker has come back."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from torch.distributed import HashStore, Store

import gradwire as gw
from gradwire._transport.stores import Place
from gradwire.retries import call_with_retries
from gradwire.testing import World
from gradwire.worker import Worker
from tests.worlds import LIMIT, join_world, meanwhile, vanish, wait_until

begun = threading.Event()
finish = threading.Event()


@gw.idempotent
def double(number: int) -> int:
    return 2 * number


@gw.idempotent
def slow(number: int) -> int:
    """Says that it runs; the first run of it does not end before its worker does."""
    if begun.is_set():
        return 2 * number
    begun.set()
    finish.wait(LIMIT)
    return 0


def unmarked() -> None: ...


@gw.idempotent
def lose_another() -> None:
    raise gw.WorkerLostError("somebody", "it was a test")


@pytest.fixture
def store() -> Store:
    begun.clear()
    finish.clear()
    return HashStore()


def join(name: str, store: Store) -> Worker:
    return join_world(name, Place(store, None, None, None))


@pytest.fixture
def caller(store: Store) -> Iterator[Worker]:
    with join("caller", store) as worker:
        yield worker


def call(
    caller: Worker, function: object, *args: object, retries: int = 1, **more: float
) -> object:
    timeout = more.get("timeout", LIMIT)
    return call_with_retries(
        caller,
        "server",
        (function, args, None),  # type: ignore[arg-type]
        timeout,
        retries,
    )


def test_a_call_waits_for_a_worker_that_was_lost(caller: Worker, store: Store) -> None:
    vanish(join("server", store))
    wait_until(lambda: len(caller.get_worker_infos()) == 1)
    results: list[object] = []
    with (
        meanwhile(lambda: results.append(call(caller, double, 4))),
        join("server", store),
    ):
        wait_until(lambda: results == [8])


def test_a_call_under_way_is_made_again(caller: Worker, store: Store) -> None:
    server = join("server", store)
    results: list[object] = []

    def finish_late() -> None:
        """When the server is gone, but not its thread."""
        wait_until(lambda: len(caller.get_worker_infos()) == 1)
        finish.set()

    with meanwhile(lambda: results.append(call(caller, slow, 4))):
        assert begun.wait(LIMIT)
        with meanwhile(finish_late):
            vanish(server)
        with join("server", store):
            wait_until(lambda: results == [8])


def test_without_retries_left_the_loss_is_raised(caller: Worker, store: Store) -> None:
    vanish(join("server", store))
    wait_until(lambda: len(caller.get_worker_infos()) == 1)
    with pytest.raises(gw.WorkerLostError, match="server"):
        call(caller, double, 4, retries=0)


def test_who_does_not_come_back_in_time_is_lost(caller: Worker, store: Store) -> None:
    vanish(join("server", store))
    wait_until(lambda: len(caller.get_worker_infos()) == 1)
    before = time.monotonic()
    with pytest.raises(gw.WorkerLostError, match="server"):
        call(caller, double, 4, retries=5, timeout=0.2)
    assert 0.2 <= time.monotonic() - before < LIMIT / 2


def test_nobody_comes_back_to_a_world_of_fixed_size() -> None:
    with World(2) as world:
        world.kill(1)
        with world.as_worker(0), pytest.raises(gw.WorkerLostError):
            gw.rpc_sync("worker1", double, (1,), timeout=LIMIT, retries=3)


def test_the_loss_of_another_worker_is_no_reason_to_call_again(
    caller: Worker, store: Store
) -> None:
    with join("server", store), pytest.raises(gw.WorkerLostError, match="somebody"):
        call(caller, lose_another, retries=3)


def test_only_marked_functions_are_called_again() -> None:
    problem = r"unmarked may run twice.*gw\.idempotent"
    with (
        World(2) as world,
        world.as_worker(0),
        pytest.raises(ValueError, match=problem),
    ):
        gw.rpc_sync("worker1", unmarked, retries=1)


@pytest.mark.parametrize("to", ["worker1", 1, gw.WorkerInfo("worker1", 1)])
def test_a_worker_is_named_as_always(to: str | int | gw.WorkerInfo) -> None:
    with World(2) as world, world.as_worker(0):
        assert gw.rpc_sync(to, double, (3,), retries=2) == 6


def test_a_worker_whose_loss_is_not_known_yet_has_not_come_back(
    caller: Worker, store: Store
) -> None:
    server = join("server", store)
    assert not caller.wait_for("server", server.id, time.monotonic())
    vanish(server)
    with join("server", store):
        assert caller.wait_for("server", server.id, time.monotonic() + LIMIT)


def test_a_newcomer_knows_who_was_lost_before_it_came(store: Store) -> None:
    vanish(join("server", store))
    store.set("gradwire/default/elastic/gone/0", "1")  # as one who noticed would
    with join("newcomer", store) as newcomer:
        with pytest.raises(gw.WorkerLostError, match="gone before this worker came"):
            newcomer.rpc_sync("server", max, (1, 2))
        with pytest.raises(ValueError, match="there is no worker 'other'"):
            newcomer.rpc_sync("other", max, (1, 2))
