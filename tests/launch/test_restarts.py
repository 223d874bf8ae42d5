"""`gradwire launch --max-restarts`: what fails is started again, with processes."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gradwire.launch.command import main
from tests.processes import PATHS
from tests.worlds import LIMIT, free_port

pytestmark = pytest.mark.slow

LAUNCH = [sys.executable, "-m", "gradwire", "launch"]

COUNTED = """
import os, pathlib, signal, sys
name = os.environ["GRADWIRE_NAME"]
count = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print("start", count, flush=True)
"""

WORLD = """
import gradwire as gw
def process(): return os.getpid()
again = gw.idempotent(process)
with gw.init_rpc() as worker:
    if name != "worker0":
        worker.serve()
    else:
        before = gw.rpc_sync("worker1", process)
        os.kill(before, signal.SIGKILL)
        after = gw.rpc_sync("worker1", again, retries=1)
        print("another" if after != before else "the same")
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, PATHS)))


def launch(source: str, *options: str) -> int:
    Path("train.py").write_text(COUNTED + source)
    return main([*options, "train.py"])


def test_a_worker_that_fails_is_started_again_alone(
    capfd: pytest.CaptureFixture[str],
) -> None:
    source = "sys.exit(name == 'worker1' and count < 2)"
    assert launch(source, "-n", "2", "--max-restarts", "2") == 0
    out, err = capfd.readouterr()
    starts = ["[worker0] start 0", *(f"[worker1] start {i}" for i in range(3))]
    assert sorted(out.splitlines()) == starts
    assert err.splitlines() == [
        "gradwire launch: worker1 failed with exit status 1; restarting it (1 of 2)",
        "gradwire launch: worker1 failed with exit status 1; restarting it (2 of 2)",
    ]


def test_a_worker_that_fails_too_often_ends_all(
    capfd: pytest.CaptureFixture[str],
) -> None:
    source = """
if name == "worker1": raise ValueError(f"no {count}")
signal.pause()
"""
    assert launch(source, "-n", "2", "--max-restarts", "1") == 1
    err = capfd.readouterr().err
    assert "worker1 failed with exit status 1 (see above); the other workers" in err
    assert [line for line in err.splitlines() if "ValueError: " in line] == [
        "[worker1] ValueError: no 0",
        "[worker1] ValueError: no 1",
    ]


def test_the_others_go_on_without_a_worker_that_is_spared(
    capfd: pytest.CaptureFixture[str],
) -> None:
    source = "sys.exit(name == 'worker1')"
    assert launch(source, "-n", "2", "--max-restarts", "1", "--min-workers", "1") == 0
    verdict = r"worker1 failed with exit status 1(; continuing with worker0)?$"
    assert re.search(verdict, capfd.readouterr().err, re.MULTILINE)


def test_ctrl_c_restarts_nobody(capfd: pytest.CaptureFixture[str]) -> None:
    source = "os.kill(os.getppid(), signal.SIGINT); signal.pause()"
    assert launch(source, "--max-restarts", "3") == 128 + signal.SIGINT
    assert capfd.readouterr().out == "[worker0] start 0\n"


def test_a_call_goes_on_at_the_worker_that_came_back(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert launch(WORLD, "-n", "3", "--max-restarts", "1", "--timeout", "60") == 0
    out = capfd.readouterr().out
    assert "[worker0] another" in out
    assert "[worker1] start 1" in out


def test_a_node_restarts_its_worker_while_the_other_node_waits_for_it() -> None:
    Path("train.py").write_text(COUNTED + WORLD)
    shared = ("--nnodes", "2", "--rdzv", f"127.0.0.1:{free_port()}")
    launchers = [
        subprocess.Popen(
            [*LAUNCH, *shared, "--node-rank", node, "--max-restarts", "1", "train.py"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in ("0", "1")
    ]
    first, second = [launcher.communicate(timeout=LIMIT)[0] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0, 0], first + second
    assert "[worker0] another" in first
    assert "restarting it" not in first
    assert "worker1 was ended by SIGKILL; restarting it (1 of 1)" in second
    assert "[worker1] start 1" in second


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("-n", "2", "--min-workers", "3"), "at most --workers"),
        (("--max-restarts", "-1"), "must be a number, at least 0"),
        (
            ("--nnodes", "2", "--rdzv", "a:1", "--min-workers", "1"),
            "on one machine only",
        ),
    ],
)
def test_options_that_make_no_sense_are_refused(
    options: tuple[str, ...], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        launch("", *options)
    assert problem in capsys.readouterr().err
