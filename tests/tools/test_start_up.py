"""`gradwire bench --start-up`: a world of few workers takes all its steps."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gradwire.tools.bench.command import main


@pytest.mark.slow
def test_all_steps_are_measured(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, "-m", "gradwire", "bench", "--start-up", "3"]
    done = subprocess.run(
        [*command, "--json", str(figures)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(figures.read_text())["start-up"]["3"]
    assert found.pop("descriptors") > 0
    assert found.pop("threads") > 0
    assert [*found] == [
        "join",
        "barrier",
        "broadcast of 1 MB",
        "a layer on each worker",
        "training step",
        "training step again",
        "each calls each",
        "each calls each again",
        "leave",
    ]
    for name, taken in found.items():
        assert taken["seconds"] > 0, name
        assert f"{name} " in done.stdout


def test_a_world_has_more_than_one_worker(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--start-up", "1"])
    assert "--start-up 1: at least 2" in capsys.readouterr().err
