"""A recurrent network: embedding and decoder on another worker, the recurrence here."""

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from programs import start, tell
from torch import nn, optim
from torch.distributed.optim import DistributedOptimizer

WORDS, WIDTH, HIDDEN = 11, 6, 8


def set_all(module: nn.Module, frequency: float) -> None:
    """Not at random: both modules are made at the same time, by threads of one process."""
    with torch.no_grad():
        for parameter in module.parameters():
            numbers = torch.arange(parameter.numel(), dtype=torch.float32)
            parameter.copy_(torch.sin(frequency * numbers).reshape(parameter.shape))


class Embedding(nn.Module):
    """Words as vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        set_all(self, 1.0)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.table(words)


class Decoder(nn.Module):
    """Hidden states as words."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, WORDS)
        set_all(self, 2.0)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.linear(states)


def parameter_rrefs(module: rpc.RRef) -> list[rpc.RRef]:
    return [rpc.RRef(parameter) for parameter in module.local_value().parameters()]


class Model(nn.Module):
    """The three parts."""

    def __init__(self, server: str) -> None:
        super().__init__()
        self.embedding = rpc.remote(server, Embedding)
        self.recurrence = nn.LSTM(WIDTH, HIDDEN)
        self.decoder = rpc.remote(server, Decoder)

    def forward(
        self, words: torch.Tensor, hidden: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        vectors = self.embedding.rpc_sync().forward(words)
        states, hidden = self.recurrence(vectors, hidden)
        return self.decoder.rpc_sync().forward(states), hidden

    def all_parameters(self) -> list[rpc.RRef]:
        remote = [
            rpc.rpc_sync(part.owner(), parameter_rrefs, args=(part,))
            for part in (self.embedding, self.decoder)
        ]
        local = [rpc.RRef(parameter) for parameter in self.recurrence.parameters()]
        return remote[0] + local + remote[1]


def train() -> None:
    model = Model("server")
    optimizer = DistributedOptimizer(optim.SGD, model.all_parameters(), lr=0.5)
    hidden = (torch.zeros(1, 2, HIDDEN), torch.zeros(1, 2, HIDDEN))
    for _ in range(5):
        words = torch.randint(WORDS, (7, 2))
        hidden = tuple(part.detach() for part in hidden)
        with dist_autograd.context() as context_id:
            output, hidden = model(words[:-1], hidden)
            flat = output.reshape(-1, WORDS)
            loss = nn.functional.cross_entropy(flat, words[1:].reshape(-1))
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        tell(loss)


def main(rank: int) -> None:
    rpc.init_rpc("server" if rank else "trainer", rank=rank, world_size=2)
    if rank == 0:
        train()
    rpc.shutdown()


if __name__ == "__main__":
    start(main, 2)
