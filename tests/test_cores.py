"""How workers of one host divide its cores among their torch threads."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradwire as gw
from gradwire.cores import (
    VARIABLES,
    SharedCores,
    process_threads,
    share,
    to_mask,
    usable_cores,
)
from gradwire.testing import World
from tests.processes import Processes

CORES = st.frozensets(st.integers(0, 70), min_size=1)


@pytest.fixture
def processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Processes]:
    without_variables(monkeypatch)
    opened = Processes(tmp_path)
    yield opened
    opened.close()


def without_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*VARIABLES, "GRADWIRE_TORCH_THREADS"):
        monkeypatch.delenv(name, raising=False)


# What a share is


@given(st.lists(CORES, min_size=1, max_size=9))
def test_no_core_is_given_away_twice(sets: list[frozenset[int]]) -> None:
    masks = [to_mask(cores) for cores in sets]
    shares = [
        share(len(sets[i]), masks[i], masks[:i] + masks[i + 1 :])
        for i in range(len(sets))
    ]
    spare = [part for part in shares if part > 1]  # everyone has one at least
    assert sum(spare) <= len(frozenset.union(*sets))


@given(CORES, st.integers(1, 9))
def test_equal_workers_have_equal_shares(cores: frozenset[int], workers: int) -> None:
    mask = to_mask(cores)
    found = share(len(cores), mask, [mask] * (workers - 1))
    assert found == max(1, len(cores) // workers)


def test_workers_bound_to_cores_of_their_own_keep_them() -> None:
    assert share(4, "f", ["f0", "f00"]) == 4


def test_the_option_is_a_number_or_nothing() -> None:
    with pytest.raises(ValueError, match="torch_threads=-1"):
        gw.Options(torch_threads=-1)


# One process


def test_worlds_in_one_process_leave_torch_alone() -> None:
    before = torch.get_num_threads()
    with World(3) as world:
        assert world[0].rpc_sync("worker1", torch.get_num_threads) == before
        assert torch.get_num_threads() == process_threads() == before


def test_a_number_the_user_sets_meanwhile_is_left() -> None:
    before = torch.get_num_threads()
    try:
        cores = SharedCores("me", 3)
        cores.divide("f", [])
        assert torch.get_num_threads() == 3
        torch.set_num_threads(5)
        cores.divide("f", ["f"])
        cores.close()
        assert torch.get_num_threads() == 5
    finally:
        torch.set_num_threads(before)


# Several processes

# Two workers, in one world after the other: what is set before, and what was found then.
PAIR = """
import json, logging, os, sys
import torch
import gradwire as gw

def work():
    torch.ones(300, 300) @ torch.ones(300, 300)
    return torch.get_num_threads()

def ask(to):
    return gw.rpc_sync(to, work)

class Lines(logging.Handler):
    def emit(self, record):
        if record.name == "gradwire" and "torch" in record.getMessage():
            lines.append(record.getMessage())

logging.basicConfig(handlers=[Lines()], level="INFO")
rank, there = int(sys.argv[1]), 1 - int(sys.argv[1])
for number, (variables, threads) in enumerate(json.loads(sys.argv[3])):
    lines = []
    os.environ.update(variables)
    if threads:
        torch.set_num_threads(threads)
    url = f"{sys.argv[2]}{number}"
    at_first = work()
    with gw.init_rpc(f"worker{rank}", rank=rank, world_size=2, init_method=url):
        calls = [gw.rpc_async(there, work) for _ in range(4)]
        found = [work(), gw.rpc_sync(there, work), gw.rpc_sync(there, ask, (rank,))]
        found += [call.wait() for call in calls] + [gw.remote(there, work).to_here()]
    assert work() == at_first, "not put back"
    for name in variables:
        del os.environ[name]
    print(json.dumps([at_first, sorted(set(found)), lines]))
"""
MORE = len(usable_cores()) + 5
CASES: dict[str, tuple[dict[str, str], int]] = {
    "nothing": ({}, 0),
    **{name: ({name: str(len(usable_cores()))}, 0) for name in VARIABLES},
    "torch alone": ({"GRADWIRE_TORCH_THREADS": "0"}, 0),
    "a number": ({"GRADWIRE_TORCH_THREADS": "5"}, 0),
    "a call": ({}, MORE),  # the last: it cannot be undone
}


class Found(NamedTuple):
    """What one worker of a world found."""

    first: int
    """How many threads torch had before."""
    inside: list[int]
    """How many it had in the world, wherever it was asked."""
    lines: list[str]
    """What was logged."""


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Found]]:
    """By case: what both workers of a world found."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        without_variables(monkeypatch)
        processes = Processes(tmp_path_factory.mktemp("pairs"))
        try:
            script = processes.script(PAIR)
            given = processes.url, json.dumps(list(CASES.values()))
            pair = [processes.run(script, rank, *given) for rank in (0, 1)]
            for process in pair:
                assert process.wait() == 0, process.errors
            printed = [process.output.splitlines() for process in pair]
        finally:
            processes.close()
    worlds = zip(*printed, strict=True)
    both = [[Found(*json.loads(line)) for line in world] for world in worlds]
    return dict(zip(CASES, both, strict=True))


@pytest.mark.slow
def test_two_workers_have_half_of_the_cores_each(pairs: dict[str, list[Found]]) -> None:
    for found in pairs["nothing"]:
        half = max(1, found.first // 2)
        assert found.inside == [half]
        (line,) = found.lines
        assert f"torch uses {half} threads on" in line
        assert "2 workers of this host" in line


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIABLES)
def test_the_users_variables_win(pairs: dict[str, list[Found]], name: str) -> None:
    for found in pairs[name]:
        assert found.inside == [found.first]
        (line,) = found.lines
        cores = len(usable_cores())
        assert f"torch keeps {found.first} threads: {name}={cores}" in line


@pytest.mark.slow
def test_the_users_call_wins(pairs: dict[str, list[Found]]) -> None:
    for found in pairs["a call"]:
        assert (found.first, found.inside) == (MORE, [MORE])
        (line,) = found.lines
        assert "torch.set_num_threads was called" in line


@pytest.mark.slow
def test_the_option_leaves_torch_alone(pairs: dict[str, list[Found]]) -> None:
    for found in pairs["torch alone"]:
        assert found.inside == [found.first]
        assert not found.lines


@pytest.mark.slow
def test_the_option_gives_a_number(pairs: dict[str, list[Found]]) -> None:
    for found in pairs["a number"]:
        assert found.inside == [5]
        assert len(found.lines) == 1


FORKING = """
import os, sys
import torch
from torch.distributed import HashStore
import gradwire as gw
from tests.worlds import socket_world

threads = torch.get_num_threads() + 1
with gw.init_rpc("me", rank=0, world_size=1, store=HashStore(), torch_threads=threads):
    assert torch.get_num_threads() == threads
with socket_world(2) as workers:
    for _ in range(8):
        workers[0].rpc_sync("worker1", torch.ones, (1 << 18,))
    child = os.fork()
    if not child:
        sys.exit(0)  # ends as programs do
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.slow
def test_a_forked_child_ends_well(processes: Processes) -> None:
    script = processes.run(processes.script(FORKING), PYTHONWARNINGS="ignore")
    assert script.wait() == 0, script.errors


ELASTIC = """
import sys, threading
import torch
import gradwire as gw

came, went, go = threading.Event(), threading.Event(), threading.Event()

def work():
    torch.ones(300, 300) @ torch.ones(300, 300)
    return torch.get_num_threads()

def ask(to):
    return gw.rpc_sync(to, work)

def let_go():
    go.set()

def stay():
    print("alone", gw.rpc_sync("stays", ask, ("stays",)), work())
    gw.on_join(lambda who: came.set())
    gw.on_leave(lambda who: went.set())
    print("ready", flush=True)
    assert came.wait(60)
    print("two", gw.rpc_sync("comes", work), gw.rpc_sync("comes", ask, ("stays",)), work())
    gw.rpc_sync("comes", let_go)
    assert went.wait(60)
    print("alone", gw.rpc_sync("stays", work), work())

with gw.init_rpc(sys.argv[1], init_method=sys.argv[2]):
    if sys.argv[1] == "stays":
        stay()
    else:
        assert go.wait(60)
"""


@pytest.mark.slow
def test_elastic_worlds_divide_anew(processes: Processes) -> None:
    script = processes.script(ELASTIC)
    stays = processes.run(script, "stays", processes.url)
    stays.wait_for("ready")
    comes = processes.run(script, "comes", processes.url)
    assert (stays.wait(), comes.wait()) == (0, 0), stays.errors + comes.errors
    words = stays.output.split()
    alone, half = words[1], str(max(1, int(words[1]) // 2))
    assert (
        words
        == (
            f"alone {alone} {alone} ready two {half} {half} {half} alone {alone} {alone}"
        ).split()
    )
