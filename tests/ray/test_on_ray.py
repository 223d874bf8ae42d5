"""Worlds on a Ray cluster of one node. More nodes and what becomes of them: tests/cluster."""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import PATHS

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, PATHS))}
ENVIRONMENT.pop("RAY_ADDRESS", None)  # a cluster that runs is none of ours

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),  # one may wait for the other
]


@pytest.fixture(autouse=True)
def one_cluster_at_a_time(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cluster is a dozen processes, half of which load torch: no others meanwhile.

    Other tests may run in other processes of pytest; all have this folder in common.
    """
    with (tmp_path_factory.getbasetemp().parent / "ray.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def test_a_world_on_ray() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.ray.program"],
        env={**ENVIRONMENT, "RAY_ADDRESS": "127.0.0.1:1"},  # another cluster: not used
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said.pop("apart") < 1e-5
    assert said.pop("apart again") < 1e-5
    assert sorted(said.pop("world")) == ["driver", "worker0", "worker1"]
    exists = r"a world named '[\w-]+' exists: join it \(gw.ray.join\) or end it .*"
    for attempt in ("made twice", "entered twice", "made over it"):
        assert re.fullmatch(exists, said.pop(attempt))
    in_group, in_cluster, nowhere, slash = said.pop("do not fit")
    assert re.search(r"1 s .*{'CPU': 1.0} each in .* of \[{'CPU': 1.0}\]", in_group)
    assert re.search(r"had no room for 2 workers with {'CPU': 50} each", in_cluster)
    assert nowhere == "resources={}: name what a worker needs, such as {'CPU': 1}"
    assert slash == "a world cannot be named 'a/b': leave out the '/'"
    assert said == {
        "is another": True,
        "restored": [[], ["worker1"]],
        "learner": [2.0, 2.0],
        "left": [],
    }


def test_the_benchmark_measures_between_two_nodes(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    rows = ["3×3 tensor add", "tiny forward and backward"]
    command = ["bench", "--on", "ray", "--rounds", "1", "--ways", "gradwire", "Ray"]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "gradwire",
            *command,
            "--only",
            *rows,
            "--json",
            figures,
        ],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    add, backward = (json.loads(figures.read_text())["loops"][row] for row in rows)
    assert add["gradwire"]["median"] > 0
    assert add["Ray"]["median"] > 0
    assert backward["gradwire"]["median"] > 0
    assert backward["Ray"] is None
