"""Objects whose methods run one at a time when others call them, and those whose do not."""

import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire._rpc import serial
from gradwire.testing import World
from tests.worlds import LIMIT


class Counter:
    """Loses increments that overlap."""

    def __init__(self) -> None:
        self.count = 0
        self.order: list[int] = []

    def increment(self, number: int = 0) -> None:
        before = self.count
        time.sleep(0.0005)  # others run now, if they may
        self.count = before + 1
        self.order.append(number)

    async def increment_later(self) -> None:
        self.increment()

    def fail(self) -> None:
        raise ValueError("no")

    def value(self) -> int:
        return self.count


@gw.serial
class SerialCounter(Counter):
    """The same, marked."""


@gw.serial
class Outer:
    """Calls another object, on the worker of its caller, while it is busy."""

    def through(self, counter: "gw.RRef[Counter]") -> Any:
        counter.rpc_sync().increment()
        return counter.rpc_sync().value()


class Meeting:
    """Its method ends when two threads are in it."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2)

    def meet(self) -> None:
        self.barrier.wait(LIMIT)


def made_later() -> Any:
    async def make() -> Counter:
        return Counter()

    return make()


MAKERS: dict[str, Callable[[], "gw.RRef[Any]"]] = {
    "marked": lambda: gw.remote("worker1", SerialCounter),
    "asked for": lambda: gw.remote("worker1", Counter, serial=True),
    "made by a coroutine": lambda: gw.remote("worker1", made_later, serial=True),
    "here": lambda: gw.RRef(SerialCounter()),
}


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("method", ["increment", "increment_later"])
def test_a_hundred_increments_give_a_hundred(maker: str, method: str) -> None:
    with World(3) as world, world.as_worker(0):
        counter = MAKERS[maker]()
        calls = [getattr(counter.rpc_async(), method)() for _ in range(50)]
        calls.append(gw.rpc_async("worker2", many, (counter, method)))
        for call in calls:
            call.wait()
        assert counter.rpc_sync().value() == 100


def many(counter: "gw.RRef[Any]", method: str) -> None:
    for call in [getattr(counter.rpc_async(), method)() for _ in range(50)]:
        call.wait()


def test_calls_of_one_caller_one_after_the_other_keep_their_order() -> None:
    with World(2) as world, world.as_worker(0):
        counter = gw.remote("worker1", Counter, serial=True)
        for number in range(10):
            counter.rpc_sync().increment(number)
        assert counter.to_here().order == list(range(10))


def test_methods_of_other_objects_run_at_the_same_time() -> None:
    with World(2) as world, world.as_worker(0):
        meeting = gw.remote("worker1", Meeting)
        calls = [meeting.rpc_async().meet() for _ in range(2)]
        for call in calls:
            call.wait()


def test_a_method_that_raises_ends_its_turn() -> None:
    with World(2) as world, world.as_worker(0):
        counter = gw.remote("worker1", SerialCounter)
        with pytest.raises(ValueError, match="no"):
            counter.rpc_sync().fail()
        counter.rpc_sync().increment()
        assert counter.rpc_sync().value() == 1


def test_those_who_wait_leave_their_threads_to_others() -> None:
    with World(2, threads=2) as world, world.as_worker(0):
        outer = gw.remote("worker1", Outer)
        counter = gw.remote("worker1", SerialCounter)
        calls = [outer.rpc_async().through(counter) for _ in range(20)]
        assert sorted(call.wait() for call in calls) == list(range(1, 21))


def test_a_fair_lock_is_acquired_in_the_order_in_which_it_is_asked_for() -> None:
    lock, order = serial.FairLock(), []
    lock.acquire(threading.Lock)  # type: ignore[arg-type] # not waited for
    asked = []
    for number in range(5):
        waits = threading.Event()
        thread = threading.Thread(target=ask, args=(lock, number, waits, order))
        thread.start()
        assert waits.wait(LIMIT)
        asked.append(thread)
    lock.release()
    for thread in asked:
        thread.join(LIMIT)
    assert order == list(range(5))


def ask(
    lock: serial.FairLock, number: int, waits: threading.Event, order: list[int]
) -> None:
    def waiting() -> Any:
        waits.set()
        return threading.Lock()

    lock.acquire(waiting)
    order.append(number)
    lock.release()


def test_what_can_have_no_weak_references_is_refused() -> None:
    with World(2) as world, world.as_worker(0):
        with pytest.raises(
            TypeError, match="a list cannot be serial: return an object"
        ):
            gw.remote("worker1", list, serial=True).to_here()
        assert gw.remote("worker1", torch.ones, (2,), serial=True).to_here().sum() == 2


def test_nothing_is_kept_of_a_serial_object_that_is_gone() -> None:
    with World(2) as world, world.as_worker(0):
        counter = gw.remote("worker1", SerialCounter)
        counter.rpc_sync().increment()
        assert serial._locks
        del counter
    gc.collect()
    assert not serial._locks
