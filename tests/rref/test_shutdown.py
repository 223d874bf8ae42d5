"""References at the end of a world: what was dropped is settled, what leaks is named."""

import gc
import inspect
import logging
import time

import pytest

import gradwire as gw
from gradwire._rref import held_forks
from gradwire._rref.messages import NOTES
from gradwire._transport.faulty import Faults
from gradwire._wire.messages import CALL
from gradwire.testing import World
from tests.rpc.functions import Boom, never
from tests.rref.lossy import WORLDS
from tests.rref.values import (
    Value,
    ended,
    fail,
    hop,
    keep,
    kept,
    local,
    nothing,
    same,
    wait_until_freed,
)
from tests.worlds import (
    SOON,
    PostedWorld,
)

pytestmark = pytest.mark.usefixtures("impatient")


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


def test_the_end_does_not_wait_longer_for_notes_than_it_is_told() -> None:
    faults = Faults(drop=1.0, kinds=frozenset({NOTES}))
    with World(2, seed=0, faults=faults) as world:
        with world.as_worker(0):
            assert gw.remote("worker1", max, (1, 2)).to_here() == 2
        with pytest.raises(gw.CallTimeout, match="notes from here"):
            world[0].shutdown(timeout=0.1)


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
    here = f"value 0.1 of 'worker1', made at {__file__}:{line}"
    assert f"worker 'worker0' still holds a reference at shutdown: {here}" in (
        caplog.text
    )
    there = "value 0.1 of 'worker1', received from worker0"
    assert f"worker 'worker2' still holds a reference at shutdown: {there}" in (
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
    with World(3, seed=4) as world:
        with world.as_worker(0):
            rref = gw.remote("worker1", Value, ("moving",))
            futures = [gw.rpc_async("worker1", hop, (rref, 10)) for _ in range(5)]
            del rref
        world.shutdown()
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
