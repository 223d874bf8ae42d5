"""A parameter server and two trainers that take turns by a lock on the server."""

import threading

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from programs import start, tell
from torch import nn, optim
from torch.distributed.optim import DistributedOptimizer


class Server:
    """Has the model; its parameters are optimized where they are."""

    def __init__(self) -> None:
        torch.manual_seed(7)
        self.model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
        self.turn = threading.Condition()
        self.next = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)

    def parameters(self) -> list[rpc.RRef]:
        return [rpc.RRef(parameter) for parameter in self.model.parameters()]

    def wait_for_turn(self, number: int) -> None:
        with self.turn:
            self.turn.wait_for(lambda: self.next == number)

    def done(self) -> None:
        with self.turn:
            self.next += 1
            self.turn.notify_all()


_server: list[Server] = []
_making = threading.Lock()


def get_server() -> rpc.RRef:
    with _making:
        if not _server:
            _server.append(Server())
    return rpc.RRef(_server[0])


def train(rank: int, trainers: int) -> list[float]:
    server = rpc.rpc_sync("server", get_server)
    optimizer = DistributedOptimizer(
        optim.Adagrad, server.rpc_sync().parameters(), lr=0.05
    )
    losses = []
    for step in range(3):
        server.rpc_sync().wait_for_turn(step * trainers + rank - 1)
        x, target = torch.randn(5, 4), torch.tensor([0, 1, 0, 1, 0])
        with dist_autograd.context() as context_id:
            output = server.rpc_async().forward(x).wait()
            loss = nn.functional.cross_entropy(output, target)
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        server.rpc_sync().done()
        losses.append(loss.item())
    return losses


def main(rank: int) -> None:
    name = f"trainer{rank}" if rank else "server"
    rpc.init_rpc(name, rank=rank, world_size=4)
    if rank == 3:  # the master, which only waits
        futures = [rpc.rpc_async(f"trainer{n}", train, args=(n, 2)) for n in (1, 2)]
        for losses in torch.futures.wait_all(futures):
            for loss in losses:
                tell(loss)
    rpc.shutdown()


if __name__ == "__main__":
    start(main, 4)
