"""Training that survives: workers are killed at random, and the losses are those of a calm run.

    gradwire launch -n 3 --max-restarts 9 examples/recovery.py

The trainer's model is on two servers. The same training runs twice, the second time with servers
killed at random moments. The launcher starts them again, and the trainer goes back to its last
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


def train(path: Path, done: list[float]) -> dict[int, float]:
    """The loss of each step; `done` gets the time at which one was done, each time."""
    torch.manual_seed(1)
    losses = {}
    for step in gw.resumable(STEPS, build, path=path, save_every=100):
        with step, gw.context() as ctx:
            x = torch.rand(64, 2)
            loss = (step.model(x) - x.prod(1, keepdim=True)).square().mean()
            gw.backward(ctx, [loss])
            step.optimizer.step(ctx)
            losses[int(step)] = loss.item()
            done.append(time.monotonic())
    return losses


def kill_servers() -> None:
    """Kill one at random, once in a while."""
    chance = random.Random()
    for _ in range(KILLS):
        time.sleep(chance.uniform(0.2, 0.6))
        pid = gw.rpc_sync(chance.choice(SERVERS), process_id, retries=3)
        os.kill(pid, signal.SIGKILL)


def compare(folder: Path) -> None:
    expected = train(folder / "calm", [])
    killer = threading.Thread(target=kill_servers)
    killer.start()
    done: list[float] = []
    losses = train(folder / "stormy", done)
    killer.join()
    same = sum(losses[step] == expected[step] for step in range(STEPS))
    print(f"loss {losses[0]:.3f} to {losses[STEPS - 1]:.5f}")
    print(f"{same} of {STEPS} losses equal those of the calm run")
    pauses = sorted(later - before for before, later in itertools.pairwise(done))
    lost = (len(done) - STEPS) / KILLS
    print(f"{KILLS} kills: {lost:.0f} steps done again for each")
    print(f"from a kill to the next good step at most {pauses[-1]:.1f} s")


with gw.init_rpc() as worker:
    if worker.name in SERVERS:
        worker.serve()
    else:
        with tempfile.TemporaryDirectory() as folder:
            compare(Path(folder))
