"""Worlds over several machines with a network that is slow, lossy or cut: `make test-cluster`."""

from __future__ import annotations

import re
import secrets
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.machines import Machines, Started, what_is_missing
from tests.worlds import wait_until

pytestmark = [
    pytest.mark.skipif(bool(what_is_missing()), reason=what_is_missing()),
    pytest.mark.timeout(180),
]

PROGRAM = ("-m", "tests.cluster.programs")
HEARTBEAT = 3.0
ENDS = 90.0  # seconds: what is cut off has to give up the store, too


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    with Machines(3, tmp_path) as found:
        yield found


def start(machines: Machines, program: str, **environment: str) -> list[Started]:
    """One worker on each machine, who meet on the first."""
    shared = {
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
        "GRADWIRE_KEY": secrets.token_hex(32),
        "GRADWIRE_HEARTBEAT": str(HEARTBEAT),
        **environment,
    }
    return [
        machines.start(
            rank + 1, sys.executable, *PROGRAM, program, RANK=str(rank), **shared
        )
        for rank in range(3)
    ]


def test_a_training_over_a_slow_network_that_loses_packets_is_exact(
    machines: Machines,
) -> None:
    machines.delay, machines.loss = 0.005, 0.02
    workers = start(machines, "train", WORLD_SIZE="3")
    assert [worker.wait() for worker in workers] == [0, 0, 0]
    assert "the same, on worker0 worker1 worker2\n" in workers[0].output


def test_a_machine_that_is_cut_off_is_lost_and_the_others_go_on(
    machines: Machines,
) -> None:
    workers = start(machines, "lose", GRADWIRE_MIN_WORKERS="3")
    workers[2].wait_for("in backward")
    begin = time.monotonic()
    machines.cut_off(3)
    workers[0].wait_for("the pass: ")
    assert time.monotonic() - begin < 3 * HEARTBEAT
    assert [workers[0].wait(), workers[1].wait()] == [0, 0]
    said = workers[0].output
    assert re.search("the pass: .*Lost.*'worker2'", said), said
    assert "a call: " in said
    assert "goes on with ['worker0', 'worker1']" in said
    workers[2].wait(ENDS)  # it cannot know that the others go on
    assert "lost worker0" in workers[2].output


def test_a_cut_that_is_shorter_than_the_heartbeat_loses_nobody(
    machines: Machines,
) -> None:
    workers = start(machines, "count", WORLD_SIZE="3", GRADWIRE_HEARTBEAT="20")
    for _ in range(3):
        before = len(workers[0].output)
        workers[0].wait_for("step")
        machines.cut_off(2)
        time.sleep(1)
        machines.reconnect(2)
        wait_until(lambda before=before: len(workers[0].output) > before + 200)
    assert "Error" not in workers[0].output


def test_a_machine_that_is_cut_off_ends_the_run_of_the_launcher_on_all(
    machines: Machines,
) -> None:
    launchers = [
        machines.start(
            node + 1,
            *(sys.executable, "-m", "gradwire", "launch", "--nnodes", 2),
            *("--node-rank", node, "--rdzv", "10.0.0.1:29500", *PROGRAM, "count"),
            GRADWIRE_KEY="some key of these",
            GRADWIRE_HEARTBEAT=str(HEARTBEAT),
        )
        for node in range(2)
    ]
    launchers[0].wait_for("step 5")
    machines.cut_off(2)
    assert all(launcher.wait(ENDS) != 0 for launcher in launchers)
    assert "WorkerLostError" in launchers[0].output
    assert "node 0, which hosts the store, is gone" in launchers[1].output


def test_the_same_program_under_torchrun(machines: Machines) -> None:
    agents = [
        machines.start(
            node + 1,
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", 3),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", "10.0.0.1:29500"),
            *("--local-addr", f"10.0.0.{node + 1}", *PROGRAM, "train"),
            GRADWIRE_KEY="some key of these",
        )
        for node in range(3)
    ]
    assert [agent.wait() for agent in agents] == [0, 0, 0]
    assert "the same, on worker0 worker1 worker2\n" in "".join(
        agent.output for agent in agents
    )
