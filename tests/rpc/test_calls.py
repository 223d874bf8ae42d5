"""Calls between the workers of a loopback world: whom, what, with which modes, how long."""

import asyncio
import functools
import operator
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire.testing import World
from tests.rpc.functions import add, held, holding, never, whoami
from tests.worlds import LIMIT, in_flight, orders

LARGE = 100_000  # elements: travels in the bulk area


# Whom


@pytest.mark.parametrize("to", ["worker1", 1, gw.WorkerInfo("worker1", 1)])
def test_a_worker_is_called_by_name_id_or_info(world: World, to: Any) -> None:
    assert world[0].rpc_sync(to, whoami) == "worker1"
    assert world[0].rpc_async(to, whoami).wait() == "worker1"


def test_a_worker_can_call_itself(world: World) -> None:
    assert world[0].rpc_sync("worker0", whoami) == "worker0"
    assert world[0].rpc_async(0, add, args=(1, 2)).wait() == 3


def test_everyone_can_call_everyone(world: World) -> None:
    def ask_all(me: gw.Worker) -> list[str]:
        return [me.rpc_sync(to, whoami) for to in me.get_worker_infos()]

    assert world.run(ask_all) == [["worker0", "worker1", "worker2"]] * 3


@pytest.mark.parametrize("to", ["worker9", 9, gw.WorkerInfo("worker9", 9)])
def test_calling_a_stranger_says_who_is_there(world: World, to: Any) -> None:
    for call in (world[0].rpc_sync, world[0].rpc_async):
        with pytest.raises(ValueError, match=r"\['worker0', 'worker1', 'worker2'\]"):
            call(to, whoami)
    with pytest.raises(ValueError, match="there is no worker 'worker9'"):
        world[0].get_worker_info("worker9")


@pytest.mark.parametrize("to", [None, 1.0, True, ["worker1"]])
def test_what_is_no_worker_at_all_is_refused(world: World, to: Any) -> None:
    with pytest.raises(TypeError, match="give a name, an id or a WorkerInfo"):
        world[0].rpc_sync(to, whoami)


def test_the_current_worker_of_a_called_function_is_the_callee(world: World) -> None:
    def hop() -> list[str]:
        return [whoami(), gw.rpc_sync("worker2", whoami), whoami()]

    assert world[0].rpc_sync("worker1", hop) == ["worker1", "worker2", "worker1"]


# What


class Box:
    def __init__(self, value: int) -> None:
        self.value = value

    def __call__(self, more: int) -> int:
        return self.value + more

    def plus(self, more: int) -> int:
        self.value += more
        return self.value

    @classmethod
    def named(cls, more: int) -> str:
        return f"{cls.__name__}{more}"

    @staticmethod
    def double(x: int) -> int:
        return 2 * x


def shout(word: str, *, times: int = 1, end: str = "!") -> str:
    return word * times + end


def adder(x: int) -> Callable[[int], int]:
    return lambda y: x + y


CALLABLES = {
    "function": (add, (1, 2), 3),
    "builtin": (max, (1, 2), 2),
    "operator": (operator.mul, (3, 4), 12),
    "torch builtin": (torch.add, (torch.ones(2), 1), torch.full((2,), 2.0)),
    "torch function": (
        torch.nn.functional.relu,
        (torch.tensor([-1.0, 1.0]),),
        torch.tensor([0.0, 1.0]),
    ),
    "method of a type": (torch.Tensor.sum, (torch.ones(3),), torch.tensor(3.0)),
    "class": (dict, ([("a", 1)],), {"a": 1}),
    "bound method": (Box(1).plus, (2,), 3),
    "method of a builtin": ("a-b".split, ("-",), ["a", "b"]),
    "classmethod": (Box.named, (7,), "Box7"),
    "staticmethod": (Box.double, (21,), 42),
    "object": (Box(1), (1,), 2),
    "lambda": (lambda x: x + 1, (1,), 2),
    "closure": (adder(10), (5,), 15),
    "partial": (functools.partial(add, 1), (2,), 3),
}


@pytest.mark.parametrize("name", CALLABLES)
@pytest.mark.parametrize("to", ["worker1", "worker0"])
def test_anything_callable_can_be_called(name: str, to: str) -> None:
    func, args, expected = CALLABLES[name]
    with World(2) as world:
        results = [
            world[0].rpc_sync(to, func, args),
            world[0].rpc_async(to, func, args).wait(),
        ]
    for result in results:
        if isinstance(expected, torch.Tensor):
            torch.testing.assert_close(result, expected)
        else:
            assert result == expected


def test_an_object_can_be_made_over_there_and_brought_back(world: World) -> None:
    layer = world[0].rpc_sync("worker1", torch.nn.Linear, args=(3, 2))
    assert layer(torch.ones(3)).shape == (2,)


def test_keyword_arguments_are_passed(world: World) -> None:
    sync, post = world[0].rpc_sync, world[0].rpc_async
    assert sync("worker1", shout, ("a",), {"times": 3}) == "aaa!"
    assert post("worker1", shout, kwargs={"word": "b", "end": "?"}).wait() == "b?"
    summed = sync("worker1", torch.sum, (torch.ones(2, 3),), {"dim": 0})
    torch.testing.assert_close(summed, torch.full((3,), 2.0))


def test_arguments_may_be_a_list(world: World) -> None:
    assert world[0].rpc_sync("worker1", max, [3, 5]) == 5


@pytest.mark.parametrize("func", ["max", None, 7])
def test_what_cannot_be_called_is_refused_here(world: World, func: Any) -> None:
    for call in (world[0].rpc_sync, world[0].rpc_async):
        with pytest.raises(TypeError, match="cannot be called: give a function"):
            call("worker1", func)


@pytest.mark.parametrize("args", [5, "ab", torch.ones(2), {1: 2}])
def test_arguments_without_their_tuple_are_refused_here(
    world: World, args: Any
) -> None:
    with pytest.raises(TypeError, match="give a tuple, such as") as caught:
        world[0].rpc_sync("worker1", max, args)
    assert repr(args) in str(caught.value)


@pytest.mark.parametrize("kwargs", [5, "ab", [1, 2]])
def test_keywords_that_are_no_dict_are_refused_here(world: World, kwargs: Any) -> None:
    with pytest.raises(TypeError, match="kwargs="):
        world[0].rpc_sync("worker1", shout, ("a",), kwargs)


def test_wrong_arguments_fail_as_they_would_locally(world: World) -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'y'"):
        world[0].rpc_sync("worker1", add, (1,))


# Copies


def clear(x: Any) -> None:
    if isinstance(x, torch.Tensor):
        x.zero_()
    else:
        x.clear()


@pytest.mark.parametrize("to", ["worker1", "worker0"])
@pytest.mark.parametrize("make", [lambda: [1, [2]], lambda: {"a": {1}}])
def test_arguments_are_copies(world: World, to: str, make: Callable[[], Any]) -> None:
    mine = make()
    world[0].rpc_sync(to, clear, (mine,))
    assert mine == make()


@pytest.mark.parametrize("to", ["worker1", "worker0"])
@pytest.mark.parametrize("size", [3, LARGE])
def test_tensors_sent_are_copies(world: World, to: str, size: int) -> None:
    mine = torch.ones(size)
    world[0].rpc_sync(to, clear, (mine,))
    future = world[0].rpc_async(to, add, (mine, 1))
    mine.fill_(7)  # as they were when called
    torch.testing.assert_close(future.wait(), torch.full((size,), 2.0))
    torch.testing.assert_close(mine, torch.full((size,), 7.0))


KEPT: dict[str, Any] = {}


def get_kept(name: str) -> Any:
    return KEPT[name]


@pytest.mark.parametrize("to", ["worker1", "worker0"])
def test_results_are_copies(world: World, to: str) -> None:
    KEPT.update(list=[1], small=torch.ones(2), large=torch.ones(LARGE))
    for name in KEPT:
        clear(world[0].rpc_sync(to, get_kept, (name,)))
    assert KEPT["list"] == [1]
    assert KEPT["small"].all()
    assert KEPT["large"].all()


def test_a_bound_method_runs_on_a_copy_of_its_object(world: World) -> None:
    box = Box(1)
    assert world[0].rpc_sync("worker1", box.plus, (5,)) == 6
    assert box.value == 1


def test_what_is_one_object_here_is_one_object_there(world: World) -> None:
    def same(x: torch.Tensor, y: list[torch.Tensor]) -> bool:
        x.add_(1)
        return bool((x == y[0]).all())

    x = torch.zeros(3)
    assert world[0].rpc_sync("worker1", same, (x, [x]))


# Modes

Modes = tuple[bool, bool, bool, torch.dtype]


def modes() -> Modes:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
    )


async def modes_of_all_steps() -> Modes:
    seen = [modes()]
    for _ in range(3):
        await asyncio.sleep(0)
        seen.append(modes())
    try:
        await asyncio.wait_for(asyncio.Event().wait(), 0.001)
    except asyncio.TimeoutError:
        seen.append(modes())
    assert len(set(seen)) == 1
    return seen[0]


class GradInInference:
    """Grad mode can be on inside inference mode."""

    def __enter__(self) -> None:
        self._stack = (torch.inference_mode(), torch.enable_grad())
        for context in self._stack:
            context.__enter__()

    def __exit__(self, *_: object) -> None:
        for context in reversed(self._stack):
            context.__exit__(None, None, None)


MODES: dict[str, Callable[[], Any]] = {
    "usual": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "inference with grad": GradInInference,
    "bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
    "float16": lambda: torch.autocast("cpu", torch.float16),
}


@pytest.mark.parametrize("func", [modes, modes_of_all_steps])
@pytest.mark.parametrize("to", ["worker1", "worker0"])
@pytest.mark.parametrize("name", MODES)
def test_a_function_runs_with_its_callers_modes(
    name: str, to: str, func: Callable[[], Modes]
) -> None:
    with World(2) as world:
        usual = modes()
        with MODES[name]():
            here = modes()
            there = [
                world[0].rpc_sync(to, func),
                world[0].rpc_async(to, func).wait(),
            ]
        assert there == [here, here]
        assert world[0].rpc_sync(to, func) == usual


def test_modes_of_coroutines_that_take_turns_do_not_mix() -> None:
    with World(2) as world:
        futures = []
        for name in [*MODES] * 5:
            with MODES[name]():
                future = world[0].rpc_async("worker1", modes_of_all_steps)
                futures.append((modes(), future))
        assert all(future.wait() == here for here, future in futures)


def test_modes_are_passed_on_by_nested_calls(world: World) -> None:
    def ask() -> Modes:
        return gw.rpc_sync("worker2", modes)

    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert world[0].rpc_sync("worker1", ask) == modes()


# How long


def test_a_call_that_takes_too_long_says_which_where_and_how_long(world: World) -> None:
    for call in (
        lambda: world[0].rpc_sync("worker1", never, timeout=0.05),
        lambda: world[0].rpc_async("worker1", never, timeout=0.05).wait(),
        lambda: world[0].rpc_sync("worker0", never, timeout=0.05),
    ):
        with pytest.raises(gw.CallTimeout) as caught:
            call()
        error = caught.value
        assert isinstance(error, TimeoutError)
        assert error.call == "tests.rpc.functions.never"
        assert error.seconds == 0.05
        assert f"{error.call} on worker '{error.worker}' timed out after 0.05 s" in str(
            error
        )
    assert error.worker == "worker0"
    assert in_flight(world[0]) == "0 calls in flight"


def test_a_timeout_needs_nobody_who_waits() -> None:
    with World(2) as world:
        expired = threading.Event()
        future = world[0].rpc_async("worker1", never, timeout=0.01)
        future.add_done_callback(lambda _: expired.set())
        assert expired.wait(LIMIT)
        with pytest.raises(gw.CallTimeout):
            future.value()


def test_calls_expire_each_at_its_own_time(world: World) -> None:
    post = world[0].rpc_async
    later, never_ends = (post("worker1", never, timeout=t) for t in (LIMIT, 0))
    soon, sooner = (post("worker1", never, timeout=t) for t in (0.02, 0.01))
    for future in (soon, sooner):
        with pytest.raises(gw.CallTimeout):
            future.wait()
    assert not later.done()
    assert not never_ends.done()
    world.shutdown(graceful=False)


def test_the_timeout_of_a_world_is_for_all_calls_that_do_not_say_otherwise() -> None:
    with World(2, timeout=0.05) as world, holding() as hold:
        patient = world[0].rpc_async("worker1", held, ("at last",), timeout=0)
        with pytest.raises(gw.CallTimeout, match=r"timed out after 0\.05 s"):
            world[0].rpc_sync("worker1", never)
        assert not patient.done()
        hold.release.set()
        assert patient.wait() == "at last"


def test_a_negative_timeout_is_refused(world: World) -> None:
    for call in (world[0].rpc_sync, world[0].rpc_async):
        with pytest.raises(ValueError, match="timeout=-1: give seconds, or 0 for none"):
            call("worker1", max, (1, 2), timeout=-1)
    assert in_flight(world[0]) == "0 calls in flight"


def test_an_answer_that_comes_too_late_is_dropped(world: World) -> None:
    with holding() as hold:
        late = world[0].rpc_async("worker1", held, timeout=0.01)
        with pytest.raises(gw.CallTimeout):
            late.wait()
        hold.release.set()
    assert world[0].rpc_sync("worker1", max, (1, 2)) == 2
    with pytest.raises(gw.CallTimeout):
        late.wait()


# How many


def descend(depth: int) -> int:
    if not depth:
        return 0
    return 1 + gw.rpc_sync((gw.get_worker_info().id + 1) % 3, descend, (depth - 1,))


@orders
def test_calls_nest_deeper_than_there_are_threads(seed: int | None) -> None:
    with World(3, seed=seed, threads=2) as world:
        assert world[0].rpc_sync("worker1", descend, (100,)) == 100


def call_back(to: str, x: int) -> int:
    return gw.rpc_sync(to, operator.mul, (x, x))


@orders
def test_hundreds_of_calls_can_each_call_back(seed: int | None) -> None:
    with World(2, seed=seed, threads=4) as world:
        futures = [
            world[0].rpc_async("worker1", call_back, ("worker0", x)) for x in range(200)
        ]
        assert [f.wait() for f in futures] == [x * x for x in range(200)]


def test_many_threads_can_call_at_once(world: World) -> None:
    def ask(me: gw.Worker) -> list[int]:
        to = (me.id + 1) % 3
        return [me.rpc_sync(to, add, (me.id, x)) for x in range(50)]

    assert world.run(ask) == [list(range(i, i + 50)) for i in range(3)]


# Worlds


def test_the_functions_speak_for_the_worker_that_is_entered(world: World) -> None:
    with world.as_worker(0):
        assert gw.rpc_sync("worker1", max, (1, 2)) == 2
        assert gw.rpc_async("worker1", max, (1, 2)).wait() == 2
        assert gw.get_worker_info() == gw.WorkerInfo("worker0", 0)
        assert gw.get_worker_info("worker2").id == 2
        with world.as_worker(1):
            assert gw.rpc_sync("worker1", whoami) == whoami() == "worker1"
        assert whoami() == "worker0"
        assert [i.name for i in gw.get_worker_infos()] == [w.name for w in world]


def test_without_a_worker_the_functions_say_what_to_do() -> None:
    with pytest.raises(gw.ClosedError, match="call init_rpc first"):
        gw.rpc_sync("worker1", max, (1, 2))


def test_two_worlds_in_one_process_do_not_disturb_each_other() -> None:
    with World(2) as one, World(3) as other, holding() as hold:
        future = one[0].rpc_async("worker1", held, ("one",))
        assert hold.entered.wait(LIMIT)
        other.kill(1)
        with pytest.raises(gw.WorkerLostError):
            other[0].rpc_sync("worker1", whoami)
        with one.as_worker(0), other.as_worker(2):
            assert gw.rpc_sync("worker0", whoami) == "worker0"
            assert len(gw.get_worker_infos()) == 2
        hold.release.set()
        assert future.wait() == "one"
        assert one[0].rpc_sync("worker1", whoami) == "worker1"


def test_a_world_raises_what_one_of_its_workers_raised(world: World) -> None:
    with pytest.raises(KeyError, match="worker1"):
        world.run(lambda worker: {"worker0": 0, "worker2": 2}[worker.name])
