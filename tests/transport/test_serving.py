"""Workers that serve until an elastic world ends, and worlds that wait for enough workers."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from torch.distributed import HashStore, Store

import gradwire as gw
from gradwire._transport.rendezvous import note_finished
from gradwire._transport.stores import Place
from gradwire.api import enter
from gradwire.testing import World
from gradwire.worker import Worker
from tests.worlds import join_world, meanwhile, together, vanish, wait_until

SHORT = 0.3


@pytest.fixture
def store() -> Store:
    return HashStore()


def join(name: str, store: Store, **options: int) -> Worker:
    return join_world(name, Place(store, None, None, None), **options)


def serve(*names: str, store: Store) -> list[Callable[[], None]]:
    """Servers that have joined, each to be served in a thread of its own."""
    workers = together(*(lambda n=n: join(n, store) for n in names))  # type: ignore[misc]
    return [worker.serve for worker in workers]


def test_servers_end_when_those_who_work_have_left(store: Store) -> None:
    trainer = join("trainer", store)
    with meanwhile(*serve("a", "b", store=store)):
        assert trainer.rpc_sync("a", max, (1, 2)) == 2
        trainer.shutdown()


def test_servers_wait_for_all_who_work(store: Store) -> None:
    first, second = join("first", store), join("second", store)
    ended = threading.Event()
    (serving,) = serve("server", store=store)
    with meanwhile(lambda: (serving(), ended.set())):
        first.shutdown()
        assert second.rpc_sync("server", max, (1, 2)) == 2
        assert not ended.is_set()
        second.shutdown()


def test_a_worker_that_is_lost_is_waited_for(store: Store) -> None:
    trainer = join("trainer", store)
    ended = threading.Event()
    (serving,) = serve("server", store=store)
    with meanwhile(lambda: (serving(), ended.set())):
        vanish(trainer)
        again = join("trainer", store)
        assert again.rpc_sync("server", max, (1, 2)) == 2
        assert not ended.is_set()
        again.shutdown()


def test_a_worker_that_its_launcher_gave_up_is_not_waited_for(store: Store) -> None:
    trainer, lost = join("trainer", store), join("lost", store)
    with meanwhile(*serve("server", store=store)):
        vanish(lost)
        trainer.shutdown()
        note_finished(store, "default", "lost")


def test_a_server_ends_with_the_work_that_ended_before_it_came(store: Store) -> None:
    server = join("server", store)
    join("trainer", store).shutdown()
    vanish(server)
    join("server", store).serve()


def test_a_server_ends_when_it_is_told_to(store: Store) -> None:
    with join("trainer", store) as trainer:
        with meanwhile(*serve("server", store=store)):
            wait_until(lambda: len(trainer.get_worker_infos()) == 2)
            before = enter(trainer)
            gw.stop_serving("server")
            enter(before)
        wait_until(lambda: len(trainer.get_worker_infos()) == 1)


def test_in_a_world_of_fixed_size_serving_is_leaving_together() -> None:
    world = World(2)
    with meanwhile(world[1].serve):
        with world.as_worker(0):
            assert gw.rpc_sync("worker1", max, (1, 2)) == 2
            with pytest.raises(gw.GradwireError, match="all leave it together"):
                gw.stop_serving("worker1")
        world[0].shutdown()


def test_a_newcomer_waits_until_enough_have_come(store: Store) -> None:
    names = ["a", "b", "c"]
    workers = together(
        *(lambda n=n: join(n, store, min_workers=3) for n in names)  # type: ignore[misc]
    )
    for worker in workers:
        assert [worker.rpc_sync(name, max, (1, 2)) for name in names] == [2, 2, 2]
    together(*(worker.shutdown for worker in workers))


def test_who_comes_back_waits_for_nobody_again(store: Store) -> None:
    first, second = together(
        lambda: join("first", store, min_workers=2),
        lambda: join("second", store, min_workers=2),
    )
    vanish(second)
    first.shutdown()
    join("second", store, min_workers=2).shutdown()


def test_who_came_is_named_when_too_few_have(store: Store) -> None:
    with pytest.raises(
        gw.GradwireError, match=r"only 1 of 2 workers .* arrived .*: alone"
    ):
        join_world(
            "alone",
            Place(store, None, None, None),
            min_workers=2,
            join_timeout=SHORT,
        )


def test_a_world_is_elastic_or_of_fixed_size(store: Store) -> None:
    before = enter(None)
    try:
        with pytest.raises(ValueError, match="world_size=2 and min_workers=1"):
            gw.init_rpc("a", rank=0, world_size=2, store=store, min_workers=1)
    finally:
        enter(before)
    with pytest.raises(ValueError, match="min_workers=0: must be at least 1"):
        gw.Options(min_workers=0)
