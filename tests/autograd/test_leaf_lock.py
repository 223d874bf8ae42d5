"""Sending a leaf while another thread computes with it (why: `tests/upstream/leaf_lock.py`)."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import threading, time
import torch
from gradwire._autograd.nodes import Crossing, Send

def compute():
    while not is_over.is_set():
        leaf.sin()

torch.set_num_threads(1)
leaf, is_over = torch.ones(3, requires_grad=True), threading.Event()
made = leaf.detach().requires_grad_() * 1
thread = threading.Thread(target=compute)
thread.start()
deadline = time.monotonic() + {seconds}
for _ in range({rounds}):
    {send}
    if time.monotonic() > deadline:  # a busy machine, which is no deadlock
        break
is_over.set()
thread.join()
"""
SENDS = {
    "with others": "Send(Crossing(1, 1, 1, 2), (leaf, made))",
    "by itself": "Send(Crossing(1, 1, 1, 1), (leaf,)).output",
    "twice": "Send(Crossing(1, 1, 1, 2), (leaf, leaf)).output",
}
UPSTREAM = Path(__file__).parents[1] / "upstream" / "leaf_lock.py"
LIMIT = 50.0


@pytest.mark.slow
@pytest.mark.parametrize("send", SENDS)
def test_a_leaf_is_sent_while_another_thread_computes_with_it(send: str) -> None:
    program = PROGRAM.format(rounds=60_000, seconds=LIMIT / 3, send=SENDS[send])
    subprocess.run([sys.executable, "-c", program], check=True, timeout=LIMIT)


@pytest.mark.slow
def test_what_avoids_the_deadlock_in_plain_torch() -> None:
    command = [sys.executable, str(UPSTREAM), "held"]
    subprocess.run(command, check=True, timeout=LIMIT)
