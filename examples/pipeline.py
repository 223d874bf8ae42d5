"""Pipeline: a model of two stages on two workers, kept busy by micro-batches.

    gradwire launch -n 3 examples/pipeline.py

worker0 cuts each batch into micro-batches and starts them all. The first stage's output goes
directly to the second stage, by reference, while the first works on the next one. One backward pass
runs through all of them.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import gradwire as gw

MICRO_BATCHES = 4


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(2, 64), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Second(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))

    def forward(self, hidden: gw.RRef) -> Tensor:
        return self.layers(hidden.to_here())  # from the first stage, not from worker0


def forward(first: gw.RRef, second: gw.RRef, x: Tensor, parts: int) -> Tensor:
    """What the pipeline says about a batch."""
    hidden = [first.remote().forward(part) for part in x.chunk(parts)]
    return torch.cat(
        [f.wait() for f in [second.rpc_async().forward(h) for h in hidden]]
    )


def rings(count: int) -> tuple[Tensor, Tensor]:
    """Points on two rings, and on which one they are."""
    label = torch.randint(0, 2, (count,))
    angle, radius = torch.rand(count) * 6.283, label + 1 + 0.1 * torch.randn(count)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], 1), label


def gradients(first: gw.RRef, second: gw.RRef, parts: int) -> dict[str, float]:
    """The norms of the gradients on both stages, for the same batch."""
    torch.manual_seed(0)
    x, label = rings(64)
    with gw.context() as ctx:
        gw.backward(ctx, [cross_entropy(forward(first, second, x, parts), label)])
        return {
            s.owner_name(): gw.rpc_sync(s.owner(), norm, (ctx,))
            for s in (first, second)
        }


def norm(ctx: int) -> float:
    return sum(g.double().square().sum().item() for g in gw.get_gradients(ctx).values())


def main() -> None:
    first, second = gw.remote("worker1", First), gw.remote("worker2", Second)
    whole, cut = (gradients(first, second, parts) for parts in (1, MICRO_BATCHES))
    worst = max(abs(whole[name] / cut[name] - 1) for name in whole)
    print(
        f"gradients of one batch and of {MICRO_BATCHES} micro-batches: within {worst:.0e}"
    )

    stages = [gw.RemoteModule.from_module_rref(rref) for rref in (first, second)]
    parameters = [p for stage in stages for p in stage.remote_parameters()]
    optimizer = gw.DistributedOptimizer(torch.optim.Adam, parameters, lr=0.01)
    for step in range(61):
        x, label = rings(256)
        with gw.context() as ctx:
            answer = forward(first, second, x, MICRO_BATCHES)
            loss = cross_entropy(answer, label)
            gw.backward(ctx, [loss])
            optimizer.step(ctx)
        if step % 20 == 0:
            right = (answer.argmax(1) == label).float().mean()
            print(f"step {step}: loss {loss:.4f}, {right:.0%} right")


if __name__ == "__main__":
    with gw.init_rpc() as worker:
        if worker.id == 0:
            main()
