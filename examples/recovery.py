"""Fault-tolerant training: workers are killed at random, and the losses do not change.

    gradwire launch -n 3 --max-restarts 9 examples/recovery.py

The trainer's model is on two servers. The same training runs twice, the second time with servers
killed at random moments. The launcher restarts them, and the trainer resumes from its last
checkpoint.
"""

import itertools
import os
import random
import signal
import tempfile
import threading
import time
from pathlib import Path

import torch
from torch import nn

import gradwire as gw

STEPS = 1000
KILLS = 2
SERVERS = ["worker1", "worker2"]


@gw.idempotent
def process_id() -> int:
    return os.getpid()


def build() -> tuple[nn.Module, gw.DistributedOptimizer]:
    """A model over both servers, the same each time."""
    for server in SERVERS:
        gw.rpc_sync(server, torch.manual_seed, (0,))
    model = nn.Sequential(
        gw.RemoteModule("worker1", nn.Linear, (2, 32)),
        nn.Tanh(),
        gw.RemoteModule("worker2", nn.Linear, (32, 1)),
    )
    parameters = gw.nn.remote_parameters(model)
    return model, gw.DistributedOptimizer(torch.optim.Adam, parameters, lr=0.01)


def train(path: Path, done: list[tuple[float, int]]) -> dict[int, float]:
    """The loss of each step; `done` gets when a step was done, and its number."""
    torch.manual_seed(1)
    losses = {}
    for step in gw.resumable(STEPS, build, path=path, save_every=100):
        with step, gw.context() as ctx:
            x = torch.rand(64, 2)
            loss = (step.model(x) - x.prod(1, keepdim=True)).square().mean()
            gw.backward(ctx, [loss])
            step.optimizer.step(ctx)
            losses[int(step)] = loss.item()
            done.append((time.monotonic(), int(step)))
    return losses


def kill_servers(done: list[tuple[float, int]], killed: list[float]) -> None:
    """Kill one at random, after so and so many steps; `killed` gets when."""
    chance = random.Random()
    for _ in range(KILLS):
        enough = len(done) + chance.randint(50, 250)
        while len(done) < enough:
            time.sleep(0.001)
        pid = gw.rpc_sync(chance.choice(SERVERS), process_id, retries=3)
        os.kill(pid, signal.SIGKILL)
        killed.append(time.monotonic())


def compare(folder: Path) -> None:
    expected = train(folder / "calm", [])
    done: list[tuple[float, int]] = []
    killed: list[float] = []
    killer = threading.Thread(target=kill_servers, args=(done, killed), daemon=True)
    killer.start()
    losses = train(folder / "stormy", done)
    killer.join()
    same = sum(losses[step] == expected[step] for step in range(STEPS))
    print(f"loss {losses[0]:.3f} to {losses[STEPS - 1]:.5f}")
    print(f"{same} of {STEPS} losses equal those of the calm run")
    for kill, until in itertools.pairwise([*killed, time.monotonic()]):
        steps = [pair for pair in itertools.pairwise(done) if kill < pair[1][0] < until]
        # What took longest was the way back to the last checkpoint.
        (_, last), (good, first) = max(steps, key=lambda pair: pair[1][0] - pair[0][0])
        print(f"{good - kill:.1f} s from SIGKILL to the next good step,", end=" ")
        print(f"{last - first + 1} steps done again")


with gw.init_rpc() as worker:
    if worker.name in SERVERS:
        worker.serve()
    else:
        with tempfile.TemporaryDirectory() as folder:
            compare(Path(folder))
