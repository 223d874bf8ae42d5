"""MAML over workers: second derivatives across workers.

    gradwire launch -n 3 examples/maml.py

worker0 learns initial weights from which one step of gradient descent adapts to any sine wave. Each
task belongs to another worker. The inner step needs the gradient of a loss that is computed there;
the outer step needs the gradient of that gradient.
"""

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

import gradwire as gw

INNER_RATE = 0.1
TASKS = 4  # in one step
STEPS = 60


def predict(weights: list[Tensor], x: Tensor) -> Tensor:
    a, b, c, d = weights
    return torch.tanh(x @ a + b) @ c + d


def task_loss(weights: list[Tensor], seed: int, half: int) -> Tensor:
    """Runs on the worker of the task, which alone knows the wave: half 0 to adapt, 1 to judge."""
    chance = torch.Generator().manual_seed(seed)
    height, shift = torch.rand(2, generator=chance).double() * 2 + 0.5
    x = torch.linspace(-3, 3, 20).double()[half::2].unsqueeze(1)
    return mse_loss(predict(weights, x), height * torch.sin(x + shift))


def adapted(weights: list[Tensor], gradients: tuple[Tensor, ...]) -> list[Tensor]:
    return [w - INNER_RATE * g for w, g in zip(weights, gradients, strict=True)]


def loss_after_a_step(ctx: int, weights: list[Tensor], seed: int) -> Tensor:
    """How well one step adapts, over the wire."""
    owner = f"worker{1 + seed % 2}"
    before = gw.rpc_sync(owner, task_loss, args=(weights, seed, 0))
    gradients = gw.grad(ctx, [before], weights, create_graph=True)
    return gw.rpc_sync(owner, task_loss, args=(adapted(weights, gradients), seed, 1))


def the_same_here(weights: list[Tensor], seed: int) -> Tensor:
    before = task_loss(weights, seed, 0)
    gradients = torch.autograd.grad(before, weights, create_graph=True)
    return task_loss(adapted(weights, gradients), seed, 1)


def compare(weights: list[Tensor]) -> float:
    """How far the gradients are from those of plain torch."""
    local = torch.autograd.grad(the_same_here(weights, 1), weights)
    with gw.context() as ctx:
        gw.backward(ctx, [loss_after_a_step(ctx, weights, 1)])
        found = [gw.get_gradients(ctx)[w] for w in weights]
    return max((f - g).abs().max().item() for f, g in zip(found, local, strict=True))


def main() -> None:
    torch.manual_seed(0)
    shapes = [(1, 20), (20,), (20, 1), (1,)]
    weights = [(torch.randn(s).double() * 0.5).requires_grad_() for s in shapes]
    print(f"second derivatives over the wire and here: within {compare(weights):.0e}")
    optimizer = torch.optim.Adam(weights, lr=0.02)
    for step in range(STEPS + 1):
        seeds = [step * TASKS + task for task in range(TASKS)]
        with gw.context() as ctx:
            losses = [loss_after_a_step(ctx, weights, seed) for seed in seeds]
            total = torch.stack(losses).mean()
            gw.backward(ctx, [total], accumulate=True)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            print(f"step {step}: loss after adapting to new waves {total:.3f}")


if __name__ == "__main__":
    with gw.init_rpc() as worker:
        if worker.id == 0:
            main()
