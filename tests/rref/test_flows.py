"""How references travel, and that every value is freed: once, when the last one lets go.

In loopback worlds: in order, with messages that overtake each other, and with messages about
references that get lost or come twice.
"""

import dataclasses
import functools
import gc
import inspect
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire._rref.messages import ADOPT, CREATE
from gradwire._transport.faulty import Faults
from gradwire._wire.messages import CALL
from gradwire.testing import World
from tests.rpc.functions import held, holding
from tests.rref.lossy import WORLDS, holders
from tests.rref.values import (
    Holder,
    Value,
    ended,
    fetched,
    hop,
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
    PostedWorld,
    meanwhile,
    tables,
    wait_until,
    wait_until_held,
    wait_until_no_references,
)

pytestmark = pytest.mark.usefixtures("impatient")


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
def test_a_reference_can_be_passed_on(
    lossy_world: World, route: tuple[str, ...]
) -> None:
    name = "-".join(route)
    rref = gw.remote("worker1", Value, (name,))
    assert passed(rref, *route) == name
    assert rref.to_here() == name
    assert ended[name] == 0
    del rref
    wait_until_freed(name)


@pytest.mark.parametrize("route", [("worker1",), ("worker1", "worker2"), ("worker0",)])
def test_a_local_reference_can_be_passed_on(
    lossy_world: World, route: tuple[str, ...]
) -> None:
    rref = local("local")
    assert passed(rref, *route) == "local"
    del rref
    wait_until_freed("local")


def fetch_and_name_holders(rref: gw.RRef[Any]) -> list[str]:
    rref.to_here()
    return holders(rref)


def test_the_first_fetch_tells_the_owner_of_the_fork(lossy_world: World) -> None:
    rref = gw.remote("worker1", Value, ("known",))
    found = gw.rpc_sync("worker2", fetch_and_name_holders, (rref,))
    assert found == ["worker0", "worker2"]
    del rref
    wait_until_freed("known")


def test_a_function_does_not_wait_until_the_owner_knows_of_the_fork(
    posted: PostedWorld,
) -> None:
    rref = gw.remote("worker1", Value, ("runs",))
    rref.to_here()
    posted.post.hold(ADOPT)
    with holding() as hold:
        future = gw.rpc_async("worker2", held, (rref,))
        del rref
        assert hold.entered.wait(LIMIT)
        wait_until(lambda: posted.post.waits(ADOPT))  # as nothing has been fetched
        hold.release.set()
        assert not ended["runs"]  # the parent has not let go
        assert not future.done()
        posted.post.release()
        assert future.wait().to_here() == "runs"
    del future
    wait_until_freed("runs")


def test_a_handle_can_be_dropped_while_the_call_is_under_way(
    lossy_world: World,
) -> None:
    with holding() as hold:
        future = gw.rpc_async("worker2", held, (gw.remote("worker1", Value, ("x",)),))
        assert hold.entered.wait(LIMIT)
        gc.collect()
        assert not ended["x"]
        hold.release.set()
        assert future.wait().to_here() == "x"
    del future
    wait_until_freed("x")


def test_what_a_function_keeps_stays(lossy_world: World) -> None:
    rref = gw.remote("worker1", Value, ("kept",))
    gw.rpc_sync("worker2", keep, (rref,))
    del rref
    wait_until(lambda: not tables(lossy_world[0])["held"])
    wait_until_held(lossy_world[1], 1)
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


@pytest.mark.parametrize("lossy_world", ["fifo", "lossy1"], indirect=True)
@pytest.mark.parametrize("name", PACKED)
def test_references_travel_inside_of_other_things(
    lossy_world: World, name: str
) -> None:
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


def test_a_function_can_hold_references_too(lossy_world: World) -> None:
    holder = Holder(gw.remote("worker1", Value, ("bound",)))
    assert gw.rpc_sync("worker2", holder.fetch) == "bound"
    bound = functools.partial(fetched, holder.rref)
    assert gw.remote("worker2", bound).to_here() == "bound"
    del holder, bound
    wait_until_freed("bound")


def test_the_same_reference_twice_in_a_message_is_one(lossy_world: World) -> None:
    rref = gw.remote("worker1", Value, ("twice",))
    first, rest = gw.rpc_sync("worker2", same, ((rref, [rref]),))
    assert first is rest[0]
    assert first is not rref
    del rref, rest, first
    wait_until_freed("twice")


def test_many_references_in_one_message_all_come(lossy_world: World) -> None:
    names = [f"many{i}" for i in range(30)]
    rrefs = [gw.remote(f"worker{i % 3}", Value, (n,)) for i, n in enumerate(names)]
    back = gw.rpc_sync("worker2", same, (rrefs,))
    assert [name_of(rref) for rref in back] == names
    del rrefs, back
    wait_until_freed(*names)


# Replies


def test_a_call_can_return_a_reference_of_its_own(lossy_world: World) -> None:
    rref = gw.rpc_sync("worker1", local, ("own",))
    assert rref.owner_name() == "worker1"
    assert rref.to_here() == "own"
    assert rref.confirmed_by_owner()
    del rref
    wait_until_freed("own")


@pytest.mark.parametrize("to", ["worker0", "worker1", "worker2"])
def test_a_call_can_return_a_reference_to_anyones_value(
    lossy_world: World, to: str
) -> None:
    rref = gw.rpc_sync("worker2", make_at, (to, "anyone"))
    assert rref.owner_name() == to
    assert rref.is_owner() == (to == "worker0")
    assert name_of(rref) == "anyone"
    del rref
    wait_until_freed("anyone")


def test_what_comes_back_to_its_owner_is_the_value_itself(lossy_world: World) -> None:
    rref = local("home")
    back = gw.rpc_sync("worker2", same, (rref,))
    assert back.local_value() is rref.local_value()
    del rref
    assert back.local_value().name == "home"
    del back
    wait_until_freed("home")


def test_a_result_that_nobody_takes_is_freed(lossy_world: World) -> None:
    gw.rpc_sync("worker1", local, ("unused",))
    wait_until_freed("unused")
    gw.rpc_async("worker2", make_at, ("worker1", "thrown away"))
    wait_until_freed("thrown away")


def test_a_reference_to_a_reference_keeps_both(lossy_world: World) -> None:
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


def test_everyone_can_gather_references(lossy_world: World) -> None:
    def share(worker: gw.Worker) -> list[str]:
        mine = local(f"of {worker.name}")
        everyone = worker.all_gather(mine)
        return [name_of(everyone[name]) for name in sorted(everyone)]

    names = [f"of worker{i}" for i in range(3)]
    assert lossy_world.run(share) == [names] * 3
    wait_until_freed(*names)


# Methods


def test_methods_take_and_give_references(lossy_world: World) -> None:
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


def test_calls_under_way_keep_the_value(lossy_world: World) -> None:
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


def test_references_go_around_in_a_ring(lossy_world: World) -> None:
    rrefs = [gw.remote(to, Value, (f"ring{to}",)) for to in range(3)]

    def run(rref: gw.RRef[Any], name: str) -> None:
        with lossy_world.as_worker(0):
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


def test_many_threads_make_and_drop_at_once(lossy_world: World) -> None:
    def body(number: int) -> None:
        with lossy_world.as_worker(0):
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
