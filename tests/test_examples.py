"""Every example is run as its first lines say, and prints what shows that it worked."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "examples"
MOST_LINES = 120

Checks = dict[str, Callable[[float], bool]]
"""What has to be printed, and of the number in it, what it has to be."""

EXAMPLES: dict[str, Checks] = {
    "actor_learner.py": {r"from \d+% to (\d+)%": lambda caught: caught > 60},
    "asyncio_client.py": {
        r"1000 calls of 0.1 s each, all right: ([\d.]+) s": lambda s: s < 40,
        r"by reference: \[0.0, 4.0, 8.0, .*, (28.0)\]": lambda _: True,
        r"call of __main__.too_slow on worker 'worker2' timed out after ([\d.]+) s": (
            lambda s: s == 0.2
        ),
    },
    "embedding.py": {
        r"worker1: loss .* to ([\d.]+), sparse gradients": lambda loss: loss < 0.6,
        r"(\d+) of 50000 rows changed": lambda rows: 100 < rows <= 200,
        r"a step brought (\d+) KB; the table has 6400 KB": lambda size: size < 100,
    },
    "graph_sampling.py": {
        r"step 60: loss .*, (\d+)% right": lambda right: right > 75,
    },
    "maml.py": {
        r"over the wire and here: within (\S+)": lambda apart: apart < 1e-12,
        r"step 60: loss after adapting to new waves ([\d.]+)": lambda loss: loss < 1,
    },
    "parameter_server.py": {r"off by at most ([\d.]+)": lambda apart: apart < 0.05},
    "pipeline.py": {
        r"of 4 micro-batches: within (\S+)": lambda apart: apart < 1e-4,
        r"step 60: loss .*, (\d+)% right": lambda right: right > 95,
    },
    "recovery.py": {
        r"(\d+) of 1000 losses equal those of the calm run": lambda same: same == 1000,
        r"([\d.]+) s from SIGKILL to the next good step": lambda s: 0 < s < 60,
        r"good step, (\d+) steps done again": lambda steps: steps <= 100,
    },
    "split_learning.py": {
        r"epoch 30: loss .*, (\d+)% right": lambda right: right > 90,
        r"worker(1) runs nothing else for us": lambda _: True,
    },
}


def test_every_example_is_run_and_short() -> None:
    found = {path.name: path for path in FOLDER.glob("*.py")}
    assert found.keys() == EXAMPLES.keys()
    lengths = {name: len(p.read_text().splitlines()) for name, p in found.items()}
    assert {name: n for name, n in lengths.items() if n > MOST_LINES} == {}


@pytest.mark.slow
@pytest.mark.timeout(120)  # several processes, each of which loads torch
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_works(name: str) -> None:
    source = (FOLDER / name).read_text()
    command = re.search(
        rf"^    gradwire (launch -n \d+.*) examples/{name}$", source, re.M
    )
    assert command, "its docstring says how to run it"
    launch = [*command[1].split(), "--timeout=100", str(FOLDER / name)]
    done = subprocess.run(
        [sys.executable, "-m", "gradwire", *launch],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for pattern, is_right in EXAMPLES[name].items():
        found = re.search(pattern, done.stdout)
        assert found, f"{pattern!r} is not in {done.stdout}"
        assert is_right(float(found[1])), found[0]
