"""A worker that knows the numbers of a value, but was not given a reference to it."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import gradwire as gw
from gradwire._rpc.torch_modes import capture
from gradwire._rref.messages import Adopt, Create, Fetch, Invoke, Notes, fork_id
from gradwire._wire.messages import Call
from gradwire.testing import World
from tests.worlds import LIMIT

OWNER, FORGER = 1, 2
REFUSED = r"value 0\.1 of worker 'worker1' was not given to worker 2"


@pytest.fixture
def secret(plain: World) -> Iterator[gw.RRef[list[int]]]:
    """A value of worker1 that worker0 has; it is still there, and as it was, in the end."""
    rref = gw.remote(OWNER, list, ([1, 2],))
    assert rref.to_here() == [1, 2]
    yield rref
    assert rref.to_here() == [1, 2]


def say(world: World, message: object) -> object:
    agent = world.workers[FORGER]._agent
    if isinstance(message, Call):
        return agent.caller.call_async(agent.peer(OWNER), message, LIMIT).wait()
    return agent.request(OWNER, message, LIMIT).wait()


VALUE = fork_id(0, 1)
FORKS = pytest.mark.parametrize(
    "fork", [0, VALUE, fork_id(FORGER, 1), fork_id(OWNER, 1)], ids=str
)


@FORKS
def test_it_cannot_fetch_the_value(
    plain: World, secret: gw.RRef[list[int]], fork: int
) -> None:
    with pytest.raises(gw.NotAllowedError, match=REFUSED):
        say(plain, Fetch(VALUE, fork, "value"))


@FORKS
def test_it_cannot_call_a_method(
    plain: World, secret: gw.RRef[list[int]], fork: int
) -> None:
    with pytest.raises(gw.NotAllowedError, match=REFUSED):
        say(plain, Invoke("append", (3,), {}, capture(), (VALUE, fork)))
    made = fork_id(FORGER, 9)
    say(plain, Create("append", (3,), {}, capture(), (made, VALUE, fork)))
    with pytest.raises(gw.NotAllowedError, match=REFUSED):
        say(plain, Fetch(made, made, "value"))


def test_it_cannot_be_counted_in(plain: World, secret: gw.RRef[list[int]]) -> None:
    fork = fork_id(FORGER, 1)
    assert say(plain, Adopt(VALUE, fork)) is False
    with pytest.raises(gw.NotAllowedError, match=REFUSED):
        say(plain, Fetch(VALUE, fork, "value"))


def test_it_cannot_release_what_another_one_holds(
    plain: World, secret: gw.RRef[list[int]]
) -> None:
    say(plain, Notes([(VALUE, VALUE)], [], []))
    assert secret.to_here() == [1, 2]


def test_who_it_was_passed_to_can_use_it(
    plain: World, secret: gw.RRef[list[int]]
) -> None:
    assert gw.rpc_sync(FORGER, gw.RRef.to_here, (secret,)) == [1, 2]


def test_the_audit_log_has_it(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    with World(3, audit=str(path)) as world, world.as_worker(0):
        rref = gw.remote(OWNER, list, ([1, 2],))
        rref.to_here()
        for message in (
            Fetch(VALUE, 0, "value"),
            Invoke("append", (3,), {}, capture(), (VALUE, 0)),
        ):
            with pytest.raises(gw.NotAllowedError, match=REFUSED):
                say(world, message)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    refused = [line for line in lines if line["event"] == "refuse"]
    assert [line["by"] for line in refused] == ["worker2"] * 2
    assert all("was not given to worker 2" in line["reason"] for line in refused)


def test_an_owner_may_leave_its_references_open_to_all() -> None:
    with World(3, open_references=True) as world, world.as_worker(0):
        rref = gw.remote(OWNER, list, ([1, 2],))
        assert rref.to_here() == [1, 2]
        say(world, Invoke("append", (3,), {}, capture(), (VALUE, 0)))
        assert say(world, Adopt(VALUE, fork_id(FORGER, 1))) is True
        assert say(world, Fetch(VALUE, 0, "value")) == [1, 2, 3]
        say(world, Notes([(VALUE, fork_id(FORGER, 1))], [], []))
