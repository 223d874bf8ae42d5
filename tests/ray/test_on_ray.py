"""Worlds on a Ray cluster of one node. More nodes and what becomes of them: tests/cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import PATHS


@pytest.mark.slow
@pytest.mark.timeout(150)  # Ray starts six processes, and each of ours loads torch
def test_a_world_on_ray() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.ray.program"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, PATHS))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said.pop("apart") < 1e-5
    assert said.pop("apart again") < 1e-5
    assert sorted(said.pop("world")) == ["driver", "worker0", "worker1"]
    assert said == {
        "is another": True,
        "restored": [[], ["worker1"]],
        "learner": [2.0, 2.0],
        "left": [],
    }


@pytest.mark.slow
@pytest.mark.timeout(180)  # two nodes, and four actors that load torch
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
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, PATHS))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    add, backward = (json.loads(figures.read_text())["loops"][row] for row in rows)
    assert add["gradwire"]["median"] > 0
    assert add["Ray"]["median"] > 0
    assert backward["gradwire"]["median"] > 0
    assert backward["Ray"] is None
