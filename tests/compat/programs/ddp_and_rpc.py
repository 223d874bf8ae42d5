"""Two trainers with replicas of a dense part, and a table on a server that they share."""

import os

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from programs import start, tell
from torch import nn, optim
from torch.distributed.nn import RemoteModule
from torch.distributed.optim import DistributedOptimizer
from torch.nn.parallel import DistributedDataParallel

TRAINERS = 2


class Hybrid(nn.Module):
    """The table over there, the dense part here and on the other trainers."""

    def __init__(self, table: RemoteModule) -> None:
        super().__init__()
        self.table = table
        torch.manual_seed(5)
        self.dense = DistributedDataParallel(nn.Linear(4, 3))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.dense(self.table.forward(rows))


def train(table: RemoteModule, rank: int) -> list[float]:
    model = Hybrid(table)
    parameters = table.remote_parameters() + [
        rpc.RRef(parameter) for parameter in model.dense.parameters()
    ]
    optimizer = DistributedOptimizer(optim.SGD, parameters, lr=0.05)
    losses = []
    for step in range(3):
        rows = torch.tensor([step, step + 3 * rank])
        with dist_autograd.context() as context_id:
            loss = model(rows).square().sum()
            dist_autograd.backward(context_id, [loss])
            dist.barrier()  # gradients of all, before any of them is applied
            optimizer.step(context_id)
            dist.barrier()
        losses.append(loss.item())
    return losses


def main(rank: int) -> None:
    port = int(os.environ["MASTER_PORT"])
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
    name = f"trainer{rank}" if rank < TRAINERS else ["master", "server"][rank - 2]
    if rank < TRAINERS:
        path = f"file:///tmp/ddp_and_rpc_{os.getppid()}"
        dist.init_process_group("gloo", path, rank=rank, world_size=TRAINERS)
    rpc.init_rpc(name, rank=rank, world_size=4, rpc_backend_options=options)
    if name == "master":
        torch.manual_seed(9)
        table = RemoteModule(
            "server", nn.Embedding, args=(9, 4), kwargs={"_weight": w()}
        )
        futures = [
            rpc.rpc_async(f"trainer{n}", train, args=(table, n))
            for n in range(TRAINERS)
        ]
        for future in futures:
            for loss in future.wait():
                tell(loss)
    rpc.shutdown()
    if rank < TRAINERS:
        dist.destroy_process_group()


def w() -> torch.Tensor:
    return torch.linspace(-1, 1, 36).reshape(9, 4)


if __name__ == "__main__":
    start(main, 4)
