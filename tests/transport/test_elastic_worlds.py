"""How workers join and leave worlds that have no fixed size."""

import gc
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch.distributed import HashStore, Store, TCPStore

import gradwire as gw
from gradwire._transport.stores import Place
from gradwire.worker import Worker
from tests.rpc.functions import held, holding
from tests.transport.stores import NewStore, new_tcp_store
from tests.worlds import (
    LIMIT,
    close_world,
    join_world,
    socket_world,
    together,
    vanish,
    wait_until,
)

SHORT = 0.3
"""Seconds to wait for workers that will not come."""


def elastic(store: Store) -> Place:
    return Place(store, None, None, None)


def talk(workers: list[Worker]) -> None:
    """Everyone calls everyone."""
    for worker in workers:
        for other in workers:
            assert worker.rpc_sync(other.name, max, (other.id, -1)) == other.id


class Visitors:
    """Who came and who went, as one worker was told."""

    def __init__(self, worker: Worker) -> None:
        self.came: list[tuple[str, int]] = []
        self.went: list[tuple[str, int]] = []
        worker.on_join(self.came.append)
        worker.on_leave(self.went.append)


def test_workers_come_and_go(new_store: NewStore) -> None:
    store = new_store()
    with join_world("host", elastic(store)) as host:
        visitors = Visitors(host)
        with join_world("guest", elastic(store)) as guest:
            talk([host, guest])
            assert visitors.came == [("guest", 1)]
            assert host.get_worker_infos() == [("host", 0), ("guest", 1)]
        wait_until(lambda: visitors.went == [("guest", 1)])
        assert host.get_worker_infos() == [("host", 0)]
        with pytest.raises(
            gw.WorkerLostError, match="lost worker 'guest': it has left"
        ):
            host.rpc_sync("guest", max, (1, 2))


def test_workers_that_come_at_the_same_time_all_know_each_other() -> None:
    store = HashStore()
    names = [f"guest{i}" for i in range(6)]
    workers = together(
        *(lambda n=n: join_world(n, elastic(store)) for n in names)  # type: ignore[misc]
    )
    for worker in workers:
        wait_until(lambda w=worker: len(w.get_worker_infos()) == 6)  # type: ignore[misc]
    talk(workers)
    close_world(workers)


def test_ids_are_never_used_twice_and_names_are_free_again() -> None:
    store = HashStore()
    ids = []
    for _ in range(3):
        with join_world("guest", elastic(store)) as guest:
            ids.append(guest.id)
    assert ids == [0, 1, 2]


@pytest.fixture
def store() -> Store:
    return HashStore()


@pytest.fixture
def host(store: Store) -> Iterator[Worker]:
    with join_world("host", elastic(store)) as worker:
        yield worker


def test_a_name_is_free_again_for_those_who_knew_its_last_holder(
    host: Worker, store: Store
) -> None:
    for turn in range(3):
        with join_world("guest", elastic(store)) as guest:
            assert host.rpc_sync("guest", max, (turn, 0)) == turn
            assert host.get_worker_info("guest").id == guest.id


def test_a_name_in_use_is_refused_and_the_holder_unharmed(
    host: Worker, store: Store
) -> None:
    with pytest.raises(ValueError, match="worker name 'host' is taken by worker 0"):
        join_world("host", elastic(store))
    with join_world("guest", elastic(store)) as guest:
        assert guest.id == 2
        assert guest.rpc_sync("host", max, (1, 2)) == 2
        assert guest.get_worker_infos() == [("host", 0), ("guest", 2)]


def test_a_name_is_free_again_after_a_loss(host: Worker, store: Store) -> None:
    visitors = Visitors(host)
    vanish(join_world("guest", elastic(store)))
    wait_until(lambda: visitors.went == [("guest", 1)])
    with join_world("guest", elastic(store)) as guest:
        assert guest.id == 2
        assert host.rpc_sync("guest", max, (1, 2)) == 2


def test_a_name_is_free_again_though_nobody_saw_its_holder_die(store: Store) -> None:
    vanish(join_world("server", elastic(store)))
    with join_world("server", elastic(store)) as server:
        assert server.rpc_sync("server", max, (1, 2)) == 2


@contextmanager
def dying(store: Store, name: str) -> Iterator[socket.socket]:
    """A worker has died, but its port still takes connections; nobody will answer them."""
    worker = join_world(name, elastic(store))
    vanish(worker)
    with socket.socket() as port:
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port.bind(worker.card.tcp)
        port.listen()
        yield port


@pytest.mark.parametrize("proof", ["its port closes", "others lost it"])
def test_a_replacement_waits_until_its_predecessor_is_gone(
    store: Store, proof: str
) -> None:
    with dying(store, "server") as port:

        def lose() -> None:
            sock, _ = port.accept()  # the newcomer asks who is there
            with sock:
                if proof == "its port closes":
                    port.close()
                else:
                    store.set("gradwire/default/elastic/gone/0", "1")

        server, _ = together(lambda: join_world("server", elastic(store)), lose)
        with server:
            assert server.rpc_sync("server", max, (1, 2)) == 2


def test_a_predecessor_that_may_live_keeps_its_name(store: Store) -> None:
    with dying(store, "server"):
        problem = "'server' is taken by worker 0, which does not answer"
        with pytest.raises(ValueError, match=problem):
            join_world("server", elastic(store), join_timeout=0.1)


def test_who_began_to_join_and_vanished_holds_nobody_up() -> None:
    store = HashStore()
    store.add("gradwire/default/elastic/ids", 2)  # as two that were then killed
    with join_world("guest", elastic(store)) as guest:
        assert guest.id == 2
        assert guest.get_worker_infos() == [("guest", 2)]


def test_nobody_is_found_once_the_store_is_gone() -> None:
    stores = [new_tcp_store()]
    client = TCPStore(
        "127.0.0.1", stores[0].port, is_master=False, wait_for_workers=False
    )
    with join_world("alone", elastic(client)) as alone:
        stores.clear()
        for _ in range(2):
            with pytest.raises(ValueError, match="no worker 'nobody'"):
                alone.rpc_sync("nobody", max, (1, 2))


def test_an_elastic_world_is_left_without_waiting_for_the_others() -> None:
    store = HashStore()
    first = join_world("first", elastic(store))
    second = join_world("second", elastic(store))
    first.shutdown()
    wait_until(lambda: second.get_worker_infos() == [("second", 1)])
    second.shutdown()


def test_an_elastic_world_is_not_left_later_than_told() -> None:
    store = HashStore()
    first = join_world("first", elastic(store))
    second = join_world("second", elastic(store))
    with holding() as hold:
        waiting = second.rpc_async("first", held, timeout=0)
        assert hold.entered.wait(LIMIT)
        with pytest.raises(gw.CallTimeout, match="in flight"):
            second.shutdown(timeout=0.05)
        hold.release.set()
    assert second.is_closed
    with pytest.raises(gw.ClosedError):
        waiting.wait()
    first.shutdown()


def test_a_fixed_and_an_elastic_world_share_a_store() -> None:
    store = HashStore()
    with (
        socket_world(2, store=store) as fixed,
        join_world("guest", elastic(store)) as guest,
    ):
        assert guest.get_worker_infos() == [("guest", 0)]
        talk(fixed)


class TableStore(Store):
    """A store written in Python, which only its world holds."""

    def __init__(self) -> None:
        super().__init__()
        self._table: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        self._table[key] = value

    def get(self, key: str) -> bytes:
        return self._table[key]

    def add(self, key: str, amount: int) -> int:
        total = int(self._table.get(key, b"0")) + amount
        self._table[key] = str(total).encode()
        return total

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        if self._table.get(key, b"") == expected:
            self._table[key] = desired
        return self._table[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self._table for key in keys)


def test_a_store_written_in_python_lives_as_long_as_its_world() -> None:
    place = elastic(TableStore())
    first = join_world("first", place)
    second = join_world("second", place)
    del place
    gc.collect()
    talk([first, second])
    close_world([first, second])
