"""Trainers whose first layer is on a server: dense, and an embedding with sparse gradients.

The first layer's backward does not need its weights: trainers may update them at any time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ..library import DistributedOptimizer, dist_autograd, rpc
from ..program import Program, Step, fell

BATCH, CLASSES = 32, 10
FEATURES, HIDDEN = 784, 256
WORDS, WIDTH, TEXT = 50_000, 32, 12


class ParameterServer:
    """Has the layer that all trainers share; its parameters are optimized where they are."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x)
        return result

    def parameter_rrefs(self) -> list[Any]:
        return [rpc.RRef(parameter) for parameter in self.layer.parameters()]


class Trainer:
    """Has the rest of the model, its data and an optimizer of all parameters."""

    def __init__(self, server: str, rest: nn.Module, x: Tensor, lr: float) -> None:
        self.server = rpc.remote(server, get_server)
        self.rest = rest
        self.x = x
        self.labels = torch.randint(0, CLASSES, (BATCH,))
        parameters = self.server.rpc_sync().parameter_rrefs()
        parameters += [rpc.RRef(parameter) for parameter in rest.parameters()]
        self.optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=lr)

    def step(self) -> float:
        with dist_autograd.context() as context_id:
            hidden = self.server.rpc_sync().forward(self.x)
            loss = cross_entropy(self.rest(hidden), self.labels)
            dist_autograd.backward(context_id, [loss])
            self.optimizer.step(context_id)
        return loss.item()


_server: ParameterServer


def get_server() -> ParameterServer:
    return _server


def _serve_dense() -> None:
    global _server
    torch.manual_seed(7)
    _server = ParameterServer(nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.ReLU()))


def _serve_embedding() -> None:
    global _server
    torch.manual_seed(7)
    _server = ParameterServer(nn.EmbeddingBag(WORDS, WIDTH, mode="mean", sparse=True))


def _train_dense(trainers: int, rank: int) -> Step:
    torch.manual_seed(rank)
    rest = nn.Sequential(nn.Linear(HIDDEN, 64), nn.ReLU(), nn.Linear(64, CLASSES))
    x = torch.randn(BATCH, FEATURES)
    return Trainer(f"worker{trainers}", rest, x, lr=0.02).step


def _train_embedding(rank: int) -> Step:
    torch.manual_seed(rank)
    rest = nn.Sequential(nn.ReLU(), nn.Linear(WIDTH, CLASSES))
    words = torch.randint(0, WORDS, (BATCH, TEXT))
    return Trainer("worker1", rest, words, lr=0.1).step


PROGRAMS = [
    Program(
        name="trainer + server",
        goal=3,
        default_threads_goal=2.5,
        begin=lambda rank: _train_dense(1, rank),
        serve=_serve_dense,
        check=fell,
        steps=150,
        warm_up=20,
    ),
    Program(
        name="two trainers + server",
        goal=2,
        begin=lambda rank: _train_dense(2, rank),
        serve=_serve_dense,
        clients=2,
        check=fell,
        steps=100,
        warm_up=20,
    ),
    Program(
        name="remote embedding, sparse gradients",
        goal=3,
        begin=_train_embedding,
        serve=_serve_embedding,
        check=fell,
        steps=150,
        warm_up=20,
    ),
]
