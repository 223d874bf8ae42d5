"""What a reference can call: methods of the value, in three ways, also before it is there."""

import asyncio
import threading
from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire._rpc.function_runner import async_execution
from gradwire.testing import World
from tests.rpc.functions import Boom, held, holding
from tests.rref.uses import Ways
from tests.rref.values import same
from tests.worlds import orders, wait_until

ME, OTHER = "worker0", "worker1"
both = pytest.mark.parametrize("to", [ME, OTHER])


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
