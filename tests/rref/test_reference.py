"""What a reference can do, on a loopback world: its methods, its errors, its states."""

import asyncio
import copy
import gc
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire import api
from gradwire._rpc.async_execution import async_execution
from gradwire.testing import World
from tests.rpc.functions import Boom, add, boom, held, holding, never, whoami
from tests.rref.values import Value, fetched, local, same, wait_until_freed
from tests.worlds import LIMIT, meanwhile, orders, wait_until, wait_until_no_references


@pytest.fixture(params=[None, 1, 2], ids="fifo seed1 seed2".split())
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with World(3, seed=request.param) as world, world.as_worker(0):
        yield world


@pytest.fixture
def plain() -> Iterator[World]:
    """One world is enough for what does not depend on the order of messages."""
    with World(3) as world, world.as_worker(0):
        yield world


ME, OTHER = "worker0", "worker1"
both = pytest.mark.parametrize("to", [ME, OTHER])


# Whose it is


def test_a_reference_knows_its_owner(plain: World) -> None:
    rref = gw.remote(OTHER, add, (1, 2))
    assert rref.owner() == gw.WorkerInfo("worker1", 1)
    assert rref.owner_name() == "worker1"
    assert not rref.is_owner()


def test_a_local_reference_is_its_own_owner(plain: World) -> None:
    for rref in (gw.RRef(3), gw.remote(ME, add, (1, 2))):
        assert rref.owner() == gw.WorkerInfo("worker0", 0)
        assert rref.owner_name() == "worker0"
        assert rref.is_owner()
        assert rref.confirmed_by_owner()
        assert rref.local_value() == 3


def describe(rref: gw.RRef[Any]) -> tuple[str, bool, bool]:
    return rref.owner_name(), rref.is_owner(), rref.confirmed_by_owner()


def test_who_gets_a_reference_knows_its_owner_too(world: World) -> None:
    rref = gw.remote(OTHER, add, (1, 2))
    seen = [gw.rpc_sync(to, describe, (rref,)) for to in range(3)]
    assert seen == [("worker1", to == 1, True) for to in range(3)]


@pytest.mark.parametrize("to", ["worker1", 1, gw.WorkerInfo("worker1", 1)])
def test_remote_names_a_worker_like_every_call(plain: World, to: Any) -> None:
    assert gw.remote(to, whoami).to_here() == "worker1"


def test_remote_passes_arguments_by_place_and_by_name(plain: World) -> None:
    rref = gw.remote(OTHER, Value, kwargs={"name": "named"})
    assert rref.to_here() == "named"
    assert gw.remote(OTHER, add, [1], {"y": 5}).to_here() == 6


def test_annotations_can_name_the_type_of_the_value(plain: World) -> None:
    assert repr(gw.RRef[int]).endswith("RRef[int]")
    assert gw.RRef[int](3).local_value() == 3
    assert type(gw.RRef[int](3)) is gw.RRef
    assert gw.RRef(3, type_hint=int).local_value() == 3


# When it is there


def test_a_reference_is_confirmed_when_its_function_has_returned(world: World) -> None:
    with holding() as hold:
        rref = gw.remote(OTHER, held, (5,))
        assert hold.entered.wait(LIMIT)
        assert not rref.confirmed_by_owner()
        assert not rref._get_future().done()
        hold.release.set()
        rref._get_future().wait()
        assert rref.confirmed_by_owner()
        assert rref._get_future().wait() is None
    assert rref.to_here() == 5


def test_remote_returns_before_its_function_does(plain: World) -> None:
    with holding() as hold:
        rrefs = [gw.remote(to, held, (to,)) for to in (ME, OTHER)]
        assert hold.entered.wait(LIMIT)
        hold.release.set()
        assert [rref.to_here() for rref in rrefs] == [ME, OTHER]


@both
def test_the_future_of_a_reference_says_when_the_value_is_there(to: str) -> None:
    with World(2) as world, holding() as hold, world.as_worker(0):
        rref = gw.remote(to, held)
        future = rref._get_future()
        with pytest.raises(TimeoutError):
            future.wait(0.01)
        hold.release.set()
        assert future.wait() is None


def test_repr_says_who_owns_it_and_in_what_state(plain: World) -> None:
    with holding() as hold:
        there, here = gw.remote(OTHER, held, (1,)), gw.remote(ME, held, (2,))
        assert repr(there) == "<RRef 0.1, owner 'worker1': pending>"
        assert repr(here) == "<RRef 0.1, owner here: pending>"
        hold.release.set()
        there.to_here()
        here.to_here()
    there._get_future().wait()
    assert repr(there) == "<RRef 0.1, owner 'worker1': confirmed>"
    assert repr(here) == "<RRef 0.1, owner here: int>"
    assert repr(gw.RRef(Value("seen"))).endswith("owner here: Value>")


def test_repr_tells_of_failures(plain: World) -> None:
    rref = gw.remote(OTHER, never, timeout=0.02)
    wait_until(lambda: repr(rref).endswith("owner 'worker1': failed: CallTimeout>"))
    assert not rref.confirmed_by_owner()
    failed = gw.remote(ME, boom)
    wait_until(lambda: repr(failed).endswith("owner here: failed>"))


def test_parts_say_in_repr_what_they_keep(plain: World) -> None:
    rref = gw.remote(OTHER, add, (1, 2))
    rref.to_here()
    said = repr(plain[0].references)
    assert "References of worker0" in said
    assert "HeldForks of 1 forks" in said
    assert "OwnedValues of worker1: 1 values held by others" in repr(
        plain[1].references
    )
    assert repr(rref.rpc_sync()).startswith("<Proxy of ")


# Getting the value


def test_to_here_gives_a_copy_and_at_the_owner_the_value_itself(world: World) -> None:
    data = torch.arange(3.0)
    rref = gw.RRef(data)
    assert rref.to_here() is data
    assert rref.local_value() is data
    other = gw.remote(OTHER, same, (data,))
    torch.testing.assert_close(other.to_here(), data)
    assert other.to_here() is not other.to_here()


def test_a_large_value_comes_whole(world: World) -> None:
    rref = gw.remote(OTHER, torch.arange, (100_000,))
    torch.testing.assert_close(rref.to_here(), torch.arange(100_000))


@pytest.mark.parametrize("value", [None, 0, (), False])
def test_a_value_can_be_nothing_much(plain: World, value: Any) -> None:
    assert gw.remote(OTHER, same, (value,)).to_here() == value
    assert gw.RRef(value).to_here() == value


def test_only_the_owner_has_a_local_value(plain: World) -> None:
    rref = gw.remote(OTHER, add, (1, 2))
    with pytest.raises(gw.GradwireError, match=r"worker0.*owner 'worker1', or .*to_he"):
        rref.local_value()
    assert gw.rpc_sync(OTHER, gw.RRef.local_value, (rref,)) == 3


@both
def test_to_here_takes_a_timeout(to: str) -> None:
    with World(2) as world, holding() as hold, world.as_worker(0):
        rref = gw.remote(to, held, (7,))
        with pytest.raises(gw.CallTimeout) as caught:
            rref.to_here(timeout=0.02)
        assert caught.value.worker == to
        assert caught.value.seconds == 0.02
        with pytest.raises(TimeoutError):
            rref._get_type(timeout=0.02)
        hold.release.set()
        assert rref.to_here(timeout=0) == 7


@both
def test_the_default_timeout_is_that_of_calls(to: str) -> None:
    with World(2, timeout=0.05) as world, world.as_worker(0):
        rref = gw.remote(to, never, timeout=0)
        with pytest.raises(gw.CallTimeout, match=r"0\.05 s"):
            rref.to_here()
        world.shutdown(graceful=False)


@both
def test_a_negative_timeout_is_refused(to: str) -> None:
    with World(2) as world, world.as_worker(0):
        rref = gw.remote(to, add, (1, 2))
        rref.to_here()
        for use in (rref.to_here, rref._get_type):
            with pytest.raises(ValueError, match="timeout=-1"):
                use(timeout=-1)
        with pytest.raises(ValueError, match="timeout=-1"):
            rref.rpc_sync(timeout=-1).bit_length()


def test_a_value_can_be_awaited(world: World) -> None:
    async def take_all() -> list[Any]:
        rrefs = [gw.remote(OTHER, add, (i, 1)) for i in range(5)]
        mine = [gw.RRef("mine"), gw.remote(ME, add, (2, 2))]
        return await asyncio.gather(*map(wait_for, [*rrefs, *mine]))

    async def wait_for(rref: gw.RRef[Any]) -> Any:
        return await rref

    assert asyncio.run(take_all()) == [1, 2, 3, 4, 5, "mine", 4]


def test_to_here_async_gives_a_future(world: World) -> None:
    with holding() as hold:
        futures = [gw.remote(to, held, (to,)).to_here_async() for to in (ME, OTHER)]
        assert not any(future.done() for future in futures)
        hold.release.set()
        assert [future.wait() for future in futures] == [ME, OTHER]
    with pytest.raises(Boom):
        gw.remote(OTHER, boom).to_here_async().wait()


def test_to_here_async_takes_a_timeout(plain: World) -> None:
    with holding():
        future = gw.remote(OTHER, held).to_here_async(timeout=0.02)
        with pytest.raises(gw.CallTimeout):
            future.wait()


def test_an_awaited_error_is_raised(plain: World) -> None:
    async def fail(to: str) -> None:
        await gw.remote(to, boom, ("awaited",))

    for to in (ME, OTHER):
        with pytest.raises(Boom, match="awaited"):
            asyncio.run(fail(to))


@both
def test_the_type_of_a_value_can_be_asked_for(to: str) -> None:
    with World(2) as world, world.as_worker(0):
        rref = gw.remote(to, Value, ("typed",))
        assert rref._get_type() is Value
        future = rref._get_type(blocking=False)
        assert future is rref._get_type(blocking=False)
        assert future.wait() is Value
        with pytest.raises(Boom):
            gw.remote(to, boom)._get_type()


def test_many_threads_can_use_one_reference(world: World) -> None:
    with holding() as hold:
        rref = gw.remote(OTHER, held, (torch.ones(3),))

        def use() -> None:
            for _ in range(20):
                assert rref.to_here().sum() == 3
                assert rref.rpc_sync().sum() == 3
                assert rref.confirmed_by_owner() or rref._get_future().wait() is None

        with meanwhile(*[use] * 8):
            hold.release.set()


# Calling what is there


class Counter:
    def __init__(self, count: int = 0) -> None:
        self.count = count

    def add(self, number: int = 1, *, times: int = 1) -> int:
        self.count += number * times
        return self.count

    def __call__(self, number: int) -> int:
        return self.count + number

    def fail(self) -> None:
        raise Boom(f"at {self.count}")

    def grad_mode(self) -> bool:
        return torch.is_grad_enabled()

    async def add_slowly(self, number: int) -> int:
        await asyncio.sleep(0)
        return self.add(number)

    @async_execution
    def add_later(self, number: int) -> torch.futures.Future[int]:
        future: torch.futures.Future[int] = torch.futures.Future()
        threading.Thread(target=lambda: future.set_result(self.add(number))).start()
        return future

    @async_execution
    def not_later(self) -> int:
        return 1

    @classmethod
    def kind(cls) -> str:
        return cls.__name__

    @staticmethod
    def double(x: int) -> int:
        return 2 * x


class Ways:
    """The three ways to call a method, each giving the result."""

    def __init__(self, rref: gw.RRef[Any]) -> None:
        self._rref = rref

    def __iter__(self) -> Iterator[Callable[..., Any]]:
        for way in ("rpc_sync", "rpc_async", "remote"):
            yield lambda name, *args, way=way, **kwargs: self._call(
                way, name, args, kwargs
            )

    def _call(self, way: str, name: str, args: Any, kwargs: Any) -> Any:
        proxy = getattr(self._rref, way)()
        method = proxy if name == "()" else getattr(proxy, name)
        result = method(*args, **kwargs)
        if way == "rpc_sync":
            return result
        return result.wait() if way == "rpc_async" else result.to_here()


@both
@orders
def test_methods_are_called_in_three_ways(to: str, seed: int | None) -> None:
    with World(2, seed=seed) as world, world.as_worker(0):
        rref = gw.remote(to, Counter, (10,))
        for count, call in enumerate(Ways(rref), 1):
            assert call("add") == 10 + 10 * count - 9
            assert call("add", 3, times=3) == 10 + 10 * count
            assert call("()", 5) == 15 + 10 * count
            assert call("kind") == "Counter"
            assert call("double", 4) == 8


@both
def test_asynchronous_methods_are_waited_for(to: str) -> None:
    with World(2) as world, world.as_worker(0):
        rref = gw.remote(to, Counter)
        for count, call in enumerate(Ways(rref)):
            assert call("add_slowly", 1) == 1 + 2 * count
            assert call("add_later", 1) == 2 + 2 * count
            with pytest.raises(TypeError, match=r"must return a torch\.futures"):
                call("not_later")


@both
def test_methods_raise_where_they_are_called(to: str) -> None:
    with World(2) as world, world.as_worker(0):
        for call in Ways(gw.remote(to, Counter, (4,))):
            with pytest.raises(Boom, match="at 4") as caught:
                call("fail")
            if to == OTHER:
                assert "in fail" in str(caught.value.__cause__)
            with pytest.raises(AttributeError, match="no attribute 'missing'"):
                call("missing")
            with pytest.raises(TypeError, match="unexpected keyword argument 'what'"):
                call("add", what=1)


@both
def test_methods_run_in_the_modes_of_their_caller(to: str) -> None:
    with World(2) as world, world.as_worker(0):
        rref = gw.remote(to, Counter)
        for call in Ways(rref):
            assert call("grad_mode") is True
            with torch.no_grad():
                assert call("grad_mode") is False
        with torch.no_grad():
            flag = gw.remote(to, torch.is_grad_enabled)
        assert flag.to_here() is False


def test_methods_see_the_value_and_not_a_copy(world: World) -> None:
    rref = gw.remote(OTHER, Counter)
    rref.rpc_sync().add(5)
    assert gw.rpc_sync(OTHER, lambda rref: rref.local_value().count, (rref,)) == 5
    assert rref.to_here().count == 5


def test_a_method_can_have_any_keyword(plain: World) -> None:
    # Also those that our own functions use.
    rref = gw.remote(OTHER, dict)
    for call in Ways(rref):
        call("update", method=1, timeout=2, self=3, core=4, args=5)
    names = {"method", "timeout", "self", "core", "args"}
    assert set(rref.to_here()) == names


@both
def test_calls_of_methods_take_a_timeout(to: str) -> None:
    with World(2) as world, holding() as hold, world.as_worker(0):
        rref = gw.RRef(held) if to == ME else gw.remote(to, same, (held,))
        with pytest.raises(gw.CallTimeout):
            rref.rpc_sync(timeout=0.02)()
        with pytest.raises(gw.CallTimeout):
            rref.rpc_async(timeout=0.02)().wait()
        late = rref.remote(timeout=0.02)()
        wait_until(lambda: "failed" in repr(late))
        with pytest.raises(gw.CallTimeout):
            late.to_here()
        hold.release.set()
        assert rref.rpc_sync(timeout=0)(9) == 9


def test_results_of_methods_are_references_in_turn(world: World) -> None:
    rref = gw.remote(OTHER, torch.ones, (2, 3))
    total = rref.remote().sum(0).remote().mul(2)
    assert total.owner_name() == "worker1"
    torch.testing.assert_close(total.to_here(), torch.full((3,), 4.0))


def test_a_method_called_before_the_value_is_there_waits_for_it(world: World) -> None:
    with holding() as hold:
        rref = gw.remote(OTHER, held, (Counter(1),))
        early = rref.rpc_async().add(2)
        chained = rref.remote().add(3)
        assert not early.done()
        hold.release.set()
        assert early.wait() in (3, 6)
        assert chained.to_here() in (4, 6)


@both
def test_the_results_of_asynchronous_functions_are_values(to: str) -> None:
    async def slowly(x: int) -> int:
        await asyncio.sleep(0)
        return x + 1

    with World(2) as world, world.as_worker(0):
        assert gw.remote(to, slowly, (1,)).to_here() == 2
        assert gw.remote(to, later, (3,)).to_here() == 3
        with pytest.raises(Boom, match="not now"):
            gw.remote(to, fail_later, ("not now",)).to_here()


@async_execution
def later(value: Any) -> torch.futures.Future[Any]:
    return gw.rpc_async("worker1", same, (value,)).then(lambda done: done.value())


@async_execution
def fail_later(text: str) -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_exception(Boom(text))
    return future


# Errors


def uses(rref: gw.RRef[Any]) -> list[Callable[[], Any]]:
    """All ways to get at a value that is not here."""
    return [
        rref.to_here,
        rref.to_here_async().wait,
        lambda: rref._get_type(),
        lambda: rref._get_type(blocking=False).wait(),
        lambda: rref.rpc_sync().anything(),
        lambda: rref.rpc_async().anything().wait(),
        lambda: rref.remote().anything().to_here(),
    ]


def attempts(rref: gw.RRef[Any]) -> list[Callable[[], Any]]:
    """Uses that fail before anything is sent."""
    return [
        rref.to_here,
        rref._get_type,
        rref.to_here_async,
        lambda: rref.rpc_sync().where(),
        lambda: rref.rpc_async().where(),
        lambda: rref.remote().where(),
        lambda: gw.rpc_sync("worker1", fetched, (rref,)),
        lambda: gw.remote("worker1", fetched, ([rref],)),
    ]


@orders
def test_an_error_is_raised_at_every_use(seed: int | None) -> None:
    with World(2, seed=seed) as world, world.as_worker(0):
        rref = gw.remote(OTHER, boom, ("kept",))
        for _ in range(2):
            for use in uses(rref):
                with pytest.raises(Boom, match="kept") as caught:
                    use()
                cause = caught.value.__cause__
                assert isinstance(cause, gw.RemoteError)
                assert cause.worker == "worker1"
                assert "in boom" in cause.trace
        assert rref.confirmed_by_owner()  # that it failed


def test_an_error_is_raised_at_the_owner_too(plain: World) -> None:
    mine = gw.remote(ME, boom, ("mine",))
    for use in (mine.local_value, *uses(mine)):
        with pytest.raises(Boom, match="mine"):
            use()


def test_several_workers_see_the_same_error(world: World) -> None:
    rref = gw.remote(OTHER, boom, ("far",))
    for to in range(3):
        with pytest.raises(Boom, match="far") as caught:
            gw.rpc_sync(to, fetched, (rref,))
        assert "in boom" in str(caught.value.__cause__)


class Picky(Exception):
    """An error that cannot be copied: its constructor wants more than its text."""

    def __init__(self, code: int, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code


def raise_picky() -> None:
    raise Picky(7, "picky")


def trace_length(error: BaseException) -> int:
    trace, count = error.__traceback__, 0
    while trace:
        trace, count = trace.tb_next, count + 1
    return count


def test_using_a_failed_reference_again_adds_nothing_to_its_error(plain: World) -> None:
    mine = gw.remote(ME, raise_picky)
    lengths = set()
    for _ in range(5):
        with pytest.raises(Picky) as caught:
            mine.local_value()
        lengths.add(trace_length(caught.value))
    assert len(lengths) == 1


class Bystander:
    """Something that an error's frames know of."""


def raise_near(thing: Bystander) -> None:
    try:
        _raise_deep(thing)
    except KeyError as error:
        raise Boom("chained") from error


def _raise_deep(thing: Bystander) -> None:
    vars(thing)["there"] = 1
    {}["missing"]


def test_a_kept_error_keeps_no_variables(plain: World) -> None:
    alive: list[int] = []

    class Watched(Bystander):
        def __init__(self) -> None:
            alive.append(1)

        def __del__(self) -> None:
            alive.pop()

    def run() -> None:
        raise_near(Watched())

    rref = gw.remote(ME, run)
    with pytest.raises(Boom, match="chained"):
        rref._get_future().wait()
    gc.collect()
    assert not alive
    with pytest.raises(Boom):
        rref.to_here()


def leave() -> None:
    raise SystemExit(3)


@both
@orders
def test_a_function_that_exits_has_failed(to: str, seed: int | None) -> None:
    with World(2, seed=seed) as world, world.as_worker(0), holding() as hold:

        def wait_and_leave() -> None:
            held()
            leave()

        rref = gw.remote(to, wait_and_leave)
        early = [rref.to_here_async(), rref.to_here_async()]
        call = rref.rpc_async().anything()
        hold.release.set()
        for future in (*early, call):
            with pytest.raises(gw.RemoteError, match="SystemExit") as caught:
                future.wait()
            assert caught.value.type_name == "SystemExit"
        with pytest.raises(gw.RemoteError, match="SystemExit"):
            rref.to_here()


def test_a_value_that_cannot_be_sent_stays_usable(world: World) -> None:
    rref = gw.remote(OTHER, threading.Lock)
    with pytest.raises(TypeError, match=r"cannot be sent.*lock"):
        rref.to_here()
    assert rref.rpc_sync().locked() is False
    rref.rpc_sync().acquire()
    assert rref.rpc_sync().locked() is True


# Timeouts of the creating call


def test_a_value_that_is_not_made_in_time_has_failed(plain: World) -> None:
    with holding() as hold:
        rref = gw.remote(OTHER, held, (Value("slow"),), timeout=0.03)
        assert hold.entered.wait(LIMIT)
        with pytest.raises(gw.CallTimeout, match="held"):
            rref._get_future().wait()
        for use in attempts(rref):
            with pytest.raises(gw.CallTimeout, match="held"):
                use()
        hold.release.set()
    del rref, use
    wait_until_no_references(plain)


def test_who_got_it_before_it_failed_is_told(world: World) -> None:
    with holding() as hold:
        rref = gw.remote(OTHER, held, timeout=0.03)
        other = gw.rpc_async("worker2", fetched, (rref,))
        with pytest.raises(gw.CallTimeout):
            rref._get_future().wait()
        hold.release.set()
        other.wait()  # it has a hold of its own: the value is made all the same
    del rref, other
    wait_until_no_references(world)


def test_a_failed_creation_that_nobody_looked_at_is_logged(
    plain: World, caplog: pytest.LogCaptureFixture
) -> None:
    rref = gw.remote(OTHER, never, timeout=0.01)
    wait_until(rref._core.creation.done)
    del rref
    gc.collect()
    wait_until(
        lambda: (
            "tests.rpc.functions.never on worker 'worker1' failed and nobody"
            in caplog.text
        )
    )


# Bad arguments


def test_what_cannot_be_called_or_passed_is_refused(plain: World) -> None:
    with pytest.raises(TypeError, match="3 cannot be called: give a function"):
        gw.remote(OTHER, 3)
    with pytest.raises(TypeError, match=r"args=3: give a tuple"):
        gw.remote(OTHER, add, 3)
    with pytest.raises(TypeError, match=r"kwargs=3: give a dict"):
        gw.remote(OTHER, add, None, 3)
    with pytest.raises(ValueError, match="there is no worker 'worker9'"):
        gw.remote("worker9", add)
    with pytest.raises(TypeError, match="give a name, an id or a WorkerInfo"):
        gw.remote(None, add)
    with pytest.raises(TypeError, match="lock"):
        gw.remote(OTHER, same, (threading.Lock(),))
    for to in (ME, OTHER):
        with pytest.raises(ValueError, match="timeout=-1"):
            gw.remote(to, add, (1, 2), timeout=-1)
    wait_until_no_references(plain)


def test_arguments_that_cannot_be_decoded_there_fail_the_reference(
    plain: World,
) -> None:
    rref = gw.remote(OTHER, same, (Undecodable(),))
    with pytest.raises(Boom, match="cannot be made"):
        rref.to_here()
    with pytest.raises(Boom, match="cannot be made"):
        rref._get_future().wait()
    assert not rref.confirmed_by_owner()
    del rref
    wait_until_no_references(plain)


class Undecodable:
    def __reduce__(self) -> Any:
        return boom, ("cannot be made",)


# Copies and pickles


def test_a_copy_of_a_reference_is_the_same_one(plain: World) -> None:
    rref = gw.RRef(Value("copied"))
    assert copy.copy(rref) is rref
    assert copy.deepcopy({"a": [rref]})["a"][0] is rref
    model = torch.nn.Linear(1, 1)
    model.rref = rref
    assert copy.deepcopy(model).rref is rref


def test_a_reference_cannot_be_pickled_outside_of_calls(plain: World) -> None:
    for rref in (gw.RRef(1), gw.remote(OTHER, add, (1, 2))):
        with pytest.raises(TypeError, match=r"<RRef .*> can be sent in calls only"):
            pickle.dumps([rref])
    with pytest.raises(TypeError, match="can be sent in calls only"):
        gw.rpc_sync(OTHER, pickle.dumps, (rref,))


# Workers with an allow-list


class Allowed:
    def __init__(self, number: int) -> None:
        self.number = number

    def plus(self, other: int) -> int:
        return self.number + other

    def secret(self) -> int:
        return self.number

    def __call__(self) -> int:
        return self.number

    def me(self) -> "Allowed":
        return self


ALLOWED = [Allowed, Allowed.plus, Allowed.me, add, boom]


@pytest.fixture
def listed() -> Iterator[World]:
    with World(2, allow=ALLOWED) as world, world.as_worker(0):
        yield world


def test_listed_functions_and_methods_make_values(listed: World) -> None:
    assert gw.remote(OTHER, add, (1, 2)).to_here() == 3
    rref = gw.remote(OTHER, Allowed, (3,))
    for call in Ways(rref):
        assert call("plus", 4) == 7
    tensor = gw.remote(OTHER, add, (torch.ones(2), 1))
    torch.testing.assert_close(tensor.to_here(), torch.full((2,), 2.0))
    with pytest.raises(gw.RemoteError, match="Boom: listed"):
        gw.remote(OTHER, boom, ("listed",)).to_here()


def test_what_is_not_listed_is_refused(listed: World) -> None:
    with pytest.raises(gw.NotAllowedError, match=r"tests\.rref\.values:same"):
        gw.remote(OTHER, same, (1,)).to_here()
    with pytest.raises(gw.NotAllowedError, match="cannot be imported by name"):
        gw.remote(OTHER, lambda: 1)
    rref = gw.remote(OTHER, Allowed, (3,))
    for call in Ways(rref):
        for name in ("secret", "()", "__setitem__"):
            with pytest.raises(gw.NotAllowedError, match="not on this worker's allow"):
                call(name)


def test_calling_the_object_itself_can_be_listed() -> None:
    with (
        World(2, allow=[Allowed, Allowed.__call__]) as world,
        world.as_worker(0),
    ):
        for call in Ways(gw.remote(OTHER, Allowed, (3,))):
            assert call("()") == 3


def test_only_plain_values_leave_a_worker_with_an_allow_list(listed: World) -> None:
    rref = gw.remote(OTHER, Allowed, (3,))
    with pytest.raises(TypeError, match=r"cannot be sent.*Allowed"):
        rref.to_here()
    again = rref.remote().me()
    assert again.rpc_sync().plus(1) == 4
    del rref, again
    wait_until_no_references(listed)


def test_references_do_not_go_to_workers_with_an_allow_list(listed: World) -> None:
    with pytest.raises(TypeError, match="RRef"):
        gw.rpc_sync(OTHER, add, (gw.RRef(1), 1))
    with pytest.raises(TypeError, match="RRef"):
        gw.remote(OTHER, add, (gw.RRef(1), 1))
    wait_until_no_references(listed)


# Without a worker, and after its end


def test_without_a_worker_there_are_no_references(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(api, "_process", None)
    monkeypatch.setattr(api, "_thread", api._Thread())
    with pytest.raises(gw.ClosedError, match="call init_rpc first"):
        gw.RRef(1)
    with pytest.raises(gw.ClosedError, match="call init_rpc first"):
        gw.remote(OTHER, add)


def test_after_shutdown_references_say_so() -> None:
    with World(2) as world, world.as_worker(0):
        rref, mine = gw.remote(OTHER, Value, ("gone",)), local("mine")
        assert rref.to_here() == "gone"
        world.shutdown()
        for use in attempts(rref):
            with pytest.raises(gw.ClosedError, match="worker 'worker0' is shut down"):
                use()
        assert mine.local_value().name == "mine"
        assert "owner 'worker1'" in repr(rref)
        assert ended_soon("gone")
    del mine, rref, use
    wait_until_freed("mine", "gone")


def ended_soon(name: str) -> bool:
    wait_until_freed(name)
    return True


def test_waiting_for_a_value_ends_with_the_worker() -> None:
    """Whoever waits: at the owner, elsewhere, for the value, or to call a method of it."""
    errors: list[BaseException] = []
    started = threading.Barrier(4)

    def wait(use: Callable[[], Any]) -> Callable[[], None]:
        def body() -> None:
            started.wait(LIMIT)
            try:
                use()
            except gw.GradwireError as error:
                errors.append(error)

        return body

    with World(2) as world, world.as_worker(0):
        rref = gw.remote(OTHER, never, timeout=0)
        mine = gw.remote(ME, never, timeout=0)
        at_owner = gw.rpc_async(OTHER, fetched, (rref,), timeout=0)
        call = rref.rpc_async(timeout=0).anything()
        wait_until(lambda: world[1].debug_info()["owned"])
        with meanwhile(
            wait(lambda: rref.to_here(timeout=0)),
            wait(lambda: mine.to_here(timeout=0)),
            wait(lambda: mine.local_value()),
        ):
            started.wait(LIMIT)
            world.shutdown(graceful=False)
        for future in (at_owner, call):
            with pytest.raises(gw.GradwireError):
                future.wait()
    assert len(errors) == 3
