"""What runs on the machines of `on_machines.py` and `on_slurm.py`: python -m ... NAME."""

from __future__ import annotations

import os
import sys
import time

import torch
from torch import nn

import gradwire as gw
from tests.training import (
    assert_same,
    batches,
    local_model,
    local_step,
    loss_of,
    spread_model,
    spread_step,
)


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def compare(*workers: str) -> None:
    """Some steps of a model on these workers, and of the same in this process."""
    model, local = spread_model(*workers), local_model()
    parameters = gw.nn.remote_parameters(model)
    optimizer = gw.DistributedOptimizer(torch.optim.SGD, parameters, lr=0.1)
    own = torch.optim.SGD(local.parameters(), lr=0.1)
    for x, y in batches(10):
        spread_step(model, optimizer, x, y)
        local_step(local, own, x, y)
    assert_same(model, local)


def train() -> None:
    """All others have a part of the model that the first one trains."""
    with gw.init_rpc() as worker:
        names = sorted(info.name for info in gw.get_worker_infos())
        if worker.id == 0:
            compare(*names[:3] if len(names) > 2 else ("", *names))
            large = torch.arange(1 << 20)
            assert torch.equal(gw.rpc_sync(names[-1], torch.neg, (large,)), -large)
            say("the same, on", *names)


class Stuck(torch.autograd.Function):
    """Its backward takes longer than any test."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        say("in backward")
        time.sleep(600)
        return grad


class StuckModule(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = Stuck.apply(x)
        return found


def lose() -> None:
    """The first worker loses the third in the middle of a pass, and trains on with the second."""
    with gw.init_rpc() as worker:
        if worker.name != "worker0":
            gw.on_leave(lambda info: say("lost", info.name))
            worker.serve()
            return
        stuck = gw.RemoteModule("worker2", StuckModule)
        with gw.context() as ctx:
            loss = stuck(torch.ones(3, requires_grad=True)).sum()
            try:
                gw.backward(ctx, [loss])
            except gw.GradwireError as error:
                say(f"the pass: {type(error).__name__}: {error}")
        try:
            gw.rpc_sync("worker2", torch.neg, (torch.ones(1),))
        except gw.WorkerLostError as error:
            say(f"a call: {error}")
        compare("worker1", "", "worker1")
        say("goes on with", [info.name for info in gw.get_worker_infos()])


def count() -> None:
    """Steps, one after the other, until it is told to end."""
    with gw.init_rpc() as worker:
        if worker.id == 0:
            model, (x, y) = spread_model("", "worker1", ""), next(batches(1))
            for step in range(1000000):
                with gw.context() as ctx:
                    gw.backward(ctx, [loss_of(model, x, y)])
                say("step", step)
                time.sleep(0.05)


def die() -> None:
    """One worker fails while all others serve."""
    with gw.init_rpc() as worker:
        if worker.id == 1:
            os._exit(3)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
