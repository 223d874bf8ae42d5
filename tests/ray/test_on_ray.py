"""Worlds on a Ray cluster of one node. More nodes and what becomes of them: tests/cluster."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from tests.processes import PATHS

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, PATHS))}
ENVIRONMENT.pop("RAY_ADDRESS", None)  # a cluster that runs is none of ours

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


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
