"""`gradwire launch --attach`: one worker has the terminal, and stops at a `breakpoint()`."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradwire.launch.command import main
from tests.processes import PATHS
from tests.worlds import LIMIT

pytestmark = pytest.mark.slow

STOPS = """
import os
rank = int(os.environ["RANK"])
secret = 40 + rank
for _ in range(2):
    breakpoint()
print("after", secret, flush=True)
"""

CALLED = """
import torch
import gradwire as gw

def called(x):
    y = x * 3
    breakpoint()
    return y

with gw.init_rpc() as me:
    if me.id == 1:
        future = gw.rpc_async("worker0", called, (torch.ones(2),), timeout=0)
        print("meanwhile", gw.rpc_sync("worker0", torch.add, (torch.ones(2), 1)).tolist())
        print("got", future.wait().tolist())
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, PATHS)))
    monkeypatch.delenv("PYTHONBREAKPOINT", raising=False)
    return tmp_path


def command(source: str, *options: str) -> list[str]:
    Path("train.py").write_text(source)
    return [sys.executable, "-m", "gradwire", "launch", *options, "train.py"]


class Terminal:
    """A pseudo-terminal, and what was printed on it."""

    def __init__(self) -> None:
        self._ours, self.theirs = pty.openpty()
        self._raw = b""
        self._found: Counter[str] = Counter()

    @property
    def printed(self) -> str:
        """Without the colours of the workers' names."""
        return re.sub("\x1b\\[[0-9]+m", "", self._raw.decode())

    def wait_for(self, text: str) -> None:
        """Wait until this is printed, once more than was waited for before.

        Each text is counted for itself: workers print in any order.
        """
        self._found[text] += 1
        deadline = time.monotonic() + LIMIT
        while self.printed.count(text) < self._found[text]:
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self._ours], [], [], max(0, left))
            assert ready, f"{text!r} was not printed, but:\n{self.printed}"
            self._raw += os.read(self._ours, 4096)

    def type(self, line: str) -> None:
        os.write(self._ours, line.encode() + b"\n")

    def close(self) -> None:
        os.close(self._ours)
        os.close(self.theirs)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    made = Terminal()
    yield made
    made.close()


def started(terminal: Terminal, *arguments: str) -> subprocess.Popen[bytes]:
    """A program whose terminal this is."""
    end = terminal.theirs
    return subprocess.Popen(
        arguments, stdin=end, stdout=end, stderr=end, start_new_session=True
    )


def test_a_breakpoint_stops_the_worker_that_has_the_terminal(
    terminal: Terminal,
) -> None:
    program = command(STOPS, "-n", "2", "--attach", "worker1")
    with started(terminal, *program) as launcher:
        for answer in ("41", "42"):
            terminal.wait_for("(Pdb) ")
            terminal.type(f"p secret, {answer}")
            terminal.wait_for(f"(41, {answer})")
            terminal.wait_for("(Pdb) ")
            terminal.type("c")
        terminal.wait_for("after 41")
        terminal.wait_for("[worker0] after 40")
        assert launcher.wait(LIMIT) == 0
    # it may have come while the prompt of worker1 waited in the same line
    (told,) = [line for line in terminal.printed.splitlines() if "is skipped" in line]
    assert "[worker0] breakpoint() at " in told
    assert told.endswith("`gradwire launch --attach worker0` to stop there")


def test_a_worker_that_is_stopped_in_a_call_answers_others(
    terminal: Terminal,
) -> None:
    program = command(CALLED, "-n", "2", "--attach", "worker0")
    with started(terminal, *program) as launcher:
        terminal.wait_for("(Pdb) ")
        terminal.wait_for("[worker1] meanwhile [2.0, 2.0]")
        terminal.type("p y.sum().item()")
        terminal.wait_for("6.0")
        terminal.wait_for("(Pdb) ")
        terminal.type("c")
        terminal.wait_for("[worker1] got [3.0, 3.0]")
        assert launcher.wait(LIMIT) == 0


def test_ctrl_c_at_the_prompt_ends_all_and_leaves_the_terminal_as_it_was(
    terminal: Terminal,
) -> None:
    before = termios.tcgetattr(terminal.theirs)
    program = command(STOPS, "-n", "1", "--attach", "worker0")
    with started(terminal, *program) as launcher:
        terminal.wait_for("(Pdb) ")
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(LIMIT) == 130
    assert termios.tcgetattr(terminal.theirs) == before


def test_commands_for_the_debugger_can_come_from_a_pipe() -> None:
    done = subprocess.run(
        command(STOPS, "--attach", "worker0"),
        input="p secret\nc\nc\n",
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "(Pdb) 40" in done.stdout
    assert "after 40" in done.stdout


def test_without_a_terminal_every_worker_goes_on(
    capfd: pytest.CaptureFixture[str],
) -> None:
    Path("train.py").write_text(STOPS)
    assert main(["-n", "2", "train.py"]) == 0
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["[worker0] after 40", "[worker1] after 41"]
    assert err.count("is skipped: start with `gradwire launch --attach worker") == 2


def test_a_hook_of_the_users_is_left_alone(capfd: pytest.CaptureFixture[str]) -> None:
    Path("train.py").write_text(STOPS)
    assert main(["--env", "PYTHONBREAKPOINT=builtins.print", "train.py"]) == 0
    out, err = capfd.readouterr()
    assert out.splitlines() == ["[worker0] ", "[worker0] ", "[worker0] after 40"]
    assert err == ""


def test_a_worker_that_there_is_not_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    Path("train.py").write_text(STOPS)
    with pytest.raises(SystemExit, match="2"):
        main(["-n", "2", "--attach", "trainer", "train.py"])
    said = "--attach trainer: the workers of this machine are worker0, worker1"
    assert said in capfd.readouterr().err
