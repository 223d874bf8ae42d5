"""References in cycles: garbage is found where it lies on one worker."""

import gc
import weakref

import pytest

import gradwire as gw
from gradwire.testing import World
from tests.rpc.functions import Boom, boom
from tests.rref.values import (
    Holder,
    Value,
    fetched,
    local,
    wait_until_freed,
)
from tests.worlds import (
    tables,
    wait_until,
    wait_until_held,
    wait_until_no_references,
)

pytestmark = pytest.mark.usefixtures("impatient")


# Garbage


def test_a_value_that_refers_to_itself_is_garbage(lossy_world: World) -> None:
    rref = local("narcissus")
    rref.local_value().keep(rref)
    watch = weakref.ref(rref.local_value())
    del rref
    gc.collect()
    assert watch() is None
    wait_until_freed("narcissus")


def test_a_remote_value_that_refers_to_itself_is_garbage(lossy_world: World) -> None:
    rref = gw.remote("worker1", Value, ("echo",))
    rref.rpc_sync().keep([rref])
    del rref
    wait_until(lambda: not tables(lossy_world[0])["held"])
    wait_until_held(lossy_world[1], 0)
    gc.collect()
    wait_until_freed("echo")


def test_a_cycle_of_a_user_through_a_reference_is_garbage(lossy_world: World) -> None:
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


def test_a_reference_alone_needs_no_garbage_collector(lossy_world: World) -> None:
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


def test_a_failed_reference_needs_no_garbage_collector(lossy_world: World) -> None:
    gc.collect()
    gc.disable()
    try:
        rref = gw.remote("worker1", boom)
        for _ in range(3):
            with pytest.raises(Boom):
                rref.to_here()
        del rref
        wait_until_no_references(lossy_world)
    finally:
        gc.enable()
