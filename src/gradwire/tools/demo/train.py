"""Training, over workers and in one process: the same samples, the same network.

All in double precision: where sums are taken in another order, single precision drifts apart by
1e-3 within some hundred steps, and would hide a mistake of that size.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ... import DistributedOptimizer, backward, context
from ...nn import remote_parameters
from ..graph import Graph, capture
from .data import Samples, batches
from .model import Network, here, spread

BATCH = 64
RATE = 2e-3
LIMIT = 1e-5
"""How far apart the losses of the two runs may be."""

Step = Callable[[Samples], float]
OnStep = Callable[["Curve"], None]


@dataclass(slots=True)
class Curve:
    """How a run goes."""

    epochs: int
    steps: int
    """In each epoch."""
    losses: list[float] = field(default_factory=list)
    """Of every step."""
    seconds: float = 0.0
    accuracy: float = 0.0

    @property
    def epoch_losses(self) -> list[float]:
        """The mean of each epoch that is complete."""
        ends = range(self.steps, len(self.losses) + 1, self.steps)
        return [sum(self.losses[e - self.steps : e]) / self.steps for e in ends]


def train_spread(
    train: Samples, test: Samples, epochs: int, on_step: OnStep
) -> tuple[Curve, Graph]:
    """Train the network over the workers; its curve, and the graph of a step."""
    model = Network(spread)
    optimizer = DistributedOptimizer(
        torch.optim.Adam, remote_parameters(model), lr=RATE
    )

    def step(samples: Samples) -> float:
        with context() as ctx:
            loss = _loss(model, samples)
            backward(ctx, [loss])
            optimizer.step(ctx)
        return loss.item()

    curve = _run(step, train, epochs, on_step)
    curve.accuracy = _accuracy(model, test)
    with context() as ctx:
        return curve, capture(ctx, [_loss(model, train)])


def train_here(train: Samples, test: Samples, epochs: int, on_step: OnStep) -> Curve:
    """Train the same network in this process."""
    model = Network(here)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)

    def step(samples: Samples) -> float:
        optimizer.zero_grad()
        loss = _loss(model, samples)
        loss.backward()
        optimizer.step()
        return loss.item()

    curve = _run(step, train, epochs, on_step)
    curve.accuracy = _accuracy(model, test)
    return curve


def _run(step: Step, samples: Samples, epochs: int, on_step: OnStep) -> Curve:
    curve = Curve(epochs, -(-len(samples.digits) // BATCH))
    begin = time.perf_counter()
    for epoch in range(1, epochs + 1):
        for batch in batches(samples, BATCH, epoch):
            curve.losses.append(step(batch))
            curve.seconds = time.perf_counter() - begin
            on_step(curve)
    return curve


def _loss(model: nn.Module, samples: Samples) -> Tensor:
    return cross_entropy(model(samples.pictures), samples.digits)


@torch.no_grad()
def _accuracy(model: nn.Module, samples: Samples) -> float:
    guesses = model(samples.pictures).argmax(1)
    return float((guesses == samples.digits).double().mean())
