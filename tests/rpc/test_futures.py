"""Futures of calls, and functions whose results come later."""

import asyncio
import gc
import logging
import operator
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire._rpc.function_runner import async_execution
from gradwire._rpc.futures import CallFuture, Fate
from gradwire._transport.loopback import LoopbackTransport
from gradwire.testing import World
from tests.rpc.functions import Boom, add, boom, held, holding, never, whoami
from tests.worlds import LIMIT, in_flight, meanwhile, wait_until

# Waiting


def test_a_future_is_done_when_its_result_is_there(world: World) -> None:
    with holding() as hold:
        future = world[0].rpc_async("worker1", held, (5,))
        assert not future.done()
        assert repr(future) == (
            "<CallFuture of call of tests.rpc.functions.held on worker 'worker1': pending>"
        )
        hold.release.set()
        assert future.wait() == 5
    assert future.done()
    assert future.value() == future.wait() == 5
    assert repr(future).endswith("done>")


def test_a_wait_can_give_up_and_be_tried_again(world: World) -> None:
    with holding() as hold:
        future = world[0].rpc_async("worker1", held, (5,))
        for seconds in (0, 0.01):
            with pytest.raises(TimeoutError) as caught:
                future.wait(timeout=seconds)
            assert not isinstance(caught.value, gw.CallTimeout)
            assert str(caught.value) == (
                "call of tests.rpc.functions.held on worker 'worker1': "
                f"no result after {seconds:g} s"
            )
        hold.release.set()
        assert future.wait(timeout=LIMIT) == 5


def test_the_calls_own_timeout_wins_over_a_longer_wait(world: World) -> None:
    future = world[0].rpc_async("worker1", never, timeout=0.01)
    with pytest.raises(gw.CallTimeout):
        future.wait(timeout=LIMIT)


@pytest.mark.parametrize("to", ["worker1", "worker0"])
def test_many_threads_can_wait_for_one_future(world: World, to: str) -> None:
    results: list[int] = []
    with holding() as hold:
        future = world[0].rpc_async(to, held, (5,), timeout=0)
        with meanwhile(*[lambda: results.append(future.wait())] * 5):
            assert hold.entered.wait(LIMIT)
            hold.release.set()
    assert results == [5] * 5


def test_every_look_at_a_failure_raises_it(world: World) -> None:
    future = world[0].rpc_async("worker1", boom)
    errors = []
    for look in (future.wait, future.value, future.wait):
        with pytest.raises(Boom, match="boom") as caught:
            look()
        errors.append(caught.value)
        assert isinstance(caught.value.__cause__, gw.RemoteError)
    assert len({id(error) for error in errors}) == 3  # each has a traceback of its own


# Callbacks


def test_then_makes_a_future_of_what_the_callback_returns(world: World) -> None:
    future = world[0].rpc_async("worker1", add, (1, 2))
    assert (
        future.then(lambda f: f.value() * 10).then(lambda f: f.wait() + 1).wait() == 31
    )


def test_then_passes_a_failure_on(world: World) -> None:
    child = world[0].rpc_async("worker1", boom, ("far away",)).then(lambda f: f.wait())
    with pytest.raises(RuntimeError, match="far away"):  # torch keeps the text
        child.wait()


def test_a_callback_can_call_on(world: World) -> None:
    with world.as_worker(0):
        first = gw.rpc_async("worker1", add, (1, 2))
        second = first.then(lambda f: gw.rpc_async("worker2", add, (f.value(), 4)))
        assert second.wait().wait() == 7


def test_callbacks_run_once_whenever_they_are_added(world: World) -> None:
    calls: list[tuple[str, int]] = []
    both = threading.Barrier(2)
    with holding() as hold:
        future = world[0].rpc_async("worker1", held, (5,))
        future.add_done_callback(lambda f: calls.append(("early", f.value())))
        future.add_done_callback(lambda _: both.wait(LIMIT))
        hold.release.set()
        both.wait(LIMIT)
    future.add_done_callback(lambda f: calls.append(("late", f.value())))
    assert calls == [("early", 5), ("late", 5)]


# Beside torch's own


def test_futures_mix_with_those_of_torch(world: World) -> None:
    own: torch.futures.Future[int] = torch.futures.Future()
    own.set_result(0)
    calls = [world[i].rpc_async((i + 1) % 3, add, (i, 1)) for i in range(3)]
    assert torch.futures.wait_all([own, *calls]) == [0, 1, 2, 3]
    collected = torch.futures.collect_all([*calls, own]).wait()
    assert [future.wait() for future in collected] == [1, 2, 3, 0]
    assert isinstance(calls[0], torch.futures.Future)


def test_torch_raises_the_failure_of_a_call_as_it_is(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    good = world[0].rpc_async("worker1", add, (1, 2))
    bad = world[0].rpc_async("worker1", boom)
    with pytest.raises(Boom):
        torch.futures.wait_all([good, bad])
    bad = world[0].rpc_async("worker1", boom)
    with pytest.raises(Boom):
        torch.futures.collect_all([bad, good]).wait()
    del bad
    world.shutdown()
    assert "never retrieved" not in caplog.text


# Await


def test_calls_can_be_awaited(world: World) -> None:
    async def main() -> list[int]:
        one = await world[0].rpc_async("worker1", add, (1, 2))
        many = [world[0].rpc_async(i % 3, add, (i, 0)) for i in range(100)]
        return [one, *await asyncio.gather(*many)]

    assert asyncio.run(main()) == [3, *range(100)]


def test_an_awaited_failure_is_raised(world: World) -> None:
    async def main() -> list[Any]:
        calls = [world[0].rpc_async("worker1", f) for f in (boom, whoami)]
        return await asyncio.gather(*calls, return_exceptions=True)

    error, name = asyncio.run(main())
    assert isinstance(error, Boom)
    assert isinstance(error.__cause__, gw.RemoteError)
    assert name == "worker1"


def test_a_future_that_is_done_can_be_awaited_again(world: World) -> None:
    async def main(future: CallFuture) -> int:
        return await future + await future

    future = world[0].rpc_async("worker1", add, (1, 2))
    future.wait()
    assert asyncio.run(main(future)) == 6


def test_an_await_can_be_given_up_and_its_loop_closed(world: World) -> None:
    async def main() -> CallFuture:
        future = world[0].rpc_async("worker1", held, (5,))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(future, 0.01)
        return future

    with holding() as hold:
        future = asyncio.run(main())
        hold.release.set()
        assert future.wait() == 5


def test_awaiting_does_not_block_the_loop(world: World) -> None:
    async def main() -> int:
        with holding() as hold:
            future = world[0].rpc_async("worker1", held, (5,))
            asyncio.get_running_loop().call_soon(hold.release.set)
            return await future

    assert asyncio.run(main()) == 5


# Functions whose results come later


@async_execution
def add_elsewhere(to: str, x: int, y: int) -> torch.futures.Future[int]:
    return gw.rpc_async(to, add, (x, y))


@async_execution
def double_elsewhere(to: str, x: int) -> torch.futures.Future[int]:
    return gw.rpc_async(to, add, (x, x)).then(lambda future: future.wait())


@async_execution
def already_done(x: int) -> torch.futures.Future[int]:
    future: torch.futures.Future[int] = torch.futures.Future()
    future.set_result(x)
    return future


class Service:
    @staticmethod
    @async_execution
    def static(x: int) -> torch.futures.Future[int]:
        return already_done(x)

    @async_execution
    @staticmethod
    def static_the_other_way_round(x: int) -> torch.futures.Future[int]:
        return already_done(x)

    @classmethod
    @async_execution
    def of_class(cls, x: int) -> torch.futures.Future[int]:
        assert cls is Service
        return already_done(x)

    @async_execution
    @classmethod
    def of_class_the_other_way_round(cls, x: int) -> torch.futures.Future[int]:
        assert cls is Service
        return already_done(x)

    @async_execution
    def bound(self, x: int) -> torch.futures.Future[int]:
        assert isinstance(self, Service)
        return already_done(x)

    async def coroutine(self, x: int) -> int:
        return x


LATER = {
    "function": already_done,
    "static method": Service.static,
    "static method, decorated": Service.static_the_other_way_round,
    "class method": Service.of_class,
    "class method, decorated": Service.of_class_the_other_way_round,
    "bound method": Service().bound,
    "async method": Service().coroutine,
}


@pytest.mark.parametrize("to", ["worker1", "worker0"])
@pytest.mark.parametrize("name", LATER)
def test_the_caller_gets_the_value_of_the_future(name: str, to: str) -> None:
    with World(2) as world:
        assert world[0].rpc_sync(to, LATER[name], (7,)) == 7
        assert world[0].rpc_async(to, LATER[name], (7,)).wait() == 7


def test_a_function_can_return_the_future_of_its_own_call(world: World) -> None:
    call = world[0].rpc_sync
    assert call("worker1", add_elsewhere, ("worker2", 3, 4)) == 7
    assert call("worker1", add_elsewhere, ("worker0", 3, 4)) == 7
    assert call("worker1", double_elsewhere, ("worker2", 4)) == 8


def test_many_results_can_come_later_without_a_thread_each() -> None:
    with World(2, threads=1) as world:
        before = threading.active_count()
        futures = [world[0].rpc_async("worker1", never) for _ in range(100)]
        assert world[0].rpc_sync("worker1", whoami) == "worker1"
        assert threading.active_count() < before + 10
        world.shutdown(graceful=False)
        for future in futures:
            with pytest.raises(gw.ClosedError):
                future.wait()


@async_execution
def no_future() -> int:
    return 7


@async_execution
def fails_before() -> torch.futures.Future[int]:
    raise Boom("before")


@async_execution
def fails_later() -> torch.futures.Future[int]:
    future: torch.futures.Future[int] = torch.futures.Future()
    future.set_exception(Boom("later"))
    return future


@async_execution
def lock_later() -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(threading.Lock())
    return future


def test_a_marked_function_must_return_a_future(world: World) -> None:
    with pytest.raises(TypeError) as caught:
        world[0].rpc_sync("worker1", no_future)
    assert str(caught.value) == (
        "tests.rpc.test_futures.no_future is marked async_execution and must return a "
        "torch.futures.Future, but returned int"
    )


@pytest.mark.parametrize(
    ("func", "text"), [(fails_before, "before"), (fails_later, "later")]
)
def test_a_failure_that_comes_later_keeps_its_type(
    world: World, func: Callable[[], Any], text: str
) -> None:
    with pytest.raises(Boom, match=text):
        world[0].rpc_sync("worker1", func)


def test_a_result_that_comes_later_and_cannot_be_sent_is_named(world: World) -> None:
    with pytest.raises(
        TypeError, match=r"lock_later', a _thread\.lock, cannot be sent"
    ):
        world[0].rpc_sync("worker1", lock_later)


# Coroutines


async def aadd(x: int, y: int) -> int:
    await asyncio.sleep(0)
    return x + y


async def relay(to: str, x: int) -> tuple[str, int]:
    total = await gw.rpc_async(to, aadd, (x, 1))
    return whoami(), total


async def abort(kind: type[BaseException]) -> None:
    raise kind("from a coroutine")


def test_a_coroutine_is_run_over_there(world: World) -> None:
    assert world[0].rpc_sync("worker1", aadd, (1, 2)) == 3
    futures = [world[0].rpc_async("worker1", relay, ("worker2", x)) for x in range(50)]
    assert [f.wait() for f in futures] == [("worker1", x + 1) for x in range(50)]


def test_coroutines_of_two_workers_can_await_each_other(world: World) -> None:
    assert world[0].rpc_sync("worker1", relay, ("worker0", 1)) == ("worker1", 2)


@pytest.mark.parametrize(
    ("kind", "arrives"),
    [
        (Boom, Boom),
        (SystemExit, RuntimeError),
        (KeyboardInterrupt, RuntimeError),
        (asyncio.CancelledError, Exception),
    ],
)
def test_what_a_coroutine_raises_reaches_the_caller_and_ends_no_other(
    world: World, kind: type[BaseException], arrives: type[Exception]
) -> None:
    with pytest.raises(arrives) as caught:
        world[0].rpc_sync("worker1", abort, (kind,), timeout=LIMIT)
    assert not isinstance(caught.value, gw.CallTimeout)
    assert world[0].rpc_sync("worker1", aadd, (1, 2)) == 3


async def wait_for_ever(clean_up: bool) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        if clean_up:
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("clean_up", [False, True])
def test_coroutines_under_way_are_cancelled_when_their_worker_goes(
    clean_up: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with World(2) as world:
        future = world[0].rpc_async("worker1", wait_for_ever, (clean_up,))
        assert world[0].rpc_sync("worker1", aadd, (1, 2)) == 3
        gc.collect()  # asyncio holds what it runs by weak references only
        world.kill(1)
        with pytest.raises(gw.WorkerLostError):
            future.wait()
    assert "Task was destroyed" not in caplog.text


def test_a_worker_that_leaves_does_not_blame_the_coroutines_it_cancels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def loop_runs() -> bool:
        names = [thread.name for thread in threading.enumerate()]
        return any(name.startswith("gradwire-worker1-host") for name in names)

    close = LoopbackTransport.close

    def close_late(transport: LoopbackTransport) -> None:
        wait_until(lambda: not loop_runs())
        close(transport)

    with World(2) as world:
        future = world[0].rpc_async("worker1", wait_for_ever, (False,))
        assert world[0].rpc_sync("worker1", aadd, (1, 2)) == 3
        monkeypatch.setattr(LoopbackTransport, "close", close_late)
        world[1].shutdown(graceful=False)
        with pytest.raises(gw.WorkerLostError, match="it has left"):
            future.wait()


# Exceptions that are never retrieved


def unseen(caplog: pytest.LogCaptureFixture) -> list[str]:
    gc.collect()
    texts = [r.getMessage() for r in caplog.records if r.name == "gradwire"]
    return [text for text in texts if "never retrieved" in text]


def test_a_failure_nobody_looked_at_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "gradwire")
    with World(2) as world:
        world[0].rpc_async("worker1", boom, ("unheard",))
    (text,) = unseen(caplog)
    assert text == (
        "call of tests.rpc.functions.boom on worker 'worker1': exception was never retrieved: "
        "Boom('unheard')"
    )


def test_nothing_is_logged_while_the_interpreter_is_taken_apart(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As the logger may be gone."""
    fate = Fate(boom, "worker1")
    fate.error = Boom("unheard")
    fate.__del__(is_finalizing=lambda: True)
    assert unseen(caplog) == []
    fate.__del__(is_finalizing=lambda: False)
    assert len(unseen(caplog)) == 1
    fate.seen = True


LOOKS: dict[str, Callable[[CallFuture], Any]] = {
    "wait": lambda f: f.wait(),
    "value": lambda f: (f.on_done(lambda: None), f.wait(), f.value()),
    "then": lambda f: f.then(lambda _: None).wait(),
    "callback": lambda f: f.add_done_callback(lambda _: None),
    "await": lambda f: asyncio.run(asyncio.wait_for(f, LIMIT)),
    "wait_all": lambda f: torch.futures.wait_all([f]),
    "collect_all": lambda f: torch.futures.collect_all([f]).wait(),
}


@pytest.mark.parametrize("look", LOOKS)
def test_a_failure_somebody_looked_at_is_not_logged(
    look: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "gradwire")
    with World(2) as world:
        try:
            LOOKS[look](world[0].rpc_async("worker1", boom))
        except Boom:
            pass  # some looks raise it, others do not
    assert unseen(caplog) == []


def test_results_nobody_looked_at_are_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with World(2) as world:
        world[0].rpc_async("worker1", whoami)
    assert unseen(caplog) == []


class Unreadable:
    """Can be sent, and not be read."""

    def __reduce__(self) -> Any:
        return int, ("one",)


def give_unreadable() -> Unreadable:
    return Unreadable()


@pytest.mark.parametrize("func", [boom, whoami, give_unreadable])
def test_a_future_is_freed_with_its_last_holder(func: Callable[[], Any]) -> None:
    freed = threading.Event()

    def use(worker: gw.Worker) -> None:
        future = worker.rpc_async("worker1", func)
        weakref.finalize(future, freed.set)
        try:
            future.wait()
        except (Boom, TypeError):
            pass  # its traceback holds this frame, and that the future

    with World(2) as world:
        use(world[0])
        world.shutdown()
    gc.collect()
    assert freed.is_set()


def test_a_future_of_what_could_not_be_sent_is_freed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def post(*_: Any) -> None:
        try:
            raise BrokenPipeError
        except OSError as error:  # whose frames lead to the one that has the future
            raise gw.WorkerLostError("worker1", "it broke") from error

    with World(2) as world:
        monkeypatch.setattr(LoopbackTransport, "post", post)
        freed = threading.Event()
        future = world[0].rpc_async("worker1", whoami)
        weakref.finalize(future, freed.set)
        with pytest.raises(gw.WorkerLostError, match="it broke"):
            future.wait()
        del future
        monkeypatch.undo()
    gc.collect()
    assert freed.is_set()


class Used:
    """What a function works with."""


_used: list[weakref.ref[Used]] = []


async def boom_in_coroutine() -> None:
    used = Used()
    _used.append(weakref.ref(used))
    await asyncio.sleep(0)
    boom()


@pytest.mark.parametrize("way", ["rpc_sync", "remote"])
def test_what_failed_coroutines_used_is_freed(world: World, way: str) -> None:
    def call() -> Any:
        if way == "remote":
            return world[0].remote("worker1", boom_in_coroutine).to_here()
        return world[0].rpc_sync("worker1", boom_in_coroutine)

    _used.clear()
    for _ in range(3):
        with pytest.raises(Boom) as caught:
            call()
        assert "in boom_in_coroutine" in str(caught.value.__cause__)
    world.shutdown()
    gc.collect()
    assert [used() for used in _used] == [None] * 3


def test_nothing_stays_in_flight(world: World) -> None:
    for func, args in [(boom, ()), (whoami, ()), (operator.truediv, (1, 0))]:
        future = world[0].rpc_async("worker1", func, args)
        future.then(lambda _: None).wait()
    assert in_flight(world[0]) == "0 calls in flight"


def test_a_future_that_says_it_is_done_has_a_value(world: World) -> None:
    for number in range(300):
        future = world[0].rpc_async("worker1", add, (number, 0))
        while not future.done():
            pass
        assert future.value() == number
