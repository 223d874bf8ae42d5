"""How references travel, and that every value is freed: once, when the last one lets go.

In loopback worlds: in order, with messages that overtake each other, and with messages about
references that get lost or come twice.
"""

import dataclasses
import functools
import gc
import inspect
import logging
import random
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire._rref import held_forks, notifier, serialization
from gradwire._rref.messages import ADOPT, CREATE, NOTES, RECALL
from gradwire._transport.faulty import Faults
from gradwire._wire.messages import CALL
from gradwire.testing import World
from tests.rpc.functions import Boom, boom, held, holding, never
from tests.rref.values import (
    Value,
    ended,
    fetched,
    keep,
    kept,
    local,
    make_at,
    name_of,
    nothing,
    passed,
    same,
    wait_until_freed,
)
from tests.worlds import (
    CONTROL,
    LIMIT,
    SOON,
    PostedWorld,
    meanwhile,
    tables,
    wait_until,
    wait_until_held,
    wait_until_no_references,
)

WORLDS: dict[str, Callable[[int], World]] = {
    "fifo": World,
    "unordered": lambda size: World(size, seed=1),
    "lossy1": lambda size: PostedWorld(size, 1),
    "lossy2": lambda size: PostedWorld(size, 2),
}

current: World
"""The world of the test, for functions that run in it."""


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Say again soon what was not answered."""
    monkeypatch.setattr(notifier, "_RETRY", 0.05)
    monkeypatch.setattr(notifier, "_LOOK", 0.02)
    monkeypatch.setattr(serialization, "_RETRY", 0.05)
    monkeypatch.setattr(held_forks, "PATIENCE", 0.3)


@pytest.fixture(params=WORLDS)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Worker 0 is the current one; in the end nothing may be left of any reference."""
    global current
    with WORLDS[request.param](3) as current, current.as_worker(0):
        kept.clear()
        yield current
        kept.clear()
        wait_until_no_references(current)


@pytest.fixture
def posted() -> Iterator[PostedWorld]:
    """A world whose messages can be held back."""
    global current
    with PostedWorld(3) as opened, opened.as_worker(0):
        current = opened
        kept.clear()
        yield opened
        opened.post.release()
        kept.clear()
        wait_until_no_references(opened)


# Requests


@pytest.mark.parametrize(
    "route",
    [
        ("worker1",),  # creator to owner
        ("worker2",),  # user to user
        ("worker0",),  # user to itself
        ("worker2", "worker1"),  # user to owner
        ("worker1", "worker2"),  # owner to user
        ("worker1", "worker1"),  # owner to itself
        ("worker2", "worker0", "worker2", "worker1", "worker0"),
    ],
    ids="-".join,
)
def test_a_reference_can_be_passed_on(world: World, route: tuple[str, ...]) -> None:
    name = "-".join(route)
    rref = gw.remote("worker1", Value, (name,))
    assert passed(rref, *route) == name
    assert rref.to_here() == name
    assert ended[name] == 0
    del rref
    wait_until_freed(name)


@pytest.mark.parametrize("route", [("worker1",), ("worker1", "worker2"), ("worker0",)])
def test_a_local_reference_can_be_passed_on(
    world: World, route: tuple[str, ...]
) -> None:
    rref = local("local")
    assert passed(rref, *route) == "local"
    del rref
    wait_until_freed("local")


def holders(rref: gw.RRef[Any]) -> list[str]:
    """Who holds a value, as its owner knows it."""
    owned = tables(current[rref.owner().id])["owned"]
    return [holder for value in owned for holder in value["holders"]]


def test_the_owner_knows_of_a_fork_before_the_function_runs(world: World) -> None:
    rref = gw.remote("worker1", Value, ("known",))
    assert gw.rpc_sync("worker2", holders, (rref,)) == ["worker0", "worker2"]
    del rref
    wait_until_freed("known")


def test_a_function_waits_until_the_owner_knows_of_the_fork(
    posted: PostedWorld,
) -> None:
    rref = gw.remote("worker1", Value, ("waits",))
    rref.to_here()
    posted.post.hold(ADOPT)
    with holding() as hold:
        future = gw.rpc_async("worker2", held, (rref,))
        del rref
        wait_until(lambda: posted.post.waits(ADOPT))
        assert not hold.entered.wait(0.05)
        assert not ended["waits"]  # the parent has not let go
        posted.post.release()
        assert hold.entered.wait(LIMIT)
        hold.release.set()
        assert future.wait().to_here() == "waits"
    del future
    wait_until_freed("waits")


def test_a_handle_can_be_dropped_while_the_call_is_under_way(world: World) -> None:
    with holding() as hold:
        future = gw.rpc_async("worker2", held, (gw.remote("worker1", Value, ("x",)),))
        assert hold.entered.wait(LIMIT)
        gc.collect()
        assert not ended["x"]
        hold.release.set()
        assert future.wait().to_here() == "x"
    del future
    wait_until_freed("x")


def test_what_a_function_keeps_stays(world: World) -> None:
    rref = gw.remote("worker1", Value, ("kept",))
    gw.rpc_sync("worker2", keep, (rref,))
    del rref
    wait_until(lambda: not tables(world[0])["held"])
    wait_until_held(world[1], 1)
    assert not ended["kept"]
    [[other]] = kept.values()
    assert other.to_here() == "kept"
    kept.clear()
    del other
    wait_until_freed("kept")


@dataclasses.dataclass
class Pair:
    first: gw.RRef[Any]
    second: Any


class Module(torch.nn.Module):
    def __init__(self, rref: gw.RRef[Any]) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        self.rref = rref


class Holder:
    def __init__(self, rref: gw.RRef[Any]) -> None:
        self.rref = rref

    def fetch(self) -> Any:
        return self.rref.to_here()


PACKED: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "list": (lambda r: [1, [r]], lambda x: x[1][0]),
    "tuple": (lambda r: (r, torch.ones(2)), lambda x: x[0]),
    "dict": (lambda r: {"a": {"b": r}}, lambda x: x["a"]["b"]),
    "key": (lambda r: {r: 1}, lambda x: next(iter(x))),
    "dataclass": (lambda r: Pair(r, [r]), lambda x: x.second[0]),
    "module": (Module, lambda x: x.rref),
    "object": (Holder, lambda x: x.rref),
    "partial": (lambda r: functools.partial(fetched, r), lambda x: x.args[0]),
    "closure": (lambda r: lambda: r, lambda x: x()),
}


def unpacked(name: str, thing: Any) -> Any:
    return name_of(PACKED[name][1](thing))


@pytest.mark.parametrize("world", ["fifo", "lossy1"], indirect=True)
@pytest.mark.parametrize("name", PACKED)
def test_references_travel_inside_of_other_things(world: World, name: str) -> None:
    pack, unpack = PACKED[name]
    rref = gw.remote("worker1", Value, (name,))
    for to in ("worker0", "worker1", "worker2"):
        assert gw.rpc_sync(to, unpacked, (name, pack(rref))) == name
    back = unpack(gw.rpc_sync("worker2", same, (pack(rref),)))
    assert back.to_here() == name
    made = gw.remote("worker2", same, (pack(rref),))
    del rref, back
    assert unpack(made.to_here()).to_here() == name
    assert not ended[name]
    del made
    wait_until_freed(name)


def test_a_function_can_hold_references_too(world: World) -> None:
    holder = Holder(gw.remote("worker1", Value, ("bound",)))
    assert gw.rpc_sync("worker2", holder.fetch) == "bound"
    bound = functools.partial(fetched, holder.rref)
    assert gw.remote("worker2", bound).to_here() == "bound"
    del holder, bound
    wait_until_freed("bound")


def test_the_same_reference_twice_in_a_message_is_one(world: World) -> None:
    rref = gw.remote("worker1", Value, ("twice",))
    first, rest = gw.rpc_sync("worker2", same, ((rref, [rref]),))
    assert first is rest[0]
    assert first is not rref
    del rref, rest, first
    wait_until_freed("twice")


def test_many_references_in_one_message_all_come(world: World) -> None:
    names = [f"many{i}" for i in range(30)]
    rrefs = [gw.remote(f"worker{i % 3}", Value, (n,)) for i, n in enumerate(names)]
    back = gw.rpc_sync("worker2", same, (rrefs,))
    assert [name_of(rref) for rref in back] == names
    del rrefs, back
    wait_until_freed(*names)


# Replies


def test_a_call_can_return_a_reference_of_its_own(world: World) -> None:
    rref = gw.rpc_sync("worker1", local, ("own",))
    assert rref.owner_name() == "worker1"
    assert rref.to_here() == "own"
    assert rref.confirmed_by_owner()
    del rref
    wait_until_freed("own")


@pytest.mark.parametrize("to", ["worker0", "worker1", "worker2"])
def test_a_call_can_return_a_reference_to_anyones_value(world: World, to: str) -> None:
    rref = gw.rpc_sync("worker2", make_at, (to, "anyone"))
    assert rref.owner_name() == to
    assert rref.is_owner() == (to == "worker0")
    assert name_of(rref) == "anyone"
    del rref
    wait_until_freed("anyone")


def test_what_comes_back_to_its_owner_is_the_value_itself(world: World) -> None:
    rref = local("home")
    back = gw.rpc_sync("worker2", same, (rref,))
    assert back.local_value() is rref.local_value()
    del rref
    assert back.local_value().name == "home"
    del back
    wait_until_freed("home")


def test_a_result_that_nobody_takes_is_freed(world: World) -> None:
    gw.rpc_sync("worker1", local, ("unused",))
    wait_until_freed("unused")
    gw.rpc_async("worker2", make_at, ("worker1", "thrown away"))
    wait_until_freed("thrown away")


def test_a_reference_to_a_reference_keeps_both(world: World) -> None:
    inner = gw.remote("worker2", Value, ("inner",))
    outer = gw.remote("worker1", same, (inner,))
    del inner
    assert outer.to_here().to_here() == "inner"
    outermost = gw.RRef(outer)
    del outer
    assert outermost.local_value().rpc_sync().to_here() == "inner"
    assert not ended["inner"]
    del outermost
    wait_until_freed("inner")


def test_everyone_can_gather_references(world: World) -> None:
    def share(worker: gw.Worker) -> list[str]:
        mine = local(f"of {worker.name}")
        everyone = worker.all_gather(mine)
        return [name_of(everyone[name]) for name in sorted(everyone)]

    names = [f"of worker{i}" for i in range(3)]
    assert world.run(share) == [names] * 3
    wait_until_freed(*names)


# Methods


def test_methods_take_and_give_references(world: World) -> None:
    rref = gw.remote("worker1", Value, ("first",))
    other = gw.remote("worker2", Value, ("second",))
    rref.rpc_sync().keep(other)
    del other
    back = rref.rpc_sync().give()
    assert back.to_here() == "second"
    again = rref.remote().give()
    assert again.to_here().to_here() == "second"
    del rref
    assert not ended["second"]
    wait_until_freed("first")
    del back, again
    wait_until_freed("second")


def test_calls_under_way_keep_the_value(world: World) -> None:
    future = gw.remote("worker1", Value, ("short",)).rpc_async()("lived")
    assert future.wait() == "short lived"
    assert gw.remote("worker1", Value, ("shorter",)).remote().where().to_here() == (
        "worker1"
    )
    assert gw.remote("worker1", Value, ("shortest",)).to_here_async().wait() == (
        "shortest"
    )
    del future
    wait_until_freed("short", "shorter", "shortest")


# Ahead of the call that makes the value


def test_a_value_can_be_asked_for_before_its_call_has_come(posted: PostedWorld) -> None:
    posted.post.hold(CREATE)
    rref = gw.remote("worker1", Value, ("late",))
    asked = [
        rref.to_here_async(),
        rref.rpc_async()("call"),
        gw.rpc_async("worker1", passed, (rref,)),
        gw.rpc_async("worker2", passed, (rref,)),
        gw.rpc_async("worker2", passed, (rref, "worker1")),
    ]
    chained = rref.remote()("chain")
    wait_until(lambda: len(tables(posted[1])["owned"]) == 1)
    [value] = tables(posted[1])["owned"]
    assert value["state"] == "pending"
    assert not rref.confirmed_by_owner()
    assert not any(future.done() for future in asked)
    posted.post.release()
    assert [future.wait() for future in asked] == ["late", "late call", *["late"] * 3]
    assert chained.to_here() == "late chain"
    del rref, asked, chained
    wait_until_freed("late")


def test_a_reference_can_be_dropped_before_its_call_has_come(
    posted: PostedWorld,
) -> None:
    posted.post.hold(CREATE)
    rref = gw.remote("worker1", Value, ("late",))
    gw.rpc_sync("worker2", keep, (rref,))
    del rref
    lost = gw.remote("worker1", Value, ("lost",))
    del lost
    wait_until(lambda: not tables(posted[0])["held"])
    posted.post.release()
    wait_until_freed("lost")
    assert kept["worker2"][0].to_here() == "late"
    kept.clear()
    wait_until_freed("late")


def test_a_call_that_never_comes_fails_all_who_wait(posted: PostedWorld) -> None:
    posted.post.hold(CREATE)
    rref = gw.remote("worker1", Value, ("never",), timeout=0.1)
    waiting = [
        rref.to_here_async(),
        gw.rpc_async("worker2", fetched, (rref,)),
        gw.rpc_async("worker1", fetched, (rref,)),
    ]
    for future in waiting:
        with pytest.raises(gw.GradwireError, match=r"never made: CallTimeout"):
            future.wait()
    ended["never"] = 0
    del rref, waiting
    posted.post.release()
    wait_until_no_references(posted)  # should it come after all, it is made and freed
    assert ended["never"] in (0, 1)


# Many at once


def hop(rref: gw.RRef[Any], hops: int) -> str:
    if not hops:
        return passed(rref)
    me = gw.get_worker_info().id
    return gw.rpc_sync((me + 1) % 3, hop, (rref, hops - 1))


def test_references_go_around_in_a_ring(world: World) -> None:
    rrefs = [gw.remote(to, Value, (f"ring{to}",)) for to in range(3)]

    def run(rref: gw.RRef[Any], name: str) -> None:
        with world.as_worker(0):
            for hops in range(1, 8):
                assert hop(rref, hops) == name

    with meanwhile(
        *[functools.partial(run, rrefs[i % 3], f"ring{i % 3}") for i in range(9)]
    ):
        pass
    assert not any(ended[f"ring{i}"] for i in range(3))
    del rrefs
    wait_until_freed(*[f"ring{i}" for i in range(3)])


class Walk:
    """Does with references what comes to its mind."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._mine: list[gw.RRef[Any]] = []
        self._name = f"walk{seed}"
        self.names: list[str] = []

    def run(self, steps: int) -> None:
        acts = (self.make, self.send, self.exchange, self.drop, self.use, self.drop)
        for _ in range(steps):
            self._random.choice(acts if self._mine else (self.make,))()
        self._mine.clear()

    def _anyone(self) -> int:
        return self._random.randrange(3)

    def _one(self) -> gw.RRef[Any]:
        return self._random.choice(self._mine)

    def make(self) -> None:
        name = f"{self._name}.{len(self.names)}"
        self.names.append(name)
        ways: list[Callable[[], gw.RRef[Any]]] = [
            lambda: gw.remote(self._anyone(), Value, (name,)),
            lambda: local(name),
            lambda: gw.rpc_sync(self._anyone(), local, (name,)),
            lambda: gw.rpc_sync(self._anyone(), make_at, (self._anyone(), name)),
        ]
        self._mine.append(self._random.choice(ways)())

    def send(self) -> None:
        gw.rpc_async(self._anyone(), nothing, (self._one(),))

    def exchange(self) -> None:
        rref = self._mine.pop(self._random.randrange(len(self._mine)))
        self._mine.append(gw.rpc_sync(self._anyone(), same, (rref,)))

    def use(self) -> None:
        name = passed(self._one(), f"worker{self._anyone()}")
        assert name.startswith("walk")

    def drop(self) -> None:
        del self._mine[self._random.randrange(len(self._mine))]


def test_whatever_is_done_all_values_are_freed_once(fuzz_seed: int) -> None:
    kinds = list(WORLDS.values())
    with kinds[fuzz_seed % len(kinds)](3) as world:
        walks = [Walk(1000 * fuzz_seed + i) for i in range(6)]

        def body(index: int) -> Callable[[], None]:
            def walk() -> None:
                with world.as_worker(index % 3):
                    walks[index].run(25)

            return walk

        with meanwhile(*map(body, range(6))):
            pass
        wait_until_no_references(world)
        wait_until_freed(*[name for walk in walks for name in walk.names])


@pytest.mark.parametrize("seed", range(3))
def test_faults_of_control_messages_lose_nothing(seed: int) -> None:
    faults = Faults(drop=0.2, repeat=0.3, delay=0.5, kinds=CONTROL)
    with World(3, seed=seed, faults=faults) as world:
        walk = Walk(seed)
        with world.as_worker(0):
            walk.run(60)
        wait_until_no_references(world)
        wait_until_freed(*walk.names)


# Workers that die


def test_values_that_only_a_lost_worker_held_are_freed(world: World) -> None:
    alone = gw.remote("worker1", Value, ("alone",))
    shared = gw.remote("worker1", Value, ("shared",))
    gw.rpc_sync("worker2", keep, ([alone, shared],))
    del alone
    wait_until(lambda: len(tables(world[0])["held"]) == 1)
    assert not ended["alone"]
    world.kill(2)
    wait_until_freed("alone")
    assert shared.to_here() == "shared"
    assert holders(shared) == ["worker0"]
    del shared
    wait_until_freed("shared")


def test_a_lost_creator_takes_its_values_along(world: World) -> None:
    names = [f"creator{i}" for i in range(3)]
    with world.as_worker(2):
        made = [gw.remote("worker1", Value, (name,)) for name in names]
        [rref.to_here() for rref in made]
        gw.rpc_sync("worker0", keep, (made[2],))
    world.kill(2)
    wait_until_freed(*names[:2])
    assert kept["worker0"][0].to_here() == "creator2"
    kept.clear()
    wait_until_freed("creator2")


def test_uses_of_a_lost_owners_value_fail_at_once(world: World) -> None:
    started = time.monotonic()
    with holding() as hold:
        rref = gw.remote("worker1", Value, ("there",))
        rref.to_here()
        pending = gw.remote("worker1", held)
        waiting = [
            pending.to_here_async(),
            pending._get_type(blocking=False),
            pending.rpc_async().anything(),
            pending._get_future(),
            gw.rpc_async("worker2", fetched, (pending,)),
        ]
        chained = pending.remote().anything()
        gw.rpc_sync("worker2", keep, (rref,))
        assert hold.entered.wait(LIMIT)
        with meanwhile(lambda: world.kill(1)):  # it waits for the function
            for future in waiting:
                check_lost(future.wait)
            hold.release.set()
    for lost in (rref, pending, chained, kept["worker2"][0]):
        for use in (
            lost.to_here,
            lost._get_type,
            lambda lost=lost: lost.to_here_async().wait(),
            lambda lost=lost: lost.rpc_sync().anything(),
            lambda lost=lost: lost.rpc_async().anything().wait(),
            lambda lost=lost: lost.remote().anything().to_here(),
            lambda lost=lost: gw.rpc_sync("worker2", nothing, (lost,)),
            lambda lost=lost: gw.remote("worker2", nothing, ([lost],)),
        ):
            check_lost(use)
    with pytest.raises(Exception, match="lost worker 'worker1'"):
        gw.rpc_sync("worker2", lambda: kept["worker2"][0])
    assert time.monotonic() - started < 2 * SOON
    gc.collect()  # the errors' frames
    wait_until(lambda: not tables(world[0])["held"])
    assert repr(rref).startswith("<RRef 0.1, owner 'worker1'")


def check_lost(use: Callable[[], Any]) -> None:
    with pytest.raises(gw.WorkerLostError) as caught:
        use()
    assert caught.value.worker == "worker1"


def test_who_waits_for_a_lost_creators_value_is_told(posted: PostedWorld) -> None:
    posted.post.hold(CREATE)
    with posted.as_worker(2):
        rref = gw.remote("worker1", Value, ("unmade",))
        gw.rpc_sync("worker0", keep, (rref,))
        gw.rpc_sync("worker1", keep, (rref,))
    [mine] = kept["worker0"]
    [owned] = kept["worker1"]
    futures = [mine.to_here_async(), owned.to_here_async(), mine.rpc_async()("x")]
    wait_until(lambda: tables(posted[1])["owned"])
    posted.kill(2)
    for future in futures:
        with pytest.raises(gw.WorkerLostError, match="it was to make this value"):
            future.wait()


def test_a_reference_whose_sender_dies_on_the_way_is_refused(
    posted: PostedWorld,
) -> None:
    with posted.as_worker(2):
        rref = gw.remote("worker1", Value, ("orphan",))
        rref.to_here()
        posted.post.hold(ADOPT)
        with holding() as hold:
            future = gw.rpc_async("worker0", held, (rref,))
            wait_until(lambda: posted.post.waits(ADOPT))
            posted.kill(2)
            wait_until_freed("orphan")
            posted.post.release()
            with pytest.raises(gw.GradwireError):
                future.wait()
            wait_until_no_references(posted)
            assert not hold.entered.is_set()


def test_a_reference_that_came_outlives_its_sender(world: World) -> None:
    with world.as_worker(2):
        rref = gw.remote("worker1", Value, ("inherited",))
        gw.rpc_sync("worker0", keep, (rref,))
    world.kill(2)
    wait_until(lambda: holders(rref) == ["worker0"])
    assert kept["worker0"][0].to_here() == "inherited"
    kept.clear()
    wait_until_freed("inherited")


def test_a_receiver_that_dies_gives_back_what_was_on_its_way(
    posted: PostedWorld,
) -> None:
    rref, mine = gw.remote("worker1", Value, ("sent",)), local("mine")
    rref.to_here()
    posted.post.hold(CALL)
    future = gw.rpc_async("worker2", nothing, (rref, mine))
    del rref, mine
    assert len(tables(posted[0])["on_their_way"]) == 2
    posted.kill(2)
    with pytest.raises(gw.WorkerLostError):
        future.wait()
    wait_until_freed("sent", "mine")


@pytest.mark.parametrize("to", [1, 2])
def test_a_reference_returned_to_a_dead_caller_is_freed(world: World, to: int) -> None:
    """To the one who called and is gone, and to the one who is gone before it is sent."""
    with world.as_worker(0), holding() as hold:
        gw.rpc_async(to, hold_and_make, ("dead letter",))
        assert hold.entered.wait(LIMIT)
        world.kill(0)
        hold.release.set()
    wait_until(lambda: "dead letter" in ended)
    wait_until_freed("dead letter")
    wait_until_no_references(world)


def hold_and_make(name: str) -> Any:
    held()
    ended.pop(name, None)
    return [gw.RRef(Value(name)), gw.remote("worker1", nothing)]


def test_a_lost_worker_does_not_keep_shutdown_waiting(world: World) -> None:
    rref = gw.remote("worker1", Value, ("held on",))
    gw.rpc_sync("worker2", keep, (rref,))
    with holding() as hold, world.as_worker(2):
        gw.rpc_async("worker1", hold_and_make, ("unread",))
        assert hold.entered.wait(LIMIT)
        world.kill(2)
        hold.release.set()
        started = time.monotonic()
        world.shutdown()
    assert time.monotonic() - started < SOON
    del rref
    kept.clear()
    wait_until_freed("held on")


# Calls that end too early or too late


def test_a_call_that_times_out_lets_go_when_its_function_ends(world: World) -> None:
    rref, mine = gw.remote("worker1", Value, ("slow",)), local("mine")
    with holding() as hold:
        with pytest.raises(gw.CallTimeout):
            gw.rpc_sync("worker2", held, ([rref, mine],), timeout=0.1)
        del rref, mine
        assert hold.entered.wait(LIMIT)
        wait_until(lambda: not tables(world[0])["on_their_way"])
        gc.collect()
        assert not ended["slow"]
        assert not ended["mine"]
        assert not hold.release.is_set()
        hold.release.set()
    wait_until_freed("slow", "mine")


def test_a_call_that_fails_lets_go_of_its_references(world: World) -> None:
    for to in range(3):
        rref, mine = gw.remote("worker1", Value, (f"a{to}",)), local(f"b{to}")
        with pytest.raises(Boom):
            gw.rpc_sync(to, fail, (rref, [mine]))
        gw.rpc_async(to, fail, (rref, mine)).then(nothing).wait()
        del rref, mine
    gc.collect()  # the errors' frames
    wait_until_freed(*[f"{letter}{to}" for letter in "ab" for to in range(3)])


def fail(*_: Any) -> None:
    raise Boom("with references")


def test_a_request_that_comes_too_late_finds_its_references_gone(
    posted: PostedWorld,
) -> None:
    rref, mine = gw.remote("worker1", Value, ("tardy",)), local("mine")
    rref.to_here()
    posted.post.hold(CALL)
    with holding() as hold:
        for reference in (rref, mine):
            with pytest.raises(gw.CallTimeout):
                gw.rpc_sync("worker2", held, (reference,), timeout=0.05)
        del rref, mine, reference
        wait_until_freed("tardy", "mine")
        posted.post.release()
        # The value is gone: who gets the reference now cannot use it, and leaves nothing.
        hold.release.set()
        wait_until_no_references(posted)


@pytest.mark.parametrize("to", ["worker0", "worker1", "worker2"])
def test_a_reply_that_comes_too_late_is_given_back(
    posted: PostedWorld, to: str
) -> None:
    posted.post.hold(-CALL)
    with pytest.raises(gw.CallTimeout):
        gw.rpc_sync("worker2", make_at, (to, "overdue"), timeout=0.1)
    wait_until_freed("overdue")
    assert not tables(posted[2])["on_their_way"]
    posted.post.release()


def test_a_reply_is_waited_for_while_its_call_is_under_way(posted: PostedWorld) -> None:
    posted.post.hold(-CALL)
    future = gw.rpc_async("worker2", make_at, ("worker1", "patient"))
    wait_until(lambda: posted.post.waits(-CALL))
    # Long enough for the sender to ask, and be told that it may still come.
    wait_until(lambda: posted[2].references.held_forks._expected)
    assert not ended["patient"]
    posted.post.release()
    assert future.wait().to_here() == "patient"
    del future
    wait_until_freed("patient")


@pytest.mark.parametrize("kind", [NOTES, RECALL, -NOTES, -RECALL, ADOPT, -ADOPT])
def test_a_control_message_that_is_very_late_does_no_harm(
    posted: PostedWorld, kind: int
) -> None:
    posted.post.hold(kind)
    rref, mine = gw.remote("worker1", Value, ("calm",)), local("quiet")
    futures = [
        gw.rpc_async("worker2", same, ([rref, mine],)),
        gw.rpc_async("worker1", make_at, ("worker2", "serene")),
    ]
    with pytest.raises(Boom):
        gw.rpc_async("worker1", fail, ([rref, mine],)).wait()
    if abs(kind) == ADOPT:
        wait_until(lambda: posted.post.waits(kind))
        posted.post.release()
    assert futures[0].wait()[0].to_here() == "calm"
    assert futures[1].wait().to_here() == "serene"
    del rref, mine, futures
    gc.collect()
    wait_until(lambda: abs(kind) == ADOPT or posted.post.waits(kind))
    posted.post.release()
    wait_until_freed("calm", "quiet", "serene")


# The end of a world


@pytest.mark.parametrize("kind", WORLDS)
def test_shutdown_settles_what_was_dropped(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with WORLDS[kind](3) as world, world.as_worker(0):
        rrefs = [gw.remote(to, Value, (f"end{to}",)) for to in range(3)]
        gw.rpc_async("worker1", same, (rrefs,))
        gw.rpc_async("worker2", fail, (rrefs,)).then(nothing)
        del rrefs
        world.shutdown()
    wait_until_freed("end0", "end1", "end2")
    assert "still holds" not in caplog.text
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


def test_values_are_freed_before_anyone_leaves() -> None:
    """Not because their owner closes: the world ends only when all is said."""
    seen: list[int] = []
    with World(2) as world:
        close = world[1].references.close
        world[1].references.close = lambda: (seen.append(ended["before"]), close())  # type: ignore[method-assign, func-returns-value]
        with world.as_worker(0):
            gw.remote("worker1", Value, ("before",)).to_here()
    assert seen == [1]


def test_shutdown_names_what_leaked_and_where_it_was_made(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with World(3) as world, world.as_worker(0):
        leak = gw.remote("worker1", Value, ("leak",))
        line = inspect.getframeinfo(inspect.currentframe()).lineno - 1  # type: ignore[arg-type]
        gw.rpc_sync("worker2", keep, (leak,))
        world.shutdown()
    here = f"value 0.1 of 'worker1', from {__file__}:{line}"
    assert f"worker 'worker0' still holds 1 references at its shutdown: {here}" in (
        caplog.text
    )
    there = "value 0.1 of 'worker1', from received from worker0"
    assert f"worker 'worker2' still holds 1 references at its shutdown: {there}" in (
        caplog.text
    )
    assert "worker 'worker1' still holds" not in caplog.text
    kept.clear()
    del leak
    wait_until_freed("leak")


def test_shutdown_names_ten_leaks_at_most(caplog: pytest.LogCaptureFixture) -> None:
    with World(2) as world, world.as_worker(0):
        leaks = [gw.remote("worker1", nothing) for _ in range(13)]
        world.shutdown()
    [said] = [r.getMessage() for r in caplog.records if "still holds" in r.getMessage()]
    assert "still holds 13 references" in said
    assert said.count("value 0.") == 10
    assert said.endswith(" and 3 more")
    del leaks


def test_a_reference_in_a_garbage_cycle_is_no_leak(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gc.disable()
    try:
        with World(2) as world, world.as_worker(0):
            cycle = [gw.remote("worker1", Value, ("cycle",))]
            cycle.append(cycle)  # type: ignore[arg-type]
            del cycle
            world.shutdown()
    finally:
        gc.enable()
    assert "still holds" not in caplog.text
    wait_until_freed("cycle")


@pytest.mark.parametrize("patience", [0.0, 60.0])
@pytest.mark.parametrize("caller", [0, 1])
def test_shutdown_does_not_wait_for_what_will_not_come(
    monkeypatch: pytest.MonkeyPatch, patience: float, caller: int
) -> None:
    """A reference in a failed call or an overdue reply, between any two workers."""
    monkeypatch.setattr(held_forks, "PATIENCE", patience)
    with PostedWorld(2) as world, world.as_worker(caller):
        rref, other = local("unsure"), 1 - caller
        with pytest.raises(Boom):
            gw.rpc_sync(other, fail, (rref,))
        world.post.hold(-CALL)
        with pytest.raises(gw.CallTimeout):
            gw.rpc_sync(other, same, (rref,), timeout=0.05)
        with pytest.raises(gw.CallTimeout):
            gw.rpc_sync(other, local, ("overdue",), timeout=0.05)
        del rref
        started = time.monotonic()
        world.shutdown()
    assert time.monotonic() - started < SOON
    wait_until_freed("unsure", "overdue")


def test_shutdown_waits_for_references_in_motion(
    caplog: pytest.LogCaptureFixture,
) -> None:
    global current
    with World(3, seed=4) as current:
        with current.as_worker(0):
            rref = gw.remote("worker1", Value, ("moving",))
            futures = [gw.rpc_async("worker1", hop, (rref, 10)) for _ in range(5)]
            del rref
        current.shutdown()
        assert [future.wait() for future in futures] == ["moving"] * 5
    assert "still holds" not in caplog.text
    wait_until_freed("moving")


def test_leaving_at_once_waits_for_nothing() -> None:
    with World(2) as world, world.as_worker(0):
        rref = gw.remote("worker1", never, timeout=0)
        value = gw.remote("worker1", Value, ("abandoned",))
        value.to_here()
        started = time.monotonic()
        world.shutdown(graceful=False)
        assert time.monotonic() - started < SOON / 2
    with pytest.raises(gw.ClosedError):
        value.to_here()
    with pytest.raises(gw.GradwireError):
        rref.to_here()
    wait_until_freed("abandoned")


# Garbage


def test_a_value_that_refers_to_itself_is_garbage(world: World) -> None:
    rref = local("narcissus")
    rref.local_value().keep(rref)
    watch = weakref.ref(rref.local_value())
    del rref
    gc.collect()
    assert watch() is None
    wait_until_freed("narcissus")


def test_a_remote_value_that_refers_to_itself_is_garbage(world: World) -> None:
    rref = gw.remote("worker1", Value, ("echo",))
    rref.rpc_sync().keep([rref])
    del rref
    wait_until(lambda: not tables(world[0])["held"])
    wait_until_held(world[1], 0)
    gc.collect()
    wait_until_freed("echo")


def test_a_cycle_of_a_user_through_a_reference_is_garbage(world: World) -> None:
    holder = Holder(gw.remote("worker1", Value, ("looped",)))
    holder.me = holder
    holder.future = holder.rref.to_here_async()
    holder.future.wait()
    holder.proxy = holder.rref.rpc_sync()
    holder.kind = holder.rref._get_type(blocking=False)
    holder.kind.wait()
    del holder
    gc.collect()
    wait_until_freed("looped")


def test_a_reference_alone_needs_no_garbage_collector(world: World) -> None:
    gc.collect()
    gc.disable()
    try:
        rref = gw.remote("worker1", Value, ("counted",))
        rref.to_here()
        rref.rpc_sync()("x")
        rref._get_type(blocking=False).wait()
        rref.to_here_async().wait()
        gw.rpc_sync("worker2", fetched, (rref,))
        del rref
        mine = local("own")
        mine.to_here()
        gw.rpc_sync("worker2", fetched, (mine,))
        del mine
        wait_until_freed("counted", "own")
    finally:
        gc.enable()


def test_a_failed_reference_needs_no_garbage_collector(world: World) -> None:
    gc.collect()
    gc.disable()
    try:
        rref = gw.remote("worker1", boom)
        for _ in range(3):
            with pytest.raises(Boom):
                rref.to_here()
        del rref
        wait_until_no_references(world)
    finally:
        gc.enable()


# What people see


def test_debug_info_tells_who_owns_holds_and_carries_what(posted: PostedWorld) -> None:
    empty = {"calls_in_flight": 0, "owned": [], "held": [], "on_their_way": []}
    empty |= {"num_current_backward_passes": 0, "num_autograd_contexts": 0}
    assert [worker.debug_info() for worker in posted] == [empty] * 3
    rref, mine = gw.remote("worker1", Value, ("shown",)), local("mine")
    line = inspect.getframeinfo(inspect.currentframe()).lineno - 1  # type: ignore[arg-type]
    rref.to_here()
    rref._get_future().wait()
    gw.rpc_sync("worker2", keep, (rref,))
    assert gw.rpc.debug_info() == posted[0].debug_info()
    wait_until(lambda: not posted[0].debug_info()["on_their_way"])
    assert posted[0].debug_info() == empty | {
        "owned": [{"value": "0.1", "state": "Value", "forks": {}, "holders": []}],
        "held": [{"value": "0.1", "owner": "worker1", "made_at": f"{__file__}:{line}"}],
    }
    assert posted[1].debug_info()["owned"] == [
        {
            "value": "0.1",
            "state": "Value",
            "forks": {"0.1": 0, "0.2": 2},
            "holders": ["worker0", "worker2"],
        }
    ]
    assert posted[2].debug_info()["held"] == [
        {"value": "0.1", "owner": "worker1", "made_at": "received from worker0"}
    ]
    posted.post.hold(CALL)
    future = gw.rpc_async("worker2", nothing, (mine,))
    info = posted[0].debug_info()
    assert info["calls_in_flight"] == 1
    way = {"value": "0.1", "owner": "worker0", "to": "worker2"}
    assert info["on_their_way"] == [way]
    assert info["owned"][0]["holders"] == ["worker2"]
    posted.post.release()
    future.wait()


def test_many_threads_make_and_drop_at_once(world: World) -> None:
    def body(number: int) -> None:
        with world.as_worker(0):
            for i in range(30):
                name = f"thread{number}.{i}"
                rref = gw.remote("worker1", Value, (name,))
                if i % 3:
                    assert rref.to_here() == name
                names.append(name)

    names: list[str] = []
    with meanwhile(*(functools.partial(body, number) for number in range(6))):
        pass
    wait_until_freed(*names)
