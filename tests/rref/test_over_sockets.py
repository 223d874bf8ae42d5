"""References over real sockets: the main flows, workers that die, and memory that stays."""

import functools
import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import gradwire as gw
from gradwire._rref import held_forks
from gradwire.api import enter
from gradwire.testing import World
from tests.processes import Processes
from tests.rpc.functions import Boom, add, boom, held, holding
from tests.rref.values import (
    Value,
    ended,
    fetched,
    keep,
    kept,
    let_go,
    local,
    make_at,
    name_of,
    nothing,
    passed,
    same,
    wait_until_freed,
)
from tests.worlds import (
    LIMIT,
    SOON,
    close_world,
    meanwhile,
    open_world,
    tables,
    vanish,
    wait_until,
    wait_until_held,
    wait_until_no_references,
)

KINDS: dict[str, dict[str, Any]] = {
    "unix": {},
    "tcp": {"unix_sockets": False, "shared_memory": False},
}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_forks, "PATIENCE", 0.3)


@pytest.fixture(params=KINDS)
def workers(request: pytest.FixtureRequest) -> Iterator[list[gw.Worker]]:
    """The test is worker 0; in the end nothing may be left of any reference."""
    opened = open_world(3, **KINDS[request.param])
    before = enter(opened[0])
    kept.clear()
    try:
        yield opened
        kept.clear()
        wait_until_no_references(opened)
    except BaseException:
        close_world(opened, graceful=False)
        raise
    finally:
        enter(before)
    close_world([worker for worker in opened if not worker.is_closed])


Workers = list[gw.Worker]


def test_values_are_made_used_and_freed(workers: Workers) -> None:
    rref = gw.remote("worker1", Value, ("used",))
    assert rref.to_here() == "used"
    wait_until(rref.confirmed_by_owner)  # its response may come after the value
    assert rref.rpc_sync()("a") == "used a"
    assert rref.rpc_async()("b").wait() == "used b"
    assert rref.remote()("c").to_here() == "used c"
    assert rref._get_type() is Value
    assert not ended["used"]
    del rref
    wait_until_freed("used")


def test_a_value_is_made_once_however_soon_it_is_asked_for(workers: Workers) -> None:
    uses: list[Callable[[gw.RRef[Any]], Any]] = [
        fetched,
        lambda rref: rref.rpc_sync()(),
        lambda rref: gw.rpc_sync("worker1", passed, (rref,)),
        lambda rref: gw.rpc_sync("worker2", passed, (rref,)),
    ]
    for i in range(200):
        rref = gw.remote("worker1", Value, (f"soon{i}",))
        assert uses[i % 4](rref) == f"soon{i}"
        assert rref.to_here() == f"soon{i}"
    del rref
    wait_until_freed(*[f"soon{i}" for i in range(200)])


@pytest.mark.parametrize(
    "route",
    [
        ("worker1",),
        ("worker2",),
        ("worker2", "worker1"),
        ("worker1", "worker2", "worker0", "worker2"),
    ],
    ids="-".join,
)
def test_a_reference_can_be_passed_on(workers: Workers, route: tuple[str, ...]) -> None:
    rref, mine = gw.remote("worker1", Value, ("there",)), local("here")
    assert passed(rref, *route) == "there"
    assert passed(mine, *route) == "here"
    del rref, mine
    wait_until_freed("there", "here")


@pytest.mark.parametrize("to", ["worker0", "worker1", "worker2"])
def test_a_call_can_return_a_reference(workers: Workers, to: str) -> None:
    rref = gw.rpc_sync("worker2", make_at, (to, "returned"))
    other = gw.rpc_async("worker2", same, ({"a": [rref]},)).wait()["a"][0]
    del rref
    assert other.owner_name() == to
    assert name_of(other) == "returned"
    del other
    wait_until_freed("returned")


def test_large_tensors_are_values_too(workers: Workers) -> None:
    rref = gw.remote("worker1", torch.ones, (1_000_000,))
    total = rref.remote().mul(2)
    assert gw.rpc_sync("worker2", lambda r: r.to_here().sum().item(), (total,)) == 2e6
    torch.testing.assert_close(rref.to_here(), torch.ones(1_000_000))


def test_errors_are_kept_for_every_use(workers: Workers) -> None:
    rref = gw.remote("worker1", boom, ("kept",))
    for use in (
        fetched,
        fetched,
        lambda rref: rref.rpc_sync().anything(),
        lambda rref: gw.rpc_sync("worker2", fetched, (rref,)),
    ):
        with pytest.raises(Boom, match="kept") as caught:
            use(rref)
        assert "in boom" in str(caught.value.__cause__)
    del rref, caught
    gc.collect()


def test_many_threads_make_pass_and_drop(workers: Workers) -> None:
    names: list[str] = []

    def body(number: int) -> Callable[[], None]:
        def run() -> None:
            before = enter(workers[number % 3])
            for i in range(25):
                name = f"{number}.{i}"
                rref = gw.remote((number + i) % 3, Value, (name,))
                assert passed(rref, f"worker{i % 3}") == name
                rref = gw.rpc_sync(f"worker{(i + 1) % 3}", same, (rref,))
                assert name_of(rref) == name
                names.append(name)
            del rref
            enter(before)

        return run

    with meanwhile(*map(body, range(9))):
        pass
    wait_until_freed(*names)


@pytest.mark.parametrize("to", ["worker0", "worker1"])
def test_the_caller_may_work_meanwhile(workers: Workers, to: str) -> None:
    rref = gw.remote(to, same, (held,))  # the second call has a connection of its own
    for number in range(2):
        with holding() as hold:

            def release(hold: Any = hold) -> None:
                assert hold.entered.wait(LIMIT), "it is not on its way"
                hold.release.set()

            assert rref.rpc_meanwhile(release)(number) == number


def test_an_error_meanwhile_leaves_the_connection_usable(workers: Workers) -> None:
    rref = gw.remote("worker1", Value, ("used",))
    assert rref.to_here() == "used"
    with pytest.raises(Boom):
        rref.rpc_meanwhile(boom)("a")
    assert rref.rpc_sync()("b") == "used b"


def test_a_call_that_times_out_gives_its_references_back(
    workers: Workers,
) -> None:
    rref, mine = gw.remote("worker1", Value, ("slow",)), local("mine")
    with holding() as hold:
        with pytest.raises(gw.CallTimeout):
            gw.rpc_sync("worker2", held, ([rref, mine],), timeout=0.2)
        assert hold.entered.wait(LIMIT)
        del rref, mine
        wait_until(lambda: not tables(workers[0])["on_their_way"])
        assert not ended["slow"]
        assert not ended["mine"]
        hold.release.set()
    wait_until_freed("slow", "mine")


def test_a_reply_that_comes_too_late_is_given_back(workers: Workers) -> None:
    with holding() as hold:
        for call in (gw.rpc_sync, lambda *a, **k: gw.rpc_async(*a, **k).wait()):
            with pytest.raises(gw.CallTimeout):
                call("worker2", hold_and_make, (), timeout=0.1)
        hold.release.set()
    wait_until_no_references(workers)


def hold_and_make() -> Any:
    held()
    return [local("late"), gw.remote("worker1", Value, ("later",))]


def test_to_here_that_times_out_can_be_tried_again(workers: Workers) -> None:
    with holding() as hold:
        rref = gw.remote("worker1", held, ("patience",))
        for _ in range(2):
            with pytest.raises(gw.CallTimeout):
                rref.to_here(timeout=0.05)
        hold.release.set()
        assert rref.to_here() == "patience"


def test_a_value_not_made_in_time_fails_its_reference(workers: Workers) -> None:
    with holding() as hold:
        rref = gw.remote("worker1", held, timeout=0.1)
        with pytest.raises(gw.CallTimeout):
            rref.to_here()
        with pytest.raises(gw.CallTimeout):
            rref.rpc_sync().anything()
        hold.release.set()
    del rref
    gc.collect()


# Workers that die


def test_a_lost_user_lets_go_and_a_lost_owner_is_named(workers: Workers) -> None:
    alone, mine = gw.remote("worker1", Value, ("alone",)), local("mine")
    shared = gw.remote("worker1", Value, ("shared",))
    gw.rpc_sync("worker2", keep, ([alone, shared, mine],))
    del alone, mine
    wait_until_held(workers[0], 1)
    vanish(workers[2])
    wait_until_freed("alone", "mine")
    assert shared.to_here() == "shared"
    with holding() as hold:
        waiting = gw.remote("worker1", held)
        future = waiting.to_here_async()
        assert hold.entered.wait(LIMIT)
        with meanwhile(lambda: vanish(workers[1])):  # it waits for the function
            for use in (future.wait, waiting.to_here, shared.to_here):
                with pytest.raises(gw.WorkerLostError) as caught:
                    use()
                assert caught.value.worker == "worker1"
            hold.release.set()
    with pytest.raises(gw.WorkerLostError, match="'worker1'"):
        gw.remote("worker0", nothing, (shared,))
    del caught, use, future
    gc.collect()
    close_world([workers[0]])


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    opened = Processes(tmp_path)
    yield opened
    opened.close()


@pytest.mark.slow
def test_a_killed_user_lets_go_of_what_it_held(processes: Processes) -> None:
    user, other = processes.serve(1, 3), processes.serve(2, 3)
    with processes.world(3) as me:
        before = enter(me)
        mine, shared = local("mine"), local("shared")
        gw.rpc_sync("worker1", keep, ([mine, shared],))
        gw.rpc_sync("worker2", keep, (shared,))
        theirs = gw.rpc_sync("worker1", make_at, ("worker2", "theirs"))
        assert theirs.to_here() == "theirs"
        del mine, shared
        wait_until_held(me, 3)
        user.kill()
        wait_until_freed("mine")
        wait_until_held(me, 1)
        assert theirs.to_here() == "theirs"  # counted in before its maker died
        assert not ended["shared"]
        gw.rpc_sync("worker2", let_go)
        wait_until_freed("shared")
        del theirs
        enter(before)
    assert other.wait() == 0


@pytest.mark.slow
def test_a_killed_owner_fails_all_uses_at_once(processes: Processes) -> None:
    owner, other = processes.serve(1, 3), processes.serve(2, 3)
    with processes.world(3) as me:
        before = enter(me)
        rref = gw.remote("worker1", Value, ("owned",))
        assert rref.to_here() == "owned"
        gw.rpc_sync("worker2", keep, (rref,))
        pending = gw.remote("worker1", time.sleep, (LIMIT,))
        waiting = [
            pending.to_here_async(),
            pending.rpc_async().anything(),
            gw.rpc_async("worker2", fetched, (pending,)),
        ]
        started = time.monotonic()
        owner.kill()
        for use in (
            *[future.wait for future in waiting],
            rref.to_here,
            pending.to_here,
            rref.rpc_sync().where,
            functools.partial(gw.rpc_sync, "worker2", nothing, (rref,)),
            functools.partial(gw.rpc_sync, "worker2", fetch_kept),
        ):
            with pytest.raises(gw.WorkerLostError) as caught:
                use()
            assert caught.value.worker == "worker1"
        assert time.monotonic() - started < SOON
        del rref, pending, waiting, caught, use
        enter(before)
    assert other.wait() == 0


def fetch_kept() -> Any:
    return kept["worker2"][0].to_here()


@pytest.mark.slow
def test_processes_settle_their_references_when_they_shut_down(
    processes: Processes,
) -> None:
    servers = [processes.serve(1, 3), processes.serve(2, 3)]
    with processes.world(3) as me:
        before = enter(me)
        rrefs = [gw.remote(1 + i % 2, add, (i, 1)) for i in range(50)]
        back = gw.rpc_sync("worker2", same, (rrefs,))
        assert [rref.to_here() for rref in back] == list(range(1, 51))
        gw.rpc_sync("worker2", keep, (rrefs[0],))
        del rrefs, back
        enter(before)
    assert [server.wait() for server in servers] == [0, 0]
    assert "worker 'worker2' still holds a reference" in servers[1].errors
    assert "received from worker0" in servers[1].errors
    assert not servers[0].errors


# Memory


def test_a_hundred_thousand_references_leave_memory_as_it_was() -> None:
    """Made there, made here, passed on in calls and returned by them."""
    process = psutil.Process()
    with World(2) as world, world.as_worker(0):
        _make_and_drop(10_000)  # what is set up once
        wait_until_no_references(world)
        gc.collect()
        before = process.memory_info().rss
        _make_and_drop(100_000)
        wait_until_no_references(world)
        gc.collect()
        grown = process.memory_info().rss - before
        assert grown < 20 << 20
        assert _entries(world[0]) < 500
        assert _entries(world[1]) < 500


def _make_and_drop(count: int) -> None:
    for _ in range(count // 1000):
        rrefs = [gw.remote("worker1", int, (7,)) for _ in range(300)]
        rrefs += [gw.RRef(i) for i in range(300)]
        back = gw.rpc_sync("worker1", same, (rrefs[200:400],))  # 200 go, 200 come
        assert back[0].to_here() == 7
        assert back[-1].to_here() == 99


def _entries(worker: gw.Worker) -> int:
    """The size of all tables that are about references."""
    references = worker.references
    parts = (
        references.held_forks,
        references.held_forks._ledger,
        references.held_forks._outbox,
        references.owned_values,
        references.owned_values._ledger,
        references.notifier,
    )
    return sum(map(_sizes, parts))


def _sizes(thing: Any) -> int:
    """How much is in the containers that an object has, two levels deep."""
    names = getattr(thing, "__slots__", None) or vars(thing)
    total = 0
    for name in names:
        table = getattr(thing, name)
        if isinstance(table, (dict, set, list)):
            total += len(table)
        if isinstance(table, dict):
            total += sum(
                len(seen._above) for seen in table.values() if hasattr(seen, "_above")
            )
    return total
