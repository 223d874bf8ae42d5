"""The end-to-end example of the notes: two workers, one model, one optimizer for both."""

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from programs import start, tell
from torch import nn, optim
from torch.distributed.optim import DistributedOptimizer

torch.manual_seed(4)
hidden = nn.Linear(4, 8)


def first_half(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(hidden(x))


def hidden_parameters() -> list[rpc.RRef]:
    return [rpc.RRef(parameter) for parameter in hidden.parameters()]


def train() -> None:
    last = nn.Linear(8, 1)
    parameters = rpc.rpc_sync("worker1", hidden_parameters)
    parameters += [rpc.RRef(parameter) for parameter in last.parameters()]
    optimizer = DistributedOptimizer(optim.SGD, parameters, lr=0.1)
    for step in range(5):
        x = torch.arange(12.0).reshape(3, 4) / (step + 1)
        with dist_autograd.context() as context_id:
            y = rpc.rpc_sync("worker1", first_half, args=(x,))
            loss = (last(y) - 1).square().mean()
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        tell(loss)


def main(rank: int) -> None:
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    if rank == 0:
        train()
    rpc.shutdown()


if __name__ == "__main__":
    start(main, 2)
