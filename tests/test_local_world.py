"""`local_world`: from a script, from standard input as the REPL, and from a notebook."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import gradwire as gw
from tests.processes import Processes
from tests.worlds import wait_until

pytestmark = pytest.mark.slow


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    started = Processes(tmp_path)
    yield started
    started.close()


CELLS = [
    """
import os
import torch
import gradwire as gw

offset = 10

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
    def forward(self, x):
        return (self.weight * x).sum() + offset

def pid():
    return os.getpid()
""",
    """
with gw.local_world(3) as world:
    pids = {gw.rpc_sync(f"worker{n}", pid) for n in range(3)}
    model = gw.remote("worker2", Model)
    with gw.context() as ctx:
        x = torch.ones(2, requires_grad=True)
        loss = model.rpc_sync()(x)
        gw.backward(ctx, [loss])
        slope = gw.get_gradients(ctx)[x]
print(world.name, len(pids), loss.item(), slope.tolist())
""",
    "with gw.local_world(2): print(gw.rpc_sync('worker1', lambda: offset))",
]
PRINTED = ["", "worker0 3 12.0 [1.0, 1.0]\n", "10\n"]


# nbclient's event loop outlives it: it gets a process of its own.
RUN_NOTEBOOK = """
import json, sys
import nbformat
from nbclient import NotebookClient

cells = [nbformat.v4.new_code_cell(cell) for cell in json.load(sys.stdin)]
notebook = nbformat.v4.new_notebook(cells=cells)
NotebookClient(notebook, timeout=50).execute()
texts = [[o.text for o in c.outputs if o.get("name") == "stdout"] for c in notebook.cells]
json.dump(["".join(text) for text in texts], sys.stdout)
"""


def test_a_notebook_is_worker0_and_its_functions_go_by_value(tmp_path: Path) -> None:
    done = run(["-c", RUN_NOTEBOOK], json.dumps(CELLS), tmp_path)
    assert json.loads(done) == PRINTED


def run(arguments: list[str], given: str, folder: Path) -> str:
    """What a Python program prints."""
    done = subprocess.run(
        [sys.executable, *arguments],
        input=given,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("arguments", [["-"], ["script.py"]], ids=["repl", "script"])
def test_a_script_and_the_repl_can_do_the_same(
    arguments: list[str], tmp_path: Path
) -> None:
    source = "\n".join(CELLS)
    (tmp_path / "script.py").write_text(source)
    assert run(arguments, source, tmp_path) == "".join(PRINTED)


def test_after_an_exception_the_others_are_ended() -> None:
    with pytest.raises(ValueError, match="mine"), gw.local_world(3):
        raise ValueError("mine")


def test_the_others_end_with_a_parent_that_is_killed(processes: Processes) -> None:
    source = """
import os, sys, gradwire as gw
with gw.local_world(2) as world:
    print(gw.rpc_sync("worker1", os.getpid), flush=True)
    sys.stdin.read()
"""
    parent = processes.run(processes.script(source))
    parent.wait_for("\n")
    pid = int(parent.output)
    parent.kill()
    wait_until(lambda: not lives(pid))


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("workers", [0, "4"])
def test_a_number_that_is_none_is_refused(workers: int) -> None:
    with pytest.raises(ValueError, match="give a number, at least 1"):
        gw.local_world(workers).__enter__()
