"""A model in three stages on three workers; a batch goes through in micro-batches.

The master passes on references: what a stage makes goes to the next one directly.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from ..library import DistributedOptimizer, dist_autograd, rpc
from ..program import Program, Step, fell

STAGES = 3
BATCH, MICRO_BATCH, WIDTH = 32, 8, 128


class Stage(nn.Module):
    """A third of the model."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.lock = threading.Lock()
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x_rref: Any) -> Tensor:
        x = x_rref.to_here()
        with self.lock:
            result: Tensor = self.layers(x)
        return result

    def parameter_rrefs(self) -> list[Any]:
        return [rpc.RRef(parameter) for parameter in self.parameters()]


class Pipeline(nn.Module):
    """References to the stages, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = [
            rpc.remote(f"worker{number}", Stage, args=(number,))
            for number in range(1, STAGES + 1)
        ]

    def forward(self, batch: Tensor) -> Tensor:
        futures = []
        for micro_batch in batch.split(MICRO_BATCH):
            value = rpc.RRef(micro_batch)
            for stage in self.stages[:-1]:
                value = stage.remote().forward(value)
            futures.append(self.stages[-1].rpc_async().forward(value))
        return torch.cat(torch.futures.wait_all(futures))

    def parameter_rrefs(self) -> list[Any]:
        found = [stage.rpc_sync().parameter_rrefs() for stage in self.stages]
        return [parameter for stage in found for parameter in stage]


def _train(rank: int) -> Step:
    torch.manual_seed(rank)
    model = Pipeline()
    optimizer = DistributedOptimizer(torch.optim.SGD, model.parameter_rrefs(), lr=0.05)
    batch, target = torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)

    def step() -> float:
        with dist_autograd.context() as context_id:
            loss = mse_loss(model(batch), target)
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        return loss.item()

    return step


PROGRAMS = [
    Program(
        name="three-stage pipeline, micro-batches",
        goal=2,
        begin=_train,
        servers=STAGES,
        check=fell,
        steps=60,
        warm_up=10,
    )
]
