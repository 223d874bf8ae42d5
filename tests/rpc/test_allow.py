"""A world with an allow-list: only what is listed is called, and only plain data travels."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path, PurePath
from types import ModuleType
from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire._rpc.allow import AllowList
from gradwire._rpc.audit import NO_AUDIT
from gradwire._rpc.function_runner import Runner
from gradwire._transport.handshake import HELLO_SIZE
from gradwire._wire.codec import Manner
from gradwire._wire.frames import Limits
from gradwire._wire.functions import Names
from gradwire._wire.messages import Call
from gradwire.testing import World
from tests.rpc.functions import Boom, boom, whoami
from tests.transport.strangers import is_closed, stranger
from tests.wire.round_trip import Codec
from tests.worlds import LIMIT, close_world, open_world, socket_world, wait_until

SOURCE = '''
"""A module of functions for others to call."""

import os
from math import sqrt
from os.path import join as joined
from pathlib import PurePath

import torch


def double(x):
    return 2 * x


def echo(x):
    return x


def grad_mode():
    return torch.is_grad_enabled()


def fail(text):
    raise ValueError(text)


def make_path():
    return PurePath("a")


def _private(x):
    return x


class Calculator:
    @staticmethod
    def square(x):
        return x * x

    @staticmethod
    def _hidden(x):
        return x


half = lambda x: x / 2
'''


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module whose public functions may be called."""
    module = ModuleType("served")
    exec(SOURCE, module.__dict__)
    monkeypatch.setitem(sys.modules, "served", module)
    return module


@pytest.fixture
def world(served: ModuleType) -> Iterator[World]:
    with World(
        2, allow=[served, max, "tests.rpc.functions:whoami", boom, torch.add]
    ) as world:
        yield world


# What may be called


def test_listed_functions_can_be_called(world: World) -> None:
    call = world[0].rpc_sync
    assert call("worker1", max, (1, 2)) == 2
    assert call("worker1", whoami) == "worker1"
    assert call("worker0", max, (1, 2)) == 2
    result = call("worker1", torch.add, (torch.ones(100_000), 1))
    torch.testing.assert_close(result, torch.full((100_000,), 2.0))


def test_public_functions_of_a_listed_module_can_be_called(
    world: World, served: Any
) -> None:
    call = world[0].rpc_sync
    assert call("worker1", served.double, (4,)) == 8
    assert call("worker1", served.Calculator.square, (3,)) == 9


def test_others_cannot_be_called(world: World, served: Any) -> None:
    for func in (min, os.getcwd, served.os.system, torch.sub, served._private):
        with pytest.raises(
            gw.NotAllowedError, match="is not on this worker's allow-list"
        ) as caught:
            world[0].rpc_sync("worker1", func, (1,))
        assert func.__name__ in str(caught.value)


def test_functions_without_a_name_are_refused_here(world: World) -> None:
    x = 1
    for func in (lambda: 1, lambda: x, PurePath("a").with_name):
        with pytest.raises(gw.NotAllowedError, match="cannot be imported by name"):
            world[0].rpc_sync("worker1", func)


IMPORTED = "is not on this worker's allow-list: it is only imported there, not defined"
NAMES = {
    "served:double": None,
    "served:Calculator.square": None,
    "served:half": None,
    "builtins:max": None,
    "served:_private": "is not on this worker's allow-list",
    "served:Calculator._hidden": "is not on this worker's allow-list",
    "served:double.__globals__.pop": "is not on this worker's allow-list",
    "served:__dict__.clear": "is not on this worker's allow-list",
    "served:os.system": IMPORTED,
    "served:os.path.join": IMPORTED,
    "served:sqrt": IMPORTED,
    "served:joined": IMPORTED,
    "served:os": IMPORTED,
    "served.os:system": "is not on this worker's allow-list",
    "builtins:max.__call__": "is not on this worker's allow-list",
    "builtins:eval": "is not on this worker's allow-list",
    "max": "is not on this worker's allow-list",
    "": "is not on this worker's allow-list",
    ":": "is not on this worker's allow-list",
}


@pytest.mark.parametrize("name", NAMES)
def test_whatever_name_is_sent_only_what_was_meant_is_run(
    name: str, served: ModuleType
) -> None:
    runner = Runner(AllowList([served, max]), host=pytest.fail)
    args = (4, 5) if name == "builtins:max" else (4,)
    if NAMES[name] is None:
        assert runner.run(0, Call(name, args, {}, None))
        return
    with pytest.raises(gw.NotAllowedError) as caught:
        runner.run(0, Call(name, args, {}, None))
    assert str(caught.value) == f"{name!r} {NAMES[name]}"


@pytest.mark.parametrize("function", [max, torch.device("cpu"), ["served:double"], 7])
def test_what_is_sent_instead_of_a_name_is_not_run(
    function: Any, served: ModuleType
) -> None:
    runner = Runner(AllowList([served, max]), host=pytest.fail)
    with pytest.raises(gw.NotAllowedError):
        runner.run(0, Call(function, (1, 2), {}, None))


def test_a_listed_name_may_be_underscored_or_imported(served: ModuleType) -> None:
    names = ["served:_private", "served:sqrt"]
    runner = Runner(AllowList(names), host=pytest.fail)
    assert runner.run(0, Call("served:_private", (3,), {}, None)) == 3
    assert runner.run(0, Call("served:sqrt", (9,), {}, None)) == 3


def test_an_entry_that_names_nothing_is_refused() -> None:
    for entry in ("double", 7, lambda: 1):
        with pytest.raises(ValueError, match="is neither a module, an importable") as e:
            World(2, allow=[entry])
        assert repr(entry) in str(e.value)


def test_an_empty_list_allows_nothing() -> None:
    with (
        World(2, allow=[]) as world,
        pytest.raises(gw.GradwireError, match="allow-list"),
    ):
        world[0].rpc_sync("worker1", max, (1, 2))


# What may travel


@pytest.mark.parametrize(
    "value",
    [
        None,
        -(2**70),
        1.5,
        2j,
        "text",
        b"bytes",
        [1, (2, {"a": {3}})],
        slice(1, None, 2),
        torch.float16,
        torch.Size([2, 3]),
    ],
)
def test_plain_data_travels_both_ways(world: World, served: Any, value: Any) -> None:
    result = world[0].rpc_sync("worker1", served.echo, (value,))
    assert result == value
    assert type(result) is type(value)


def test_an_argument_that_is_not_plain_is_refused_here(
    world: World, served: Any
) -> None:
    with pytest.raises(TypeError, match=r"cannot send .*in allow-list mode only") as e:
        world[0].rpc_sync("worker1", served.double, (PurePath("a"),))
    assert "PurePosixPath" in str(e.value)


def test_a_result_that_is_not_plain_is_named(world: World, served: Any) -> None:
    with pytest.raises(TypeError, match=r"result of .*make_path.* cannot be sent"):
        world[0].rpc_sync("worker1", served.make_path)


def test_errors_come_as_text_with_the_types_of_python(
    world: World, served: Any
) -> None:
    with pytest.raises(ValueError, match="no good") as caught:
        world[0].rpc_sync("worker1", served.fail, ("no good",))
    remote = caught.value.__cause__
    assert isinstance(remote, gw.RemoteError)
    assert "in fail" in remote.trace
    with pytest.raises(gw.RemoteError, match="Boom: own type") as other:
        world[0].rpc_sync("worker1", boom, ("own type",))
    assert not isinstance(other.value, Boom)


def test_a_pickle_is_refused_whatever_it_holds(world: World) -> None:
    pickling = Codec(Limits(1 << 20, 1 << 20))
    call = Call(max, (PurePath("a"), 2), {}, None)
    agent = world[0]._agent
    for parcel in (
        pickling.call(call, Manner()),
        pickling.call(Call(max, (1, 2), {}, None), Manner()),
        pickling.call(Call(lambda: 1, (), {}, None), Manner()),
    ):
        future = agent.caller.post(agent.peer("worker1"), parcel, max, 1.0)
        with pytest.raises(gw.GradwireError, match="accepts no pickles"):
            future.wait()


def test_the_callers_modes_travel_too(world: World, served: Any) -> None:
    with torch.no_grad():
        assert world[0].rpc_sync("worker1", served.grad_mode) is False
    assert world[0].rpc_sync("worker1", served.grad_mode) is True


def test_workers_with_a_list_can_still_meet(world: World) -> None:
    both = world.run(lambda worker: worker.all_gather(worker.id))
    assert both == [{"worker0": 0, "worker1": 1}] * 2


# By caller


RULES = {"trainer*": [max, torch.add], "viewer": [], "*": [min]}


@pytest.mark.parametrize(
    ("caller", "allowed", "refused"),
    [("trainer0", max, min), ("other", min, max), ("trainer", torch.add, torch.mul)],
)
def test_what_is_allowed_depends_on_who_calls(
    caller: str, allowed: Any, refused: Any
) -> None:
    allow = AllowList(RULES)
    runner = Runner(allow, host=pytest.fail)
    runner.name_of = {0: caller}.__getitem__
    names = Names()
    arguments = (torch.ones(1), torch.ones(1))
    runner.run(0, Call(names.name_of(allowed, True), arguments, {}, None))
    with pytest.raises(gw.NotAllowedError):
        runner.run(0, Call(names.name_of(refused, True), arguments, {}, None))


def test_the_first_rule_that_matches_counts() -> None:
    rules = AllowList({"trainer0": [], "trainer*": [max]})
    rules.check("builtins:max", "trainer1")
    problem = "'builtins:max' is not on this worker's allow-list for 'trainer0'"
    with pytest.raises(gw.NotAllowedError, match=problem):
        rules.check("builtins:max", "trainer0")


def test_the_rule_is_named_and_so_is_that_there_is_none() -> None:
    rules = AllowList({"trainer*": [max]})
    with pytest.raises(
        gw.NotAllowedError, match=r"for 'trainer.', which 'trainer7' is"
    ):
        rules.check("builtins:min", "trainer7")
    with pytest.raises(gw.NotAllowedError, match="it has no rule for 'viewer'"):
        rules.check("builtins:max", "viewer")
    rest = AllowList({"*": [torch]})
    with pytest.raises(gw.NotAllowedError, match=r"for '\*', which 'viewer' is"):
        rest.check("builtins:max", "viewer")
    with pytest.raises(gw.NotAllowedError, match=r"for '\*', .*: it is only imported"):
        rest.check_resolved("torch:os", os, "viewer")


def test_workers_are_told_apart_over_a_world() -> None:
    rules = {"worker1": [max], "*": []}
    with socket_world(3, apart={0: {"allow": rules}}) as (_, one, other):
        assert one.rpc_sync(0, max, (1, 2)) == 2
        with pytest.raises(gw.NotAllowedError, match="allow-list"):
            other.rpc_sync(0, max, (1, 2))


# The audit log


Line = dict[str, str]


def lines_of(path: Path, worker: str) -> list[Line]:
    """What a worker has written down, without the times."""
    lines: list[Line] = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        assert line.pop("time")
    return [line for line in lines if line.pop("worker") == worker]


def of(event: str, lines: list[Line]) -> list[Line]:
    return [line for line in lines if line["event"] == event]


def test_the_audit_log_has_who_called_what(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    audit = {"audit": str(path), "allow": [max, list], "unix_sockets": False}
    workers = open_world(3, **audit)
    assert workers[1].rpc_sync(0, max, (1, 2)) == 2
    assert workers[2].rpc_sync(0, list, ([1],)) == [1]
    with pytest.raises(gw.NotAllowedError):
        workers[1].rpc_sync(0, min, (1, 2))
    with stranger(workers[0]) as sock:
        sock.sendall(bytes(HELLO_SIZE))
        assert is_closed(sock)
    wait_until(lambda: len(of("refuse", lines_of(path, "worker0"))) == 2)
    workers[2].close()
    wait_until(lambda: of("leave", lines_of(path, "worker0")))
    close_world(workers[:2], graceful=False)

    seen = lines_of(path, "worker0")
    joined = [line["who"] for line in of("join", seen)]
    assert joined == ["worker0", "worker1", "worker2"]
    assert of("call", seen) == [
        {"event": "call", "by": "worker1", "function": "builtins:max"},
        {"event": "call", "by": "worker2", "function": "builtins:list"},
    ]
    refused, outside = of("refuse", seen)
    assert (refused["by"], refused["function"]) == ("worker1", "builtins:min")
    assert refused["reason"] == "'builtins:min' is not on this worker's allow-list"
    assert outside["origin"] == "127.0.0.1"
    assert "not a gradwire connection" in outside["reason"]
    assert of("leave", seen)[0]["who"] == "worker2"
    for worker in "worker0", "worker1", "worker2":  # at the end, of itself
        assert lines_of(path, worker)[-1] == {"event": "leave", "who": worker}
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_audit_log_has_refusals_that_are_not_of_functions(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    with World(2, audit=str(path), allow=[max]) as world:
        agent = world[1]._agent
        pickle = Codec(Limits(1 << 20, 1 << 20)).call(
            Call(lambda: 1, (), {}, None), Manner()
        )
        with pytest.raises(gw.NotAllowedError, match="accepts no pickles"):
            agent.caller.post(agent.peer("worker0"), pickle, max, LIMIT).wait()
        (refused,) = of("refuse", lines_of(path, "worker0"))
    assert refused["by"] == "worker1"
    assert "accepts no pickles" in refused["reason"]


def test_without_an_audit_log_there_is_none(tmp_path: Path) -> None:
    with World(2) as world:
        assert world.workers[1].rpc_sync(0, max, (1, 2)) == 2
        assert world.workers[0]._audit is NO_AUDIT
