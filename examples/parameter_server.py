"""Parameter server: one model, used and updated by several trainers at the same time.

    gradwire launch -n 4 examples/parameter_server.py

worker0 has the model. Each trainer has its own data, its own context for every step, and an
optimizer that updates the parameters on worker0. Trainers do not wait for each other.
"""

import torch
from torch import nn
from torch.nn.functional import mse_loss

import gradwire as gw

TRUTH = torch.tensor([[1.0, -2.0, 3.0, 0.5]])
"""What the model should find out."""

STEPS = 100


def train(model: gw.RemoteModule, seed: int) -> float:
    """Runs on a trainer; its last loss."""
    chance = torch.Generator().manual_seed(seed)
    optimizer = gw.DistributedOptimizer(
        torch.optim.SGD, model.remote_parameters(), lr=0.02
    )
    for _ in range(STEPS):
        x = torch.randn(32, 4, generator=chance)
        with gw.context() as ctx:
            loss = mse_loss(model(x), x @ TRUTH.T)
            gw.backward(ctx, [loss])
            optimizer.step(ctx)
    return loss.item()


def main() -> None:
    trainers = [info.name for info in gw.get_worker_infos() if info.name != "worker0"]
    model = gw.RemoteModule("worker0", nn.Linear, args=(4, 1))
    losses = [
        gw.rpc_async(trainer, train, args=(model, seed), timeout=0)
        for seed, trainer in enumerate(trainers)
    ]
    for trainer, loss in zip(trainers, losses, strict=True):
        print(f"{trainer}: {STEPS} steps, last loss {loss.wait():.6f}")
    found = model.get_module_rref().local_value().weight.detach()
    print("weights", [round(w, 2) for w in found[0].tolist()])
    print(f"off by at most {(found - TRUTH).abs().max():.4f}")


if __name__ == "__main__":
    with gw.init_rpc() as worker:
        if worker.id == 0:
            main()
