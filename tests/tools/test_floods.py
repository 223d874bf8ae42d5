"""`gradwire bench --floods`: all attacks are made, and the calls of members go on in each."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gradwire.tools.bench.command import main
from gradwire.tools.bench.floods import MEMBERS, STRANGERS


@pytest.mark.slow
def test_calls_are_measured_in_all_attacks(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, "-m", "gradwire", "bench", "--floods", "200"]
    done = subprocess.run(
        [*command, "--json", str(figures)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(figures.read_text())["floods"]["200"]
    assert [*found] == ["TCP", "TCP, TLS"]
    for attacks in found.values():
        assert [*attacks] == ["quiet", *STRANGERS, *MEMBERS]
        for taken in attacks.values():
            assert taken["calls"] >= 5000
            assert 0 < taken["p50"] <= taken["p99"] <= taken["longest"]


def test_a_flood_has_someone_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--floods", "0"])
    assert "--floods 0: at least 1" in capsys.readouterr().err
