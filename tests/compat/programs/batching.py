"""A server that gathers the gradients of all trainers, and answers them together."""

import threading

import torch
import torch.distributed.rpc as rpc
from programs import start, tell
from torch import nn, optim

TRAINERS = 3


class BatchServer:
    """Updates the model when every trainer has sent its gradients."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model = nn.Linear(5, 1)
        self.optimizer = optim.SGD(self.model.parameters(), lr=0.2, momentum=0.9)
        self.lock = threading.Lock()
        self.waiting: dict[int, list[torch.Tensor]] = {}
        self.update = torch.futures.Future()

    def get_model(self) -> nn.Module:
        return self.model

    @staticmethod
    @rpc.functions.async_execution
    def update_and_fetch(
        server: rpc.RRef, trainer: int, gradients: list[torch.Tensor]
    ) -> torch.futures.Future:
        self = server.local_value()
        with self.lock:
            self.waiting[trainer] = gradients
            update = self.update
            if len(self.waiting) == TRAINERS:
                for position, parameter in enumerate(self.model.parameters()):
                    given = [self.waiting[n][position] for n in sorted(self.waiting)]
                    parameter.grad = torch.stack(given).mean(0)
                self.optimizer.step()
                self.waiting, self.update = {}, torch.futures.Future()
                update.set_result(self.model)
        return update


def train(server: rpc.RRef, trainer: int) -> list[float]:
    model = server.rpc_sync().get_model()
    generator = torch.Generator().manual_seed(trainer)
    losses = []
    for _ in range(4):
        x = torch.randn(6, 5, generator=generator)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        model = rpc.rpc_sync(
            server.owner(),
            BatchServer.update_and_fetch,
            args=(server, trainer, list(gradients)),
        )
        losses.append(loss.item())
    return losses


def main(rank: int) -> None:
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=TRAINERS + 1)
    if rank == 0:
        server = rpc.RRef(BatchServer())
        futures = [
            rpc.rpc_async(f"worker{n}", train, args=(server, n))
            for n in range(1, TRAINERS + 1)
        ]
        for future in futures:
            for loss in future.wait():
                tell(loss)
    rpc.shutdown()


if __name__ == "__main__":
    start(main, TRAINERS + 1)
