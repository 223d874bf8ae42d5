"""Calls that scripts make: arguments, results, errors, threads."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.jit.frontend import NotSupportedError

import gradwire as gw
from gradwire.testing import World
from tests.rpc.functions import held, holding
from tests.script import functions as here
from tests.script.functions import add, mixed, no_arguments, script, whoami

ONES = torch.ones(2)


@torch.jit.ignore
def wait_there() -> int:
    return 0 if held() is None else 1


@script
def blocks() -> int:
    return wait_there()


def sync(to: str, x: Tensor) -> Tensor:
    return gw.rpc_sync(to, add, (x, x))


def waited(to: str, x: Tensor) -> Tensor:
    return gw.rpc_async(to, add, args=(x, x)).wait()


def later(to: str, x: Tensor) -> Tensor:
    future = gw.rpc_async(to, add, args=(x,), kwargs={"y": x})
    return future.wait()


def referred(to: str, x: Tensor) -> Tensor:
    return gw.remote(to, add, (x, x), timeout=10).to_here()


@pytest.mark.parametrize("function", [sync, waited, later, referred])
@pytest.mark.parametrize("to", ["worker0", "worker1"])
def test_each_way_gives_what_the_function_returns(
    world: World, function: Any, to: str
) -> None:
    assert script(function)(to, ONES).tolist() == [2, 2]


def test_defaults_and_keywords_are_filled_in(world: World) -> None:
    def some(x: Tensor) -> list[tuple[Tensor, str, int]]:
        a = gw.rpc_sync("worker1", mixed, (x, "a"))
        b = gw.rpc_sync("worker1", mixed, (x, "b", 3), {"more": "?"})
        c = gw.rpc_sync("worker1", mixed, args=(x,), kwargs={"word": "c"})
        return [a, b, c]

    a, b, c = script(some)(ONES)
    assert (a[0].tolist(), *a[1:]) == ([2, 2], "a!", 2)
    assert (b[0].tolist(), *b[1:]) == ([3, 3], "b?", 3)
    assert (c[0].tolist(), *c[1:]) == ([2, 2], "c!", 2)


def test_a_tuple_and_a_dict_that_are_variables(world: World) -> None:
    def call(
        args: tuple[Tensor, str], kwargs: dict[str, int]
    ) -> tuple[Tensor, str, int]:
        return gw.rpc_async("worker1", mixed, args, kwargs).wait()

    scripted = script(call)
    assert scripted((ONES, "a"), {"number": 4})[2] == 4
    assert scripted((ONES, "a"), {})[2] == 2
    with pytest.raises(RuntimeError, match="Unknown keyword argument 'nmber'"):
        scripted((ONES, "a"), {"nmber": 4})


def test_no_arguments_at_all(world: World) -> None:
    def call() -> int:
        return gw.rpc_sync("worker1", no_arguments) + gw.rpc_sync(
            "worker1", no_arguments, ()
        )

    assert script(call)() == 6


def test_a_worker_can_be_its_id(world: World) -> None:
    def call(to: int) -> str:
        return gw.rpc_sync(to, whoami)

    assert script(call)(1) == "worker1"


def none(x: Tensor) -> None:
    gw.rpc_sync("worker1", here.nothing, (x,))


def optional(x: Tensor) -> tuple[list[Tensor] | None, list[Tensor] | None]:
    some = gw.rpc_sync("worker1", here.returns_none_or_list, (True,))
    return some, gw.rpc_sync("worker1", here.returns_none_or_list, (False,))


def dictionary(x: Tensor) -> dict[str, list[int]]:
    return gw.rpc_async("worker1", here.returns_dict, ("a",)).wait()


def pair(x: Tensor) -> tuple[Tensor, int]:
    found = gw.rpc_async("worker1", here.returns_pair, (x,)).wait()
    return found.first, found.second


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (none, None),
        (optional, ([torch.ones(1)], None)),
        (dictionary, {"a": [1, 2]}),
        (pair, (ONES, 1)),
    ],
)
def test_results_of_all_types(world: World, function: Any, expected: Any) -> None:
    assert repr(script(function)(ONES)) == repr(expected)


def test_every_call_is_made_also_if_nobody_wants_its_result(world: World) -> None:
    def call(x: Tensor) -> Tensor:
        gw.rpc_async("worker1", add, (x, x))
        gw.rpc_async("worker1", add, (x, x))
        gw.rpc_sync("worker1", add, (x, x))
        return gw.rpc_sync("worker1", add, (x, x))

    scripted = script(call)
    for _ in range(3):  # the optimizer has a say from the second run on
        before = world[0].statistics()["calls_made"]
        scripted(ONES)
        assert world[0].statistics()["calls_made"] - before == 4


# Where calls can stand


def helper(x: Tensor) -> Tensor:
    return gw.rpc_sync("worker1", add, (x, x))


class Caller(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return helper(x) + self.other(x)

    @torch.jit.export
    def other(self, x: Tensor) -> Tensor:
        return gw.rpc_async("worker1", add, (x, x)).wait()


class Holder:
    def __init__(self, x: Tensor) -> None:
        self.x = x

    def twice(self) -> Tensor:
        return gw.rpc_sync("worker1", add, (self.x, self.x))


def test_modules_exported_methods_and_helpers(world: World) -> None:
    module = script(Caller())
    assert module(ONES).tolist() == [4, 4]
    assert module.other(ONES).tolist() == [2, 2]


def test_script_classes(world: World) -> None:
    kind = script(Holder)

    def call(x: Tensor) -> Tensor:
        return kind(x).twice()

    assert script(call)(ONES).tolist() == [2, 2]


def test_forks_and_what_comes_after_a_wait_call_for_the_same_worker(
    world: World,
) -> None:
    def one(to: str) -> str:
        return gw.rpc_sync(to, whoami)

    scripted = script(one)

    def call() -> tuple[list[str], str]:
        forks = [torch.jit.fork(scripted, "worker0") for _ in range(8)]
        names = [torch.jit.wait(fork) for fork in forks]
        return names, gw.rpc_async("worker1", whoami).wait()

    assert script(call)() == (["worker0"] * 8, "worker1")


def test_python_that_forks_and_waits_run_is_the_same_worker(world: World) -> None:
    def call(x: Tensor) -> list[str]:
        forks = [torch.jit.fork(here.named, x) for _ in range(4)]
        gw.rpc_async("worker1", add, (x, x)).wait()
        names = [torch.jit.wait(fork) for fork in forks]
        names.append(here.name_of_worker())
        return names

    scripted = script(call)
    for number in (0, 1):
        with world.as_worker(number):
            assert scripted(ONES) == [f"worker{number}"] * 5


def test_fork_and_wait_may_have_other_names(world: World) -> None:
    begin, end = torch.jit.fork, torch.jit.wait

    def one(to: str) -> str:
        return gw.rpc_sync(to, whoami)

    scripted = script(one)

    def call(to: str) -> str:
        return end(begin(scripted, to))

    assert script(call)("worker0") == "worker0"


def added_later(to: str, x: Tensor) -> torch.futures.Future[Tensor]:
    return gw.rpc_async(to, add, (x, x))


def test_one_that_returns_a_future_is_called_for_what_the_future_has(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    marked = gw.rpc.functions.async_execution(script(added_later))
    monkeypatch.setitem(globals(), "added_later", marked)

    def call(x: Tensor) -> Tensor:
        future = gw.rpc_async("worker1", added_later, ("worker0", x))
        rref = gw.remote("worker1", added_later, ("worker0", x))
        now = gw.rpc_sync("worker1", added_later, ("worker0", x))
        return future.wait() + rref.to_here() + now

    assert script(call)(ONES).tolist() == [6, 6]
    assert gw.rpc_sync("worker1", added_later, ("worker0", ONES)).tolist() == [2, 2]


def test_a_mark_that_scripting_would_lose_is_refused(world: World) -> None:
    with pytest.raises(RuntimeError, match="put @async_execution above"):

        @script
        @gw.rpc.functions.async_execution
        def call(to: str, x: Tensor) -> torch.futures.Future[Tensor]:
            return gw.rpc_async(to, add, (x, x))


def test_many_calls_under_way_hold_no_thread_of_torchs(world: World) -> None:
    def call(x: Tensor) -> Tensor:
        futures = [gw.rpc_async("worker1", add, (x, x)) for _ in range(50)]
        total = torch.zeros(2)
        for future in futures:
            total = total + future.wait()
        return total

    assert script(call)(ONES).tolist() == [100, 100]


def test_a_future_of_a_script_is_waited_for_in_python(world: World) -> None:
    def call(x: Tensor) -> torch.futures.Future[Tensor]:
        return gw.rpc_async("worker1", add, (x, x))

    assert script(call)(ONES).wait().tolist() == [2, 2]


def test_a_future_of_python_is_waited_for_in_a_script(world: World) -> None:
    def call(future: torch.futures.Future[Tensor]) -> Tensor:
        return future.wait() + 1

    scripted = script(call)
    future = gw.rpc_async("worker1", torch.add, (ONES, 1))
    assert scripted(future).tolist() == [3, 3]
    with pytest.raises(RuntimeError, match="no good today"):
        scripted(gw.rpc_async("worker1", here.fails, (ONES,)))


def test_names_that_a_function_assigns_are_left_alone(world: World) -> None:
    def call(x: Tensor) -> Tensor:
        waited = gw.rpc_sync("worker1", add, (x, x))
        rpc_sync = waited + 1
        return rpc_sync  # noqa: RET504

    assert script(call)(ONES).tolist() == [3, 3]


# What goes wrong


def test_too_few_arguments_are_refused_when_scripting(world: World) -> None:
    def call(x: Tensor) -> Tensor:
        return gw.rpc_sync("worker1", add, (x,))

    with pytest.raises(RuntimeError, match="Argument y not provided"):
        script(call)


def test_too_many_and_wrong_arguments_are_refused_when_scripting(world: World) -> None:
    def many(x: Tensor) -> Tensor:
        return gw.rpc_sync("worker1", add, (x, x, x))

    def wrong(x: Tensor) -> Tensor:
        return gw.rpc_sync("worker1", add, (x, "x"))

    with pytest.raises(RuntimeError, match="at most 2 arguments but found 3"):
        script(many)
    with pytest.raises(RuntimeError, match="Expected a value of type 'Tensor'"):
        script(wrong)


@pytest.mark.parametrize("args", [(torch.ones(1),), (torch.ones(1), "x"), (1, 2, 3)])
def test_wrong_arguments_from_python_are_refused_at_the_caller(
    world: World, args: tuple[object, ...]
) -> None:
    for call in (world[0].rpc_sync, world[0].rpc_async, world[0].remote):
        with pytest.raises(RuntimeError, match=r"add\(Tensor x, Tensor y\) -> Tensor"):
            call("worker1", add, args)
    assert world[0].statistics()["calls_made"] == 0
    x = torch.ones(1)
    assert world[0].rpc_sync("worker1", add, (x, x)) == 2


def test_errors_point_at_the_call(world: World) -> None:
    def call(x: Tensor) -> Tensor:
        return gw.rpc_sync("worker1", add, (x, "x"))

    with pytest.raises(RuntimeError) as raised:
        script(call)
    text = str(raised.value)
    assert "script/test_calls.py" in text
    assert 'return gw.rpc_sync("worker1", add, (x, "x"))' in text


def test_an_error_there_comes_with_its_message(world: World) -> None:
    def raises(x: Tensor) -> Tensor:
        return gw.rpc_sync("worker1", here.fails, (x,))

    def raises_later(x: Tensor) -> Tensor:
        future = gw.rpc_async("worker1", here.fails, (x,))
        return future.wait()

    for function in (raises, raises_later):
        with pytest.raises(RuntimeError, match="no good today"):
            script(function)(ONES)


def test_a_python_function_is_refused_by_name(world: World) -> None:
    def call(x: Tensor) -> Tensor:
        return gw.rpc_sync("worker1", here.in_python, (x,))

    scripted = script(call)
    with pytest.raises(RuntimeError, match=r"undefined function in_python.*@torch"):
        scripted(ONES)


def not_for_scripts(x: Tensor) -> Tensor:
    import numpy as np

    return torch.from_numpy(np.zeros(2))


def calls_what_cannot_be_scripted(x: Tensor) -> Tensor:
    return gw.rpc_sync("worker1", not_for_scripts, (x,))


def calls_itself(x: Tensor) -> Tensor:
    return gw.rpc_sync("worker1", calls_itself, (x,))


@pytest.mark.parametrize("call", [calls_what_cannot_be_scripted, calls_itself])
def test_one_that_torchscript_cannot_take_is_refused_when_scripting(
    world: World, call: Any
) -> None:
    with pytest.raises(NotSupportedError, match="it is a Python function"):
        script(call)


def for_scripts_or_not(x: Tensor) -> Tensor:
    if torch.jit.is_scripting():
        return gw.rpc_sync("worker1", add, (x, x))
    else:  # noqa: RET505
        return gw.rpc_sync("worker1", not_for_scripts, (x,))


def for_scripts_first(x: Tensor) -> Tensor:
    if torch.jit.is_scripting():
        return gw.rpc_sync("worker1", add, (x, x))
    return gw.rpc_sync("worker1", torch.add, (x, x), retries=1)


def not_for_scripts_first(x: Tensor) -> Tensor:
    if not torch.jit.is_scripting():
        return gw.rpc_async("worker1", here.in_python, (x,)).wait()
    return gw.remote("worker1", add, (x, x)).to_here()


class OnlyWithAnother(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.other = None

    def forward(self, x: Tensor) -> Tensor:
        if self.other is not None:
            return gw.rpc_sync(self.other, lambda x: x, (x,))
        return x + x


BRANCHES = [
    for_scripts_or_not,
    for_scripts_first,
    not_for_scripts_first,
    OnlyWithAnother(),
]


@pytest.mark.parametrize("value", BRANCHES)
def test_branches_that_torchscript_leaves_out_may_hold_any_call(
    world: World, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted: list[Any] = []
    parse = torch.jit.frontend.parse_def
    monkeypatch.setattr(
        "torch.jit.frontend.parse_def", lambda f: (scripted.append(f), parse(f))[1]
    )
    assert script(value)(ONES).tolist() == [2, 2]
    assert not {here.in_python, not_for_scripts} & {*scripted}


def calls_a_name(x: Tensor, function: str) -> Tensor:
    return gw.rpc_sync("worker1", function, (x,))


def calls_an_operator(x: Tensor, function: str) -> Tensor:
    return gw.rpc_sync("worker1", torch.add, (x, x))


def calls_a_class(x: Tensor, function: str) -> Tensor:
    return gw.rpc_sync("worker1", Holder, (x,)).x


@pytest.mark.parametrize("call", [calls_a_name, calls_an_operator, calls_a_class])
def test_what_is_no_scripted_function_is_refused(world: World, call: Any) -> None:
    with pytest.raises(NotSupportedError, match=r"cannot call '.*' from a script"):
        script(call)


def unknown_parameter(x: Tensor) -> Tensor:
    return gw.rpc_sync("worker1", add, (x, x), tmeout=1.0)


def parameter_given_twice(x: Tensor) -> Tensor:
    return gw.rpc_sync("worker1", add, (x, x), args=(x, x))


def too_many_parameters(x: Tensor) -> Tensor:
    return gw.rpc_sync("worker1", add, (x, x), None, 1.0, 2)


def too_few_parameters(x: Tensor) -> Tensor:
    return gw.rpc_sync("worker1")


CALLS = [
    unknown_parameter,
    parameter_given_twice,
    too_many_parameters,
    too_few_parameters,
]


@pytest.mark.parametrize("call", CALLS)
def test_parameters_that_a_call_does_not_take(world: World, call: Any) -> None:
    with pytest.raises(NotSupportedError, match="takes to, func, args, kwargs, time"):
        script(call)


def test_no_timeout_is_the_default(world: World) -> None:
    def call(x: Tensor) -> Tensor:
        return gw.rpc_sync("worker1", add, (x, x), None, timeout=None)

    assert script(call)(ONES).tolist() == [2, 2]


def test_unknown_workers_are_named(world: World) -> None:
    with pytest.raises(RuntimeError, match="'nobody'"):
        script(sync)("nobody", ONES)


def test_a_timeout_ends_the_wait(world: World) -> None:
    def call(seconds: float) -> int:
        return gw.rpc_async("worker1", blocks, timeout=seconds).wait()

    scripted = script(call)
    with holding(), pytest.raises(RuntimeError, match="CallTimeout"):
        scripted(0.05)
