"""Worlds of several processes: what they find in each other, and what happens when one dies.

The test itself is worker0 where that is possible; the other workers only serve.
"""

import importlib
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire.worker import Worker
from tests.processes import Processes
from tests.worlds import LIMIT, SOON, free_port, together, wait_until

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    opened = Processes(tmp_path)
    yield opened
    opened.close()


# What a script defines

ONE_SCRIPT = """
import sys
import torch
import gradwire as gw

COUNTS = []

class Box:
    def __init__(self, value):
        self.value = value

def count(x):
    COUNTS.append(x)
    return len(COUNTS)

def open_box(box):
    assert type(box) is Box
    return Box(box.value + len(COUNTS))

if __name__ == "__main__":
    rank = int(sys.argv[1])
    with gw.init_rpc(f"worker{rank}", rank=rank, world_size=3):
        if rank == 0:
            for i in range(3):
                print("there:", gw.rpc_sync("worker1", count, args=(i,)))
            print("here:", COUNTS)
            box = gw.rpc_async("worker1", open_box, args=(Box(100),)).wait()
            print("box:", type(box) is Box, box.value)
"""

ANOTHER_SCRIPT = """
import gradwire as gw

STEP = 5

class Pair:
    def __init__(self, a, b):
        self.a, self.b = a, b

def add(pair):
    return Pair(pair.a + STEP, pair.b + STEP)

with gw.init_rpc("worker2", rank=2, world_size=3):
    pair = gw.rpc_sync("worker1", add, args=(Pair(1, 2),))
    print("by value:", type(pair) is Pair, pair.a, pair.b)
    print("lambda:", gw.rpc_sync("worker0", lambda x: x * STEP, args=(7,)))
"""


def test_scripts_find_what_they_define_in_each_other(processes: Processes) -> None:
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    script = processes.script(ONE_SCRIPT)
    others = [processes.run(script, rank, **meet) for rank in (0, 1)]
    others.append(processes.run(processes.script(ANOTHER_SCRIPT), **meet))
    assert [process.wait() for process in others] == [0, 0, 0]
    assert others[0].output == (
        "there: 1\nthere: 2\nthere: 3\nhere: []\nbox: True 103\n"
    )
    assert others[2].output == "by value: True 6 7\nlambda: 35\n"
    assert [process.errors for process in others] == ["", "", ""]


def test_a_module_that_many_calls_need_is_imported_once(
    processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "import time\ntime.sleep(0.3)\ndef double(x):\n    return 2 * x\n"
    (tmp_path / "slowly_imported.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    double = importlib.import_module("slowly_imported").double
    server = processes.serve(1, 2)
    with processes.world(2) as worker:
        futures = [worker.rpc_async("worker1", double, (i,)) for i in range(10)]
        sync = [lambda i=i: worker.rpc_sync("worker1", double, (i,)) for i in range(5)]
        assert together(*sync) == [0, 2, 4, 6, 8]
        assert [future.wait() for future in futures] == [2 * i for i in range(10)]
    assert server.wait() == 0


# Workers that die


def linger(mark: str) -> None:
    """Say that we are here, then stay."""
    Path(mark).touch()
    time.sleep(60)


def compute(mark: str, end: str) -> str:
    """Say that we are here, then use the GIL until told to end, as Python code does."""
    Path(mark).touch()
    while not Path(end).exists():
        for _ in range(100_000):
            pass
    return "done"


class Outcome:
    """How a call ended; made in a thread of its own."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._call()
        except Exception as error:  # noqa: BLE001 the test looks at it
            self.error = error

    def wait(self) -> None:
        self._thread.join(SOON)
        assert not self._thread.is_alive(), "it hangs"


@pytest.mark.parametrize("unix_sockets", [True, False], ids=["unix", "tcp"])
def test_what_waits_for_a_killed_worker_fails_at_once(
    processes: Processes, tmp_path: Path, unix_sockets: bool
) -> None:
    # Nobody is lost for being silent, and no call for taking long.
    options = {"unix_sockets": unix_sockets, "timeout": 0.0}
    options |= {"heartbeat": 0.0, "host_heartbeat": 0.0}
    friend, victim = (processes.serve(rank, 3, **options) for rank in (1, 2))
    with processes.world(3, **options) as worker:
        lost = threading.Event()
        worker.on_leave(lambda info: info.name == "worker2" and lost.set())
        marks = [tmp_path / name for name in ("sync", "async", "nested")]
        sync, posted, nested = (str(mark) for mark in marks)
        future = worker.rpc_async("worker2", linger, (posted,))
        outcomes = [
            Outcome(lambda: worker.rpc_sync("worker2", linger, (sync,))),
            Outcome(future.wait),
            Outcome(
                lambda: worker.rpc_sync(
                    "worker1", gw.rpc_sync, ("worker2", linger, (nested,))
                )
            ),
        ]
        wait_until(lambda: all(mark.exists() for mark in marks))
        victim.kill()
        for outcome in outcomes:
            outcome.wait()
            assert isinstance(outcome.error, gw.WorkerLostError)
            assert outcome.error.worker == "worker2"
        assert lost.wait(LIMIT)
        with pytest.raises(gw.WorkerLostError, match="lost worker 'worker2'"):
            worker.rpc_sync("worker2", max, (1, 2))
        assert worker.rpc_sync("worker1", max, (1, 2)) == 2
    assert friend.wait() == 0


def test_a_worker_killed_before_anyone_spoke_to_it_holds_nobody_up(
    processes: Processes,
) -> None:
    friend, victim = (processes.serve(rank, 3) for rank in (1, 2))
    with processes.world(3):
        victim.wait_for("ready")
        victim.kill()
        victim.wait()
    assert friend.wait() == 0


def test_a_killed_worker_leaves_no_shared_memory_behind(processes: Processes) -> None:
    server = processes.serve(1, 2)
    with processes.world(2) as worker:
        for _ in range(5):
            result = worker.rpc_sync("worker1", torch.ones, (1 << 20,))
        server.kill()
        server.wait()
        assert result.sum() == 1 << 20  # what has arrived is ours
        del result


def test_a_stopped_worker_is_waited_for_no_longer_than_asked(
    processes: Processes,
) -> None:
    server = processes.serve(1, 2)
    with processes.world(2) as worker:
        assert worker.rpc_sync("worker1", max, (1, 2)) == 2
        server.stop()
        start = time.monotonic()
        late = worker.rpc_async("worker1", max, (1, 2), timeout=0.3)
        with pytest.raises(gw.CallTimeout):
            worker.rpc_sync("worker1", max, (1, 2), timeout=0.3)
        with pytest.raises(gw.CallTimeout):
            late.wait()
        large = torch.zeros(64 << 20, dtype=torch.uint8)
        with pytest.raises(gw.CallTimeout):
            worker.rpc_sync("worker1", torch.numel, (large,), timeout=0.3)
        assert time.monotonic() - start < SOON
        server.go_on()
        assert worker.rpc_sync("worker1", max, (1, 2)) == 2
        assert worker.rpc_async("worker1", max, (1, 2)).wait() == 2
    assert server.wait() == 0


def be_impatient(worker: Worker, beat: float) -> None:
    """From now on, count those as lost that are silent for that long.

    Not before: on a busy machine those that are well may be silent, too.
    """
    transport: Any = worker._transport
    transport._options = replace(transport._options, host_heartbeat=beat)


@pytest.mark.parametrize("is_known", [True, False], ids=["known", "never met"])
def test_a_worker_that_stays_stopped_is_lost_and_the_error_says_so(
    processes: Processes, tmp_path: Path, is_known: bool
) -> None:
    beat = 1.0
    server = processes.serve(1, 2)
    # That between hosts says how often it looks.
    with processes.world(2, heartbeat=beat, timeout=0) as worker:
        if is_known:
            mark = str(tmp_path / "mark")
            waiting = [Outcome(lambda: worker.rpc_sync("worker1", linger, (mark,)))]
            waiting += [Outcome(worker.rpc_async("worker1", linger, (mark,)).wait)]
            waiting += [Outcome(worker.remote("worker1", linger, (mark,)).to_here)]
            wait_until(Path(mark).exists)
            server.stop()
            be_impatient(worker, beat)
        else:
            server.wait_for("ready")
            server.stop()
            be_impatient(worker, beat)
            waiting = [Outcome(lambda: worker.rpc_sync("worker1", max, (1, 2)))]
            waiting += [Outcome(lambda: worker.rpc_async("worker1", max, (1,)).wait())]
        for outcome in waiting:
            outcome.wait()
            assert isinstance(outcome.error, gw.WorkerLostError)
            said = re.search(r"nothing heard for (\S+) s: it is", str(outcome.error))
            assert said, outcome.error
            assert float(said[1]) >= beat
            assert "it is stopped" in str(outcome.error)
        server.kill()


@pytest.mark.parametrize("glance", [0.05, None], ids=["in glances", "in one wait"])
def test_the_main_thread_that_waits_notices_that_a_worker_is_stopped(
    processes: Processes, glance: float | None
) -> None:
    """However often it looks up, that it looks is no sign of life of the other."""
    server = processes.serve(1, 2)
    with processes.world(2, heartbeat=1.0, timeout=0) as worker:
        assert worker.rpc_async("worker1", max, (1, 2)).wait() == 2
        server.stop()
        late = worker.rpc_async("worker1", max, (1, 2))
        be_impatient(worker, 1.0)

        def is_lost() -> bool:
            try:
                late.wait(glance)
            except TimeoutError:
                return False
            except gw.WorkerLostError:
                return True
            raise AssertionError("it has answered")

        wait_until(is_lost, SOON)
        server.kill()


def test_a_worker_that_only_computes_is_heard_of(
    processes: Processes, tmp_path: Path
) -> None:
    server = processes.serve(1, 2)
    with processes.world(2, timeout=0) as worker:
        mark, end = tmp_path / "mark", tmp_path / "end"
        future = worker.rpc_async("worker1", compute, (str(mark), str(end)))
        wait_until(mark.exists)
        connections: Any = worker._transport._out[1]  # type: ignore[attr-defined]
        for _ in range(5):
            heard_at = connections.shared.alive_at
            connections.ping()
            wait_until(lambda: connections.shared.alive_at > heard_at)  # noqa: B023
        end.touch()
        assert future.wait() == "done"
    assert server.wait() == 0


# Ways to end

FORGETFUL_SCRIPT = """
import sys
import gradwire as gw

gw.init_rpc("worker1", rank=1, world_size=2, init_method=sys.argv[1])
print(gw.rpc_sync("worker0", max, args=(1, 2)))
"""


def test_a_program_that_forgot_to_shut_down_leaves_quietly(
    processes: Processes,
) -> None:
    forgetful = processes.run(processes.script(FORGETFUL_SCRIPT), processes.url)
    with processes.world(2) as worker:
        assert forgetful.wait() == 0
        assert (forgetful.output, forgetful.errors) == ("2\n", "")
        wait_until(lambda: worker.get_worker_infos() == [("worker0", 0)])
        with pytest.raises(gw.WorkerLostError, match="it has left"):
            worker.rpc_sync("worker1", max, (1, 2))


PENDING_SCRIPT = """
import sys
import gradwire as gw
from tests.rpc.functions import never

gw.init_rpc("worker1", rank=1, world_size=2, init_method=sys.argv[1])
futures = [gw.rpc_async("worker0", never) for _ in range(3)]
"""


def test_a_program_that_ends_before_its_calls_says_so_in_one_line(
    processes: Processes,
) -> None:
    hasty = processes.run(processes.script(PENDING_SCRIPT), processes.url)
    with processes.world(2):
        assert hasty.wait() == 0
    assert hasty.errors == (
        "worker 'worker1' exits with 3 calls in flight: wait for them, or call gw.shutdown()\n"
    )


FAILING_SCRIPT = """
import sys
import gradwire as gw

with gw.init_rpc("worker1", rank=1, world_size=2, init_method=sys.argv[1]):
    gw.rpc_sync("worker0", max, args=(1, 2))
    raise LookupError("something else went wrong")
"""


def test_an_exception_in_the_with_block_ends_it_without_waiting(
    processes: Processes,
) -> None:
    failing = processes.run(processes.script(FAILING_SCRIPT), processes.url)
    with processes.world(2):
        assert failing.wait() == 1  # although worker0 does not shut down
        assert failing.errors.endswith("LookupError: something else went wrong\n")


def test_shutdown_waits_until_all_want_to_end(processes: Processes) -> None:
    server = processes.serve(1, 2)
    with processes.world(2) as worker:
        closing = Outcome(worker.shutdown)
        server.wait_for("ready")
        server.tell_to_end()
        closing.wait()
        assert closing.error is None
    assert server.wait() == 0
    assert not server.errors


# Signals and forks

INTERRUPTED_SCRIPT = """
import os, time
from tests.worlds import socket_world

def stay(turn):
    print("entered", turn, flush=True)
    time.sleep(60)

with socket_world(2) as (worker, other):
    calls = {
        "sync": lambda: worker.rpc_sync("worker1", stay, ("sync",)),
        "async": lambda: worker.rpc_async("worker1", stay, ("async",)).wait(),
        "timed": lambda: worker.rpc_async("worker1", stay, ("timed",)).wait(50),
        "again": lambda: worker.rpc_sync("worker1", stay, ("again",), timeout=0),
    }
    for turn, call in calls.items():
        try:
            call()
        except KeyboardInterrupt:
            print("interrupted", turn, flush=True)
        assert worker.rpc_sync("worker1", max, (1, 2)) == 2
        assert worker.rpc_async("worker1", max, (1, 2)).wait() == 2
    os._exit(0)  # what was called goes on sleeping
"""


def test_ctrl_c_ends_a_wait_and_leaves_the_worker_usable(processes: Processes) -> None:
    script = processes.run(processes.script(INTERRUPTED_SCRIPT))
    for turn in ("sync", "async", "timed", "again"):
        script.wait_for(f"entered {turn}")
        pressed_at = time.monotonic()
        script.interrupt()
        script.wait_for(f"interrupted {turn}")
        assert time.monotonic() - pressed_at < SOON
    assert script.wait() == 0


FORKING_SCRIPT = """
import gc, os, sys
import torch
from torch.distributed import HashStore
import gradwire as gw
from tests.worlds import socket_world

def in_child(body):
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        body()
    except BaseException as error:
        print("in the child:", repr(error), flush=True)
        os._exit(1)
    os._exit(0)

def has_no_worker():
    try:
        gw.rpc_sync("alone", max, args=(1, 2))
    except gw.ClosedError:
        return
    raise AssertionError("it has a worker")

def starts_its_own():
    with gw.init_rpc("own", rank=0, world_size=1, store=HashStore()):
        assert gw.rpc_sync("own", max, args=(1, 2)) == 2

def lets_go():
    kept.clear()
    gc.collect()

kept = []
gw.init_rpc("alone", rank=0, world_size=1, store=HashStore())
assert in_child(has_no_worker) == 0
assert in_child(starts_its_own) == 0
assert gw.rpc_sync("alone", max, args=(1, 2)) == 2
gw.shutdown()
with socket_world(2) as workers:
    for i in range(8):
        kept.append(workers[0].rpc_sync("worker1", torch.full, ((1 << 18,), float(i))))
    assert in_child(lets_go) == 0
    for i in range(8):
        workers[0].rpc_sync("worker1", torch.full, ((1 << 18,), -1.0))
    assert [int(x.min()) for x in kept] == list(range(8)), "overwritten"
    child = os.fork()
    if not child:
        sys.exit(0)  # ends as programs do: also leaves the block, and shuts down
    assert os.waitpid(child, 0)[1] == 0
    assert workers[0].rpc_sync("worker1", max, (1, 2)) == 2
    kept.clear()
print("done")
"""


def test_a_forked_child_has_no_worker_and_harms_none(processes: Processes) -> None:
    script = processes.run(processes.script(FORKING_SCRIPT), PYTHONWARNINGS="ignore")
    assert script.wait() == 0
    assert script.output == "done\n"
