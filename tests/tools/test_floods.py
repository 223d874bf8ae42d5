"""`gradwire bench --floods`: all attacks are made, and the calls of members go on in each."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gradwire.tools.bench.command import main
from gradwire.tools.bench.floods import MEMBERS, STRANGERS, too_slow


@pytest.mark.slow
def test_calls_are_measured_in_all_attacks(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, "-m", "gradwire", "bench", "--floods", "200"]
    done = subprocess.run(
        [*command, "--json", str(figures)], capture_output=True, text=True, check=False
    )
    found = json.loads(figures.read_text())["floods"]["200"]
    slow = any(map(too_slow, found.values()))  # as this machine may be now
    assert done.returncode == int(slow), done.stdout + done.stderr
    assert [*found] == ["TCP", "TCP, TLS"]
    for attacks in found.values():
        assert [*attacks] == ["quiet", *STRANGERS, *MEMBERS]
        for taken in attacks.values():
            assert taken["calls"] >= 5000
            assert 0 < taken["p50"] <= taken["p99"] <= taken["longest"]


def test_an_attack_fails_the_benchmark_above_ten_times_the_quiet_p99() -> None:
    found = {name: {"p99": 10.0} for name in [*STRANGERS, *MEMBERS]}
    found["quiet"] = {"p99": 1.0}
    assert not too_slow(found)
    found["strangers connect"] = found["a process computes"] = {"p99": 12.0}
    assert too_slow(found) == {"strangers connect": 12.0}


def test_a_flood_has_someone_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--floods", "0"])
    assert "--floods 0: at least 1" in capsys.readouterr().err
