"""Errors of references: of the function, of the call that makes the value, of bad arguments."""

import gc
import threading
from typing import Any

import pytest

import gradwire as gw
from gradwire.testing import World
from tests.rpc.functions import Boom, add, boom, held, holding, never
from tests.rref.uses import attempts, uses
from tests.rref.values import Value, fetched, same
from tests.worlds import LIMIT, orders, wait_until, wait_until_no_references

ME, OTHER = "worker0", "worker1"
both = pytest.mark.parametrize("to", [ME, OTHER])


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
            "tests.rpc.functions.never on worker 'worker1': exception was never"
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
