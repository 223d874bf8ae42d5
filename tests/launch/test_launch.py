"""`gradwire launch` with processes. The launcher runs in the test, except where it dies.

Most scripts import nothing, so that they start at once. They write their process ids down; none of
them may live when the launcher has ended.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from gradwire.launch.command import main
from tests.processes import PATHS
from tests.worlds import LIMIT, free_port, wait_until

pytestmark = pytest.mark.slow

NOTED = """
import os, pathlib, signal, subprocess, sys, time
rank = int(os.environ["RANK"])
def note(pid):
    pathlib.Path("pids", str(pid)).touch()
def wait_for(count):
    while len(os.listdir("pids")) < count:
        time.sleep(0.005)
note(os.getpid())
"""

# Its line is one write: torchrun's workers share a pipe, unbuffered; `print` writes its pieces.
WORLD = """
import sys
import torch
import gradwire as gw
with gw.init_rpc() as worker:
    there = (worker.id + 1) % len(gw.get_worker_infos())
    found = gw.rpc_sync(there, torch.add, args=(torch.ones(2), 1)).tolist()
    sys.stdout.write(f"{worker.name} {found}\\n")
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the scripts are; at the end nothing of theirs runs any more."""
    (tmp_path / "pids").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, PATHS)))
    yield tmp_path
    wait_until(lambda: not any(lives(int(pid)) for pid in os.listdir("pids")))


def lives(pid: int) -> bool:
    """Whether a process runs; a dead one may stay a zombie until whoever inherited it looks."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def launch(source: str, *options: str, arguments: tuple[str, ...] = ()) -> int:
    Path("train.py").write_text(NOTED + source)
    return main([*options, "train.py", *arguments])


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "gradwire", "launch", *arguments]


def test_every_line_tells_whose_it_is(capfd: pytest.CaptureFixture[str]) -> None:
    source = "print(sys.argv[1], rank); print('oh', file=sys.stderr)"
    assert launch(source, "-n", "2", arguments=("hello",)) == 0
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["[worker0] hello 0", "[worker1] hello 1"]
    assert sorted(err.splitlines()) == ["[worker0] oh", "[worker1] oh"]


def test_a_progress_bar_is_shown_as_it_ends(capfd: pytest.CaptureFixture[str]) -> None:
    assert launch("sys.stdout.write('1 %\\r50 %\\r100 %\\nlast')") == 0
    assert capfd.readouterr().out == "[worker0] 100 %\n[worker0] last\n"


def test_modules_and_variables(capfd: pytest.CaptureFixture[str]) -> None:
    Path("trainer.py").write_text("import os; print(os.environ['A'], __name__)")
    assert main(["--env", "A=b=c", "--module", "trainer"]) == 0
    assert capfd.readouterr().out == "[worker0] b=c __main__\n"


def test_a_failure_ends_all_and_its_traceback_comes_last(
    capfd: pytest.CaptureFixture[str],
) -> None:
    source = """
signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by the launcher"))
wait_for(3)
if rank == 1: raise ValueError('no')
time.sleep(60)
"""
    assert launch(source, "-n", "3") == 1
    err = capfd.readouterr().err.splitlines()
    start = err.index(
        "gradwire launch: worker1 failed with exit status 1; the other workers were stopped"
    )
    assert err[start + 1] == "Traceback (most recent call last):"
    assert err[-1] == "ValueError: no"


def test_a_traceback_that_is_last_anyway_is_not_repeated(
    capfd: pytest.CaptureFixture[str],
) -> None:
    source = "wait_for(3)\nif rank == 1: raise ValueError('no')\ntime.sleep(60)"
    assert launch(source, "-n", "3") == 1
    err = capfd.readouterr().err.splitlines()
    assert err[-2:] == [
        "[worker1] ValueError: no",
        "gradwire launch: worker1 failed with exit status 1 (see above); the other "
        "workers were stopped",
    ]
    assert sum("Traceback" in line for line in err) == 1


def test_the_status_is_that_of_the_first_failure() -> None:
    assert launch("wait_for(2)\nif rank: sys.exit(7)\ntime.sleep(60)", "-n", "2") == 7


def test_a_killed_worker_is_a_failure(capfd: pytest.CaptureFixture[str]) -> None:
    source = "wait_for(2)\nif rank: os.kill(os.getpid(), 9)\ntime.sleep(60)"
    assert launch(source, "-n", "2") == 137
    assert "worker1 was ended by SIGKILL" in capfd.readouterr().err


def test_children_of_workers_are_ended_too() -> None:
    source = """
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
note(child.pid)
wait_for(2)
"""
    assert launch(source) == 0


def test_a_worker_that_does_not_want_to_end_is_killed() -> None:
    source = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
wait_for(2)
if rank: sys.exit(3)
time.sleep(60)
"""
    assert launch(source, "-n", "2") == 3


def test_ctrl_c_ends_all_without_tracebacks(capfd: pytest.CaptureFixture[str]) -> None:
    source = """
try:
    wait_for(2)
    if rank: os.kill(os.getppid(), signal.SIGINT)
    time.sleep(60)
finally:
    print("tidied up")
"""
    assert launch(source, "-n", "2") == 130
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["[worker0] tidied up", "[worker1] tidied up"]
    first, *places = err.splitlines()
    assert first == "gradwire launch: SIGINT: stopping worker0, worker1"
    begins = [
        f"gradwire launch: worker{n} was at {Path('train.py').resolve()}, line "
        for n in (0, 1)
    ]
    assert all(
        place.startswith(begin)
        for place, begin in zip(sorted(places), begins, strict=True)
    )


def test_ctrl_c_shows_where_a_worker_was(capfd: pytest.CaptureFixture[str]) -> None:
    source = """
def stuck():
    os.kill(os.getppid(), signal.SIGINT)
    time.sleep(60)
stuck()
"""
    assert launch(source) == 130
    assert capfd.readouterr().err.endswith(", in stuck\n")


def test_ctrl_c_shows_where_a_worker_was_that_then_does_not_end(
    capfd: pytest.CaptureFixture[str],
) -> None:
    source = """
import threading
threading.Thread(target=time.sleep, args=(60,)).start()
def stuck():
    os.kill(os.getppid(), signal.SIGINT)
    time.sleep(60)
stuck()
"""
    assert launch(source) == 130
    err = capfd.readouterr().err
    assert ", in stuck\n" in err
    assert "Traceback" not in err


def test_ctrl_c_shows_a_worker_in_a_c_call_that_keeps_the_gil(
    capfd: pytest.CaptureFixture[str],
) -> None:
    source = """
import collections, itertools, threading
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # it may come before the C call
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
def busy():
    print("to", "standard error", file=sys.stderr)
    os.kill(os.getppid(), signal.SIGINT)
    collections.deque(itertools.repeat(0), maxlen=0)
busy()
"""
    assert launch(source) == 130
    err = capfd.readouterr().err
    assert err.count("to standard error\n") == 1
    assert err.endswith(", in busy\n")
    assert "most recent call" not in err


@pytest.mark.skipif(sys.platform != "linux", reason="needs prlimit")
def test_ctrl_c_leaves_no_core_files(capfd: pytest.CaptureFixture[str]) -> None:
    source = """
import resource
limit = resource.RLIMIT_CORE
resource.setrlimit(limit, (resource.getrlimit(limit)[1],) * 2)
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGABRT, lambda *_: sys.exit(str(resource.getrlimit(limit)[0])))
os.kill(os.getppid(), signal.SIGINT)
time.sleep(60)
"""
    assert launch(source) == 130
    limit = capfd.readouterr().err.splitlines()[-1].rpartition(" ")[2]
    assert int(limit) in {0, 1}


def test_ctrl_c_does_not_wait_for_functions_that_workers_run(
    capfd: pytest.CaptureFixture[str],
) -> None:
    source = """
import gradwire as gw
def busy():
    os.kill(os.getppid(), signal.SIGINT)
    time.sleep(60)
with gw.init_rpc():
    gw.rpc_async("worker0", busy).wait()
"""
    assert launch(source) == 130
    assert re.search(r"worker0 was at .*, in <module>\n$", capfd.readouterr().err)


def test_ctrl_c_ends_within_two_seconds_those_that_do_not_heed_it() -> None:
    source = """
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGABRT, signal.SIG_IGN)
pathlib.Path("sent").write_text(str(time.time()))
os.kill(os.getppid(), signal.SIGINT)
time.sleep(60)
"""
    assert launch(source) == 130
    assert time.time() - float(Path("sent").read_text()) < 4  # 2 on a quiet machine


def test_what_goes_wrong_after_ctrl_c_is_shown(
    capfd: pytest.CaptureFixture[str],
) -> None:
    source = """
try:
    os.kill(os.getppid(), signal.SIGINT)
    time.sleep(60)
except KeyboardInterrupt:
    sys.exit("cannot save")
"""
    assert launch(source) == 130
    assert "[worker0] cannot save" in capfd.readouterr().err


def test_a_run_that_takes_too_long_shows_where_it_is(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert launch("def stuck(): time.sleep(60)\nstuck()", "--timeout", "1") == 124
    err = capfd.readouterr().err
    assert "worker0 still run after 1 s (--timeout)" in err
    assert "in stuck" in err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["-n", "0", "train.py"], "'0': must be a number, at least 1"),
        (["--timeout", "-1", "train.py"], "'-1': must be a number above 0"),
        (["--env", "A", "train.py"], "'A': give NAME=VALUE"),
        (["absent.py"], "there is no file 'absent.py'; for a module add --module"),
        (["--nnodes", "2", "train.py"], "--nnodes 2 needs --rdzv HOST:PORT"),
        (["--node-rank", "1", "train.py"], "--node-rank 1: must be in 0..0"),
        (["--rdzv", "node0", "train.py"], "--rdzv node0: give HOST:PORT"),
    ],
)
def test_what_makes_no_sense_is_named(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("train.py").touch()
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


def test_a_killed_launcher_takes_its_workers_along() -> None:
    if sys.platform != "linux":
        pytest.skip("only Linux tells a process of its parent's death")
    Path("train.py").write_text(NOTED + "time.sleep(60)")
    with subprocess.Popen(command("-n", "2", "train.py")) as launcher:
        wait_until(lambda: len(os.listdir("pids")) == 2)
        launcher.kill()


def test_a_reader_that_goes_away_ends_the_run() -> None:
    Path("train.py").write_text(NOTED + "while True: print('line')")
    with subprocess.Popen(
        command("train.py"), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == b"[worker0] line\n"
        launcher.stdout.close()
        assert launcher.wait(LIMIT) == 128 + signal.SIGPIPE


@pytest.mark.parametrize(
    "start",
    [
        command("-n", "2"),
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"],
    ],
    ids=["gradwire launch", "torchrun"],
)
def test_a_world_finds_its_place_in_the_environment(start: list[str]) -> None:
    Path("train.py").write_text(WORLD)
    done = subprocess.run(
        [*start, "train.py"], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = {line.rpartition("] ")[2] for line in done.stdout.splitlines()}
    assert lines == {"worker0 [2.0, 2.0]", "worker1 [2.0, 2.0]"}


def nodes(source: str) -> list[subprocess.Popen[str]]:
    """Two launchers, as if on two machines."""
    Path("train.py").write_text(NOTED + source)
    rdzv = f"127.0.0.1:{free_port()}"
    return [
        subprocess.Popen(
            command("--nnodes", "2", "--node-rank", rank, "--rdzv", rdzv, "train.py"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in ("1", "0")
    ]


def test_nodes_make_one_world() -> None:
    started = nodes(WORLD)
    said = [launcher.communicate(timeout=50)[0].splitlines() for launcher in started]
    # On a slow machine, they say which of the others they are waiting for.
    said = [[line for line in one if "waiting for" not in line] for one in said]
    assert said == [["[worker1] worker1 [2.0, 2.0]"], ["[worker0] worker0 [2.0, 2.0]"]]
    assert [launcher.returncode for launcher in started] == [0, 0]


def test_a_failure_on_one_node_ends_the_others() -> None:
    started = nodes("wait_for(2)\nif rank: sys.exit(5)\ntime.sleep(60)")
    said = [launcher.communicate(timeout=50)[0] for launcher in started]
    assert [launcher.returncode for launcher in started] == [5, 5]
    assert "worker1 failed with exit status 5" in said[0]
    assert "node 1: worker1 failed with exit status 5; stopping this node's" in said[1]
