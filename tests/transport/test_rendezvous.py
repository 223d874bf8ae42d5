"""How workers meet: over every kind of store, in worlds of fixed size."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed import HashStore, Store, TCPStore

import gradwire as gw
from gradwire._transport import wait_report
from gradwire._transport.stores import Place, find_place
from gradwire.worker import Worker
from tests.transport.stores import NewStore, new_tcp_store
from tests.worlds import (
    LIMIT,
    close_world,
    free_port,
    join_world,
    open_world,
    socket_world,
    together,
    wait_until,
)

SHORT = 0.3
"""Seconds to wait for workers that will not come."""


@pytest.fixture
def no_env(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def meet_at(url: str, size: int = 2) -> list[Worker]:
    """Workers that each find the place by its URL, as separate processes do."""

    def joiner(rank: int) -> Callable[[], Worker]:
        return lambda: join_world(
            f"worker{rank}", find_place(url, None, rank, size, LIMIT)
        )

    return together(*map(joiner, range(size)))


def elastic(store: Store) -> Place:
    return Place(store, None, None, None)


def talk(workers: list[Worker]) -> None:
    """Everyone calls everyone."""
    for worker in workers:
        for other in workers:
            assert worker.rpc_sync(other.name, max, (other.id, -1)) == other.id


# Stores


def test_workers_meet_in_any_store(new_store: NewStore) -> None:
    store = new_store()
    with socket_world(3, store=store) as workers:
        talk(workers)
        infos = [(f"worker{i}", i) for i in range(3)]
        assert all(w.get_worker_infos() == infos for w in workers)


def test_workers_meet_in_a_file(tmp_path: Path) -> None:
    workers = meet_at(f"file://{tmp_path}/meet")
    talk(workers)
    close_world(workers)


def test_workers_meet_at_a_tcp_address() -> None:
    workers = meet_at(f"tcp://127.0.0.1:{free_port()}")
    talk(workers)
    close_world(workers)


def test_workers_meet_where_the_environment_says(no_env: pytest.MonkeyPatch) -> None:
    no_env.setenv("MASTER_ADDR", "127.0.0.1")
    no_env.setenv("MASTER_PORT", str(free_port()))
    workers = meet_at("env://")
    talk(workers)
    close_world(workers)


def test_rank_and_size_come_from_the_environment(no_env: pytest.MonkeyPatch) -> None:
    no_env.setenv("MASTER_ADDR", "localhost")
    no_env.setenv("MASTER_PORT", str(free_port()))
    no_env.setenv("RANK", "0")
    no_env.setenv("WORLD_SIZE", "3")
    place = find_place(None, None, None, None, LIMIT)
    assert (place.rank, place.size, place.host) == (0, 3, None)


def test_rank_and_size_can_stand_in_the_url(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/meet?rank=0&world_size=2"
    place = find_place(url, None, None, None, LIMIT)
    assert (place.rank, place.size) == (0, 2)


def test_what_is_given_wins_over_url_and_environment(
    no_env: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    no_env.setenv("RANK", "7")
    url = f"file://{tmp_path}/meet?rank=5&world_size=9"
    place = find_place(url, None, 0, 2, LIMIT)
    assert (place.rank, place.size) == (0, 2)


def test_the_agents_store_is_used_and_not_hosted(no_env: pytest.MonkeyPatch) -> None:
    agents = new_tcp_store()
    no_env.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    no_env.setenv("MASTER_ADDR", "127.0.0.1")
    no_env.setenv("MASTER_PORT", str(agents.port))
    place = find_place("env://", None, 0, 1, LIMIT)
    agents.set("known", "to both")
    assert place.store.get("known") == b"to both"


def test_a_world_of_one_needs_nobody_else() -> None:
    with socket_world(1) as (only,):
        assert only.rpc_sync("worker0", max, (1, 2)) == 2


# Mistakes


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("http://somewhere", "use env://, tcp://host:port or file:///path"),
        ("tcp://somewhere", "lacks a host or port"),
        ("tcp://:123", "lacks a host or port"),
        ("file://", "names no file"),
        ("file:///x?rank=first", "RANK='first': must be a number"),
        ("file:///x?rank=2&world_size=2", r"rank=2: must be in 0\.\.1"),
        ("file:///x?rank=0&world_size=0", "world_size=0: must be at least 1"),
        ("file:///x?world_size=2", r"rank=None: must be in 0\.\.1"),
    ],
)
def test_a_bad_url_is_refused_with_what_is_wrong(url: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        find_place(url, None, None, None, LIMIT)


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "MASTER_PORT", "RANK"])
def test_a_missing_variable_is_named_at_once(
    no_env: pytest.MonkeyPatch, missing: str
) -> None:
    given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "RANK": "0"}
    given["WORLD_SIZE"] = "2"
    del given[missing]
    for name, value in given.items():
        no_env.setenv(name, value)
    with pytest.raises(ValueError, match=missing):
        gw.init_rpc("worker0")


def test_a_port_that_is_no_number_is_named(no_env: pytest.MonkeyPatch) -> None:
    no_env.setenv("MASTER_ADDR", "127.0.0.1")
    no_env.setenv("MASTER_PORT", "http")
    with pytest.raises(ValueError, match="MASTER_PORT='http'"):
        gw.init_rpc("worker0", rank=0, world_size=1)


def test_a_store_that_nobody_hosts_is_named() -> None:
    url = f"tcp://127.0.0.1:{free_port()}"
    with pytest.raises(gw.GradwireError, match=r"cannot reach the store at 127\.0\.0"):
        find_place(url, None, 1, 2, SHORT)


def test_a_port_in_use_is_named() -> None:
    other = new_tcp_store()
    url = f"tcp://127.0.0.1:{other.port}"
    with pytest.raises(
        gw.GradwireError, match=f"cannot open the store at.*{other.port}"
    ):
        find_place(url, None, 0, 2, SHORT)


@pytest.mark.parametrize("name", ["", "two words", "a/b", "x" * 129, "é", None])
def test_a_name_that_is_not_valid_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is not valid: use 1 to 128 letters"):
        join_world(name, Place(HashStore(), 0, 1, None))


def test_two_workers_of_one_name_learn_it_before_the_others_have_come() -> None:
    store = HashStore()
    kinds: list[str] = []

    def join(rank: int) -> None:
        used = r"worker name 'twin' is used by ranks \[0, 1\]: names must differ"
        with pytest.raises((ValueError, gw.GradwireError), match=used) as caught:
            join_world("twin", Place(store, rank, 3, None), join_timeout=LIMIT)
        kinds.append(caught.type.__name__)

    together(lambda: join(0), lambda: join(1))
    assert sorted(kinds) == ["GradwireError", "ValueError"]


def test_nobody_joins_a_world_with_two_workers_of_one_name() -> None:
    store = HashStore()
    used = r"worker name 'twin' is used by ranks \[0, 2\]: names must differ"

    def join(rank: int, name: str) -> None:
        with pytest.raises((ValueError, gw.GradwireError), match=used):
            join_world(name, Place(store, rank, 3, None), join_timeout=LIMIT)

    def join_late(rank: int) -> None:
        # Who comes when the start has failed waits for all to try again.
        wait_until(lambda: store.check(["gradwire/default/0/card/1"]))
        join(rank, "twin")

    # However far the twins are when the other has seen that all have come.
    together(lambda: join_late(0), lambda: join(1, "other"), lambda: join_late(2))


def test_a_rank_that_is_taken_names_who_has_it() -> None:
    store = HashStore()
    first_joins = threading.Event()

    def first() -> None:
        first_joins.set()
        with pytest.raises(
            gw.GradwireError, match="not start: second: rank 0 is taken"
        ):
            join_world("first", Place(store, 0, 2, None), join_timeout=LIMIT)

    def second() -> None:
        first_joins.wait(LIMIT)
        wait_until(lambda: store.check(["gradwire/default/0/card/0"]))
        with pytest.raises(ValueError, match="rank 0 is taken by worker 'first'"):
            join_world("second", Place(store, 0, 2, None))

    together(first, second)


def test_ranks_that_do_not_come_are_named() -> None:
    store = HashStore()

    def join(rank: int) -> None:
        with pytest.raises(
            gw.GradwireError, match=r"ranks \[1, 3\] of 4 did not arrive"
        ):
            join_world(f"worker{rank}", Place(store, rank, 4, None), join_timeout=SHORT)

    together(lambda: join(0), lambda: join(2))


def test_who_failed_to_meet_can_try_again_in_the_same_store(
    new_store: NewStore,
) -> None:
    store = new_store()
    with pytest.raises(gw.GradwireError, match="did not arrive"):
        join_world("worker0", Place(store, 0, 3, None), join_timeout=SHORT)
    with socket_world(3, store=store) as workers:
        talk(workers)


def test_it_is_said_which_ranks_are_waited_for_and_where(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wait_report, "_FIRST", 0.1)
    place = Place(HashStore(), 1, 4, None, "tcp://node0:29500")
    with pytest.raises(
        gw.GradwireError, match=r"ranks \[0, 2, 3\] of 4 did not arrive"
    ):
        join_world("worker1", place, join_timeout=SHORT)
    assert [record.getMessage() for record in caplog.records] == [
        "waiting for ranks [0, 2, 3] of 4 at tcp://node0:29500"
    ]  # the interval is longer than the test


def test_it_is_said_that_the_store_is_waited_for(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wait_report, "_FIRST", 0.1)
    port = free_port()
    with pytest.raises(gw.GradwireError, match="rank 0 hosts it: check"):
        find_place(f"tcp://127.0.0.1:{port}", None, 1, 2, SHORT)
    assert [record.getMessage() for record in caplog.records] == [
        f"waiting for the store at tcp://127.0.0.1:{port}, which rank 0 hosts"
    ]


def test_a_wrong_address_prints_nothing_of_torchs(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(gw.GradwireError, match="cannot reach the store"):
        find_place(f"tcp://127.0.0.1:{free_port()}", None, 1, 2, SHORT)
    assert capfd.readouterr() == ("", "")


def test_who_comes_with_another_world_size_is_told_and_so_are_the_others() -> None:
    store = HashStore()
    names_size = r"rank \d has world_size=\d, but the ranks that arrived earlier have world_size="
    errors = []

    def join(rank: int, size: int) -> None:
        with pytest.raises((ValueError, gw.GradwireError), match=names_size) as caught:
            join_world(
                f"worker{rank}", Place(store, rank, size, None), join_timeout=LIMIT
            )
        errors.append(type(caught.value))

    together(lambda: join(0, 3), lambda: join(1, 2))
    assert sorted(kind.__name__ for kind in errors) == ["GradwireError", "ValueError"]


def test_the_host_of_the_store_stays_until_others_have_read_why_all_failed(
    capfd: pytest.CaptureFixture[str],
) -> None:
    url = f"tcp://127.0.0.1:{free_port()}"
    errors: list[str] = []

    def join(rank: int, size: int) -> None:
        try:
            join_world(f"worker{rank}", find_place(url, None, rank, size, LIMIT))
        except (ValueError, gw.GradwireError) as error:
            errors.append(str(error))

    together(lambda: join(0, 3), lambda: join(1, 2))
    assert [
        error for error in errors if "the ranks that arrived earlier have" not in error
    ] == []
    assert len(errors) == 2
    assert "frame #" not in capfd.readouterr().err  # torch's, of a store that was lost


def test_a_world_of_another_size_may_follow_in_the_same_store() -> None:
    store = HashStore()
    for size in (2, 3, 2):
        with socket_world(size, store=store) as workers:
            talk(workers)


@pytest.mark.parametrize("other", [b"another" * 4, None], ids=["another", "none"])
def test_a_key_that_differs_is_named_at_once(other: bytes | None) -> None:
    store = HashStore()

    def join(rank: int, key: bytes | None) -> None:
        with pytest.raises(
            gw.GradwireError, match="has a different key from the ranks that arrived"
        ):
            join_world(
                f"worker{rank}",
                Place(store, rank, 2, None),
                join_timeout=LIMIT,
                key=key,
            )

    together(lambda: join(0, b"some key" * 4), lambda: join(1, other))


def test_a_key_of_the_wrong_type_is_named_before_anyone_is_waited_for() -> None:
    nobody = f"tcp://127.0.0.1:{free_port()}"
    with pytest.raises(TypeError, match="key is a str: give bytes"):
        gw.init_rpc("worker1", rank=1, world_size=2, init_method=nobody, key="se" * 9)


def test_a_program_without_a_launcher_is_told_of_it(
    no_env: pytest.MonkeyPatch,
) -> None:
    no_env.setattr("sys.argv", ["somewhere/train.py"])
    with pytest.raises(
        ValueError, match=r"program with `gradwire launch -n 4 train\.py`"
    ):
        gw.init_rpc()


def test_a_short_key_does_not_spoil_the_store() -> None:
    store = HashStore()
    with pytest.raises(ValueError, match="the key has 3 bytes"):
        join_world("worker0", Place(store, 0, 2, None), key=b"abc")
    with socket_world(2, store=store) as workers:
        talk(workers)


def test_a_store_that_goes_away_meanwhile_ends_the_wait() -> None:
    stores = [new_tcp_store()]
    client = TCPStore(
        "127.0.0.1", stores[0].port, is_master=False, wait_for_workers=False
    )

    def join() -> None:
        with pytest.raises(gw.GradwireError, match="the store failed"):
            join_world("worker0", Place(client, 0, 2, None), join_timeout=LIMIT)

    def end() -> None:
        wait_until(lambda: stores[0].check(["gradwire/default/0/card/0"]))
        stores.clear()

    together(join, end)


# Again and again


def test_a_world_starts_anew_in_the_same_store(new_store: NewStore) -> None:
    store = new_store()
    for _ in range(3):
        with socket_world(2, store=store) as workers:
            talk(workers)


def test_each_round_of_a_world_has_its_own_key() -> None:
    store = HashStore()
    for _ in range(2):
        close_world(open_world(2, store=store))
    assert store.get("gradwire/default/0/salt") != store.get("gradwire/default/1/salt")


def test_a_world_starts_anew_at_the_same_tcp_address() -> None:
    url = f"tcp://127.0.0.1:{free_port()}"
    for _ in range(3):
        workers = meet_at(url)
        talk(workers)
        close_world(workers)


def test_a_closed_worker_that_is_still_held_does_not_hold_the_port() -> None:
    url = f"tcp://127.0.0.1:{free_port()}"
    kept = []
    for _ in range(2):
        worker = gw.init_rpc("alone", rank=0, world_size=1, init_method=url)
        worker.shutdown()
        kept.append(worker)


def test_init_after_shutdown_in_one_process() -> None:
    store = HashStore()
    for _ in range(2):
        with gw.init_rpc("alone", rank=0, world_size=1, store=store) as worker:
            assert gw.rpc_sync("alone", max, args=(1, 2)) == 2
        assert worker.is_closed
        with pytest.raises(gw.ClosedError):
            gw.rpc_sync("alone", max, args=(1, 2))


def test_a_second_init_without_shutdown_is_refused() -> None:
    with gw.init_rpc("alone", rank=0, world_size=1, store=HashStore()):
        with pytest.raises(gw.ClosedError, match="is worker 'alone' already"):
            gw.init_rpc("again", rank=0, world_size=1, store=HashStore())
        assert gw.rpc_sync("alone", max, args=(1, 2)) == 2


def test_two_worlds_in_one_store_do_not_meet() -> None:
    store = HashStore()
    red = open_world(2, store=store, world="red")
    blue = open_world(3, store=store, world="blue")
    talk(red)
    talk(blue)
    assert [len(w.get_worker_infos()) for w in (red[0], blue[0])] == [2, 3]
    with pytest.raises(ValueError, match="no worker 'worker2'"):
        red[0].rpc_sync("worker2", max, (1, 2))
    close_world(red)
    close_world(blue)
