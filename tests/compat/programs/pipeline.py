"""Two stages on two workers; a batch goes through in micro-batches, all at the same time."""

import threading

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from programs import start, tell
from torch import nn, optim
from torch.distributed.optim import DistributedOptimizer


class Stage(nn.Module):
    """Half of the model; gets and gives references, so that nothing passes by the master."""

    def __init__(self, seed: int, width: int, out: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.lock = threading.Lock()
        self.layers = nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, out))

    def forward(self, x_rref: rpc.RRef) -> torch.Tensor:
        x = x_rref.to_here()
        with self.lock:
            return self.layers(x)

    def parameter_rrefs(self) -> list[rpc.RRef]:
        return [rpc.RRef(parameter) for parameter in self.parameters()]


class Pipeline(nn.Module):
    """Both halves."""

    def __init__(self, split: int) -> None:
        super().__init__()
        self.split = split
        self.first = rpc.remote("worker1", Stage, args=(1, 5, 6))
        self.second = rpc.remote("worker2", Stage, args=(2, 6, 3))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        futures = []
        for part in batch.split(self.split):
            x = rpc.RRef(part)
            y = self.first.remote().forward(x)
            futures.append(self.second.rpc_async().forward(y))
        return torch.cat(torch.futures.wait_all(futures))

    def parameter_rrefs(self) -> list[rpc.RRef]:
        return (
            self.first.remote().parameter_rrefs().to_here()
            + self.second.remote().parameter_rrefs().to_here()
        )


def train() -> None:
    model = Pipeline(split=2)
    optimizer = DistributedOptimizer(optim.SGD, model.parameter_rrefs(), lr=0.05)
    for _ in range(4):
        batch, target = torch.randn(6, 5), torch.randn(6, 3)
        with dist_autograd.context() as context_id:
            loss = nn.functional.mse_loss(model(batch), target)
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        tell(loss)


def main(rank: int) -> None:
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=32)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=3, rpc_backend_options=options)
    if rank == 0:
        train()
    rpc.shutdown()


if __name__ == "__main__":
    start(main, 3)
