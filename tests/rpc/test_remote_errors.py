"""What a function raises over there, as it is raised here."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

import gradwire as gw
from gradwire.testing import World
from tests.rpc.functions import Boom, boom, never, whoami
from tests.worlds import LIMIT, in_flight


def failure(world: World, func: Callable[..., Any], *args: Any) -> Exception:
    """What a call of `func` raises, the same by all ways to call it."""
    sync, post = world[0].rpc_sync, world[0].rpc_async
    errors = []
    for call in (
        lambda: sync("worker1", func, args),
        lambda: sync("worker0", func, args),
        lambda: asyncio.run(asyncio.wait_for(post("worker1", func, args), None)),
        lambda: post("worker1", func, args).wait(),
    ):
        with pytest.raises(Exception) as caught:  # noqa: PT011 looked at by the test
            call()
        errors.append(caught.value)
    assert len({type(error).__name__ for error in errors}) == 1
    flights = {in_flight(worker) for worker in world if not worker.is_closed}
    assert flights == {"0 calls in flight"}
    return errors[-1]


def remote_part(error: BaseException) -> gw.RemoteError:
    """Where it was raised: the cause, or the error itself if its type stayed there."""
    remote = error if isinstance(error, gw.RemoteError) else error.__cause__
    assert isinstance(remote, gw.RemoteError)
    assert remote.worker == "worker1"
    return remote


def test_an_error_keeps_its_type_and_tells_where_it_was_raised(world: World) -> None:
    error = failure(world, boom, "far away")
    assert type(error) is Boom
    assert error.args == ("far away",)
    remote = remote_part(error)
    assert remote.type_name == "Boom"
    assert remote.message == "far away"
    assert "in boom" in remote.trace
    assert str(remote).startswith("on worker 'worker1': Boom: far away\n\nTraceback")


class Detailed(ValueError):
    """Data of its own, and the constructor that pickle expects."""

    def __init__(self, code: int, detail: dict[str, int]) -> None:
        super().__init__(code, detail)
        self.code = code
        self.detail = detail

    def __str__(self) -> str:
        return f"code {self.code}"


def raise_detailed() -> None:
    raise Detailed(7, {"a": 1})


def test_an_error_keeps_its_data(world: World) -> None:
    error = failure(world, raise_detailed)
    assert isinstance(error, Detailed)
    assert (error.code, error.detail) == (7, {"a": 1})
    assert remote_part(error).message == "code 7"


def raise_with_note() -> None:
    error = Boom("noted")
    error.hint = "look here"
    raise error


def test_an_error_keeps_its_attributes(world: World) -> None:
    assert failure(world, raise_with_note).hint == "look here"


def raise_local() -> None:
    class Local(Exception):
        pass

    raise Local("made over there")


def test_an_error_of_a_local_class_keeps_its_name(world: World) -> None:
    error = failure(world, raise_local)
    assert type(error).__name__ == "Local"
    assert str(error) == "made over there"


def raise_chained() -> None:
    try:
        {}["missing"]
    except KeyError as error:
        raise Boom("because") from error


def raise_while_handling() -> None:
    try:
        {}["missing"]
    except KeyError:
        raise Boom("on top")  # noqa: B904 the point


@pytest.mark.parametrize(
    ("func", "link"),
    [
        (raise_chained, "the direct cause"),
        (raise_while_handling, "During handling of the above exception"),
    ],
)
def test_the_causes_of_an_error_are_in_its_trace(
    world: World, func: Callable[[], None], link: str
) -> None:
    trace = remote_part(failure(world, func)).trace
    assert trace.index("KeyError: 'missing'") < trace.index(link) < trace.index("Boom:")


def ask_two() -> None:
    gw.rpc_sync("worker2", boom, ("at the end",))


def test_an_error_through_two_workers_tells_of_both(world: World) -> None:
    error = failure(world, ask_two)
    assert type(error) is Boom
    trace = remote_part(error).trace
    assert "on worker 'worker2': Boom: at the end" in trace
    assert "in ask_two" in trace


# Errors that do not travel well


class OddConstructor(Exception):
    def __init__(self, name: str, *, size: int) -> None:
        super().__init__(f"{name} of size {size}")


class Unpicklable(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


def explode() -> None:
    raise LookupError("not in this world")


class Unloadable(Exception):
    def __reduce__(self) -> tuple[Any, ...]:
        return explode, ()


class LoadsAsSomethingElse(Exception):
    def __reduce__(self) -> tuple[Any, ...]:
        return list, ()


def raise_odd() -> None:
    raise OddConstructor("box", size=3)


def raise_unpicklable() -> None:
    raise Unpicklable("holds a lock")


def raise_unloadable() -> None:
    raise Unloadable("stays there")


def raise_something_else() -> None:
    raise LoadsAsSomethingElse("no exception any more")


@pytest.mark.parametrize(
    ("func", "name", "message"),
    [
        (raise_odd, "OddConstructor", "box of size 3"),
        (raise_unpicklable, "Unpicklable", "holds a lock"),
        (raise_unloadable, "Unloadable", "stays there"),
        (raise_something_else, "LoadsAsSomethingElse", "no exception any more"),
    ],
)
def test_an_error_that_cannot_be_brought_here_comes_as_text(
    world: World, func: Callable[[], None], name: str, message: str
) -> None:
    error = failure(world, func)
    assert type(error) is gw.RemoteError
    assert (error.type_name, error.message) == (name, message)
    assert f"in {func.__name__}" in remote_part(error).trace


def leave(kind: type[BaseException]) -> None:
    raise kind("leaving")


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_what_would_end_a_program_ends_only_the_call(
    world: World, kind: type[BaseException]
) -> None:
    error = failure(world, leave, kind)
    assert type(error) is gw.RemoteError
    assert error.type_name == kind.__name__
    assert error.message == "leaving"
    assert world[0].rpc_sync("worker1", whoami) == "worker1"


def test_stop_iteration_is_an_error_like_others(world: World) -> None:
    with pytest.raises(StopIteration, match="leaving"):
        world[0].rpc_sync("worker1", leave, (StopIteration,))


class BadText(Exception):
    def __str__(self) -> str:
        raise Boom("no text for you")


def raise_bad_text() -> None:
    raise BadText


def test_an_error_without_a_text_arrives_all_the_same(world: World) -> None:
    with pytest.raises((BadText, gw.RemoteError)) as caught:
        world[0].rpc_sync("worker1", raise_bad_text, timeout=LIMIT)
    assert remote_part(caught.value).type_name == "BadText"


def raise_huge() -> None:
    raise Boom("x" * 100_000)


def test_an_error_too_large_to_send_arrives_shortened() -> None:
    with (
        World(2, max_body=50_000) as world,
        pytest.raises(gw.RemoteError, match="Boom: xxx") as caught,
    ):
        world[0].rpc_sync("worker1", raise_huge, timeout=LIMIT)
    assert len(str(caught.value)) < 50_000


# Errors of Gradwire itself, raised over there


def ask_in_vain() -> None:
    gw.rpc_sync("worker2", never, timeout=0.01)


def ask_a_stranger() -> None:
    gw.rpc_sync("nobody", whoami)


def test_a_timeout_over_there_is_a_timeout_here(world: World) -> None:
    error = failure(world, ask_in_vain)
    assert isinstance(error, gw.CallTimeout)
    assert (error.call, error.worker) == ("tests.rpc.functions.never", "worker2")
    remote_part(error)


def test_a_stranger_over_there_is_named_here(world: World) -> None:
    error = failure(world, ask_a_stranger)
    assert isinstance(error, ValueError)
    assert "there is no worker 'nobody'" in str(error)


def test_a_loss_over_there_is_a_loss_here(world: World) -> None:
    world.kill(2)
    error = failure(world, ask_two)
    assert isinstance(error, gw.WorkerLostError)
    assert error.worker == "worker2"
    remote_part(error)


# Values that do not travel well


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return explode, ()


def make_lock() -> Any:
    return threading.Lock()


def make_bomb() -> Any:
    return Bomb()


def ignore(value: Any) -> None:
    pass


def test_a_result_that_cannot_be_sent_is_named(world: World) -> None:
    error = failure(world, make_lock)
    assert isinstance(error, TypeError)
    assert "make_lock" in str(error)
    assert "_thread.lock, cannot be sent" in str(error)
    remote_part(error)


def test_a_result_that_cannot_be_decoded_is_named(world: World) -> None:
    error = failure(world, make_bomb)
    assert isinstance(error, TypeError)
    assert str(error) == (
        f"the result of {__name__}.make_bomb on worker 'worker1' cannot be "
        "decoded here: LookupError: not in this world"
    )
    assert isinstance(error.__cause__, LookupError)


def test_an_argument_that_cannot_be_decoded_fails_the_call(world: World) -> None:
    error = failure(world, ignore, Bomb())
    assert isinstance(error, LookupError)
    assert "in explode" in remote_part(error).trace


def removed() -> None:
    """Found by name here, but not there any more."""


def test_a_function_that_is_not_found_there_is_named(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    func = removed
    world[0].rpc_sync("worker1", func)
    monkeypatch.delattr(f"{__name__}.removed")
    with pytest.raises(LookupError, match="no 'removed' in module") as caught:
        world[0].rpc_sync("worker1", func)
    remote_part(caught.value)
