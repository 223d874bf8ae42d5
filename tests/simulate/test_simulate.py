"""The simulations: nothing goes wrong, what went wrong once does not again, and each seed replays.

`python -m tests.simulate` runs many more; `make fuzz` does.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import PATHS
from tests.simulate import parts
from tests.simulate.parts import PARTS, Case, corpus, failures, keep
from tests.worlds import together

_SEEDS, _CHUNK = 2000, 200
every_part = pytest.mark.parametrize("part", PARTS)


@every_part
@pytest.mark.parametrize("start", range(0, _SEEDS, _CHUNK))
def test_nothing_goes_wrong(part: str, start: int) -> None:
    assert failures((part, start, start + _CHUNK)) == []


@pytest.mark.parametrize("case", list(corpus()), ids=str)
def test_what_went_wrong_once_does_not_again(case: Case) -> None:
    assert case.run() is None


@every_part
def test_a_crash_at_any_step_does_no_harm(part: str) -> None:
    whole = Case(part, seed=3, crash_at=-1).build()
    whole.run()
    steps = range(min(whole.simulation.steps or 40, 200))
    cases = [Case(part, 3, crash_at=step) for step in steps]
    assert [(str(case), wrong) for case in cases if (wrong := case.run())] == []


def test_what_goes_wrong_is_kept_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "CORPUS", tmp_path / "corpus.txt")
    parts.CORPUS.write_text("# part, seed, @step\n")
    cases = [Case("reader", 7), Case("ledger", 8, crash_at=9)]
    for case in [*cases, *cases]:
        keep(case, "two threads\nread")
    assert list(corpus()) == cases


@pytest.mark.slow
def test_a_seed_does_the_same_each_time() -> None:
    def replay(hash_seed: str) -> str:
        return subprocess.run(
            [sys.executable, "-m", "tests.simulate", "--seed", "12"],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(map(str, PATHS)),
                "PYTHONHASHSEED": hash_seed,
            },
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            text=True,
            timeout=100,
            check=True,
        ).stdout

    first, second = together(lambda: replay("1"), lambda: replay("2"))
    assert len(first.splitlines()) > 50
    assert second == first
