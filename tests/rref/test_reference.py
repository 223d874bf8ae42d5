"""What a reference can do, on a loopback world: its methods, its errors, its states."""

import asyncio
import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire import api
from gradwire.testing import World
from tests.rpc.functions import Boom, add, boom, held, holding, never, whoami
from tests.rref.uses import Ways, attempts
from tests.rref.values import Value, fetched, local, same, wait_until_freed
from tests.worlds import LIMIT, meanwhile, wait_until, wait_until_no_references

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
        with pytest.raises(TypeError, match=r"<RRef .*> can only be sent in calls"):
            pickle.dumps([rref])
    with pytest.raises(TypeError, match="can only be sent in calls"):
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
