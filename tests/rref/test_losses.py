"""References when workers die, and when calls and messages come too late.

Every value is freed all the same, and who uses a reference that is gone is told.
"""

import gc
import time
from collections.abc import Callable
from typing import Any

import pytest

import gradwire as gw
from gradwire._rref.messages import ADOPT, CREATE, NOTES, RECALL
from gradwire._wire.messages import CALL
from gradwire.testing import World
from tests.rpc.functions import Boom, held, holding
from tests.rref.lossy import holders
from tests.rref.values import (
    Value,
    ended,
    fail,
    fetched,
    keep,
    kept,
    local,
    make_at,
    nothing,
    same,
    wait_until_freed,
)
from tests.worlds import (
    LIMIT,
    SOON,
    PostedWorld,
    meanwhile,
    tables,
    wait_until,
    wait_until_no_references,
)

pytestmark = pytest.mark.usefixtures("impatient")


# Workers that die


def test_values_that_only_a_lost_worker_held_are_freed(lossy_world: World) -> None:
    alone = gw.remote("worker1", Value, ("alone",))
    shared = gw.remote("worker1", Value, ("shared",))
    gw.rpc_sync("worker2", keep, ([alone, shared],))
    del alone
    wait_until(lambda: len(tables(lossy_world[0])["held"]) == 1)
    assert not ended["alone"]
    lossy_world.kill(2)
    wait_until_freed("alone")
    assert shared.to_here() == "shared"
    assert holders(shared) == ["worker0"]
    del shared
    wait_until_freed("shared")


def test_a_lost_creator_takes_its_values_along(lossy_world: World) -> None:
    names = [f"creator{i}" for i in range(3)]
    with lossy_world.as_worker(2):
        made = [gw.remote("worker1", Value, (name,)) for name in names]
        [rref.to_here() for rref in made]
        gw.rpc_sync("worker0", keep, (made[2],))
    lossy_world.kill(2)
    wait_until_freed(*names[:2])
    assert kept["worker0"][0].to_here() == "creator2"
    kept.clear()
    wait_until_freed("creator2")


def test_uses_of_a_lost_owners_value_fail_at_once(lossy_world: World) -> None:
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
        with meanwhile(lambda: lossy_world.kill(1)):  # it waits for the function
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
    wait_until(lambda: not tables(lossy_world[0])["held"])
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


def test_a_reference_whose_sender_dies_before_the_owner_knows_of_it_is_of_no_use(
    posted: PostedWorld,
) -> None:
    with posted.as_worker(2):
        rref = gw.remote("worker1", Value, ("orphan",))
        rref.to_here()
        posted.post.hold(ADOPT)
        future = gw.rpc_async("worker0", keep, (rref,))
        wait_until(lambda: posted.post.waits(ADOPT))
        posted.kill(2)
        wait_until_freed("orphan")
        posted.post.release()
        with pytest.raises(gw.GradwireError):
            future.wait()
    (received,) = kept["worker0"]
    with pytest.raises(gw.StaleReferenceError, match="has been freed"):
        received.to_here()
    del received
    kept.clear()
    wait_until_no_references(posted)


def test_a_reference_that_came_outlives_its_sender(lossy_world: World) -> None:
    with lossy_world.as_worker(2):
        rref = gw.remote("worker1", Value, ("inherited",))
        gw.rpc_sync("worker0", keep, (rref,))
    lossy_world.kill(2)
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
def test_a_reference_returned_to_a_dead_caller_is_freed(
    lossy_world: World, to: int
) -> None:
    """To the one who called and is gone, and to the one who is gone before it is sent."""
    with lossy_world.as_worker(0), holding() as hold:
        gw.rpc_async(to, hold_and_make, ("dead letter",))
        assert hold.entered.wait(LIMIT)
        lossy_world.kill(0)
        hold.release.set()
    wait_until(lambda: "dead letter" in ended)
    wait_until_freed("dead letter")
    wait_until_no_references(lossy_world)


def hold_and_make(name: str) -> Any:
    held()
    ended.pop(name, None)
    return [gw.RRef(Value(name)), gw.remote("worker1", nothing)]


def test_a_lost_worker_does_not_keep_shutdown_waiting(lossy_world: World) -> None:
    rref = gw.remote("worker1", Value, ("held on",))
    gw.rpc_sync("worker2", keep, (rref,))
    with holding() as hold, lossy_world.as_worker(2):
        gw.rpc_async("worker1", hold_and_make, ("unread",))
        assert hold.entered.wait(LIMIT)
        lossy_world.kill(2)
        hold.release.set()
        started = time.monotonic()
        lossy_world.shutdown()
    assert time.monotonic() - started < SOON
    del rref
    kept.clear()
    wait_until_freed("held on")


# Calls that end too early or too late


def test_a_call_that_times_out_lets_go_when_its_function_ends(
    lossy_world: World,
) -> None:
    rref, mine = gw.remote("worker1", Value, ("slow",)), local("mine")
    with holding() as hold:
        with pytest.raises(gw.CallTimeout):
            gw.rpc_sync("worker2", held, ([rref, mine],), timeout=0.1)
        del rref, mine
        assert hold.entered.wait(LIMIT)
        wait_until(lambda: not tables(lossy_world[0])["on_their_way"])
        gc.collect()
        assert not ended["slow"]
        assert not ended["mine"]
        assert not hold.release.is_set()
        hold.release.set()
    wait_until_freed("slow", "mine")


def test_a_call_that_fails_lets_go_of_its_references(lossy_world: World) -> None:
    for to in range(3):
        rref, mine = gw.remote("worker1", Value, (f"a{to}",)), local(f"b{to}")
        with pytest.raises(Boom):
            gw.rpc_sync(to, fail, (rref, [mine]))
        gw.rpc_async(to, fail, (rref, mine)).then(nothing).wait()
        del rref, mine
    gc.collect()  # the errors' frames
    wait_until_freed(*[f"{letter}{to}" for letter in "ab" for to in range(3)])


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


def test_a_call_ends_in_time_although_the_owner_of_its_result_is_silent(
    posted: PostedWorld,
) -> None:
    posted.post.hold(ADOPT)
    with pytest.raises(gw.CallTimeout, match="make_at on worker 'worker2'"):
        gw.rpc_sync("worker2", make_at, ("worker1", "silent"), timeout=0.2)
    future = gw.rpc_async("worker2", make_at, ("worker1", "mute"), timeout=0.2)
    with pytest.raises(gw.CallTimeout, match="make_at on worker 'worker2'"):
        future.wait()
    posted.post.release()
    wait_until_freed("silent", "mute")


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
