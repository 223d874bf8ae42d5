"""A remote embedding table: large, on one worker, used by others a few rows at a time.

    gradwire launch -n 3 examples/embedding.py

The table is on worker0. Two trainers look up words and get their rows; the gradients that flow back
are sparse, so a step updates only the rows that were used.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import gradwire as gw

WORDS, WIDTH = 50_000, 32
STEPS = 80


class Table(nn.EmbeddingBag):
    """The mean of the rows of the words of a text."""

    def __init__(self) -> None:
        super().__init__(WORDS, WIDTH, mode="mean", sparse=True)
        self.before = self.weight.detach().clone()

    def rows_changed(self) -> int:
        return int((self.weight != self.before).any(1).sum())


def texts(count: int, chance: torch.Generator) -> tuple[Tensor, Tensor]:
    """Texts of ten words out of the first 200; cheerful if the smaller half outweighs."""
    words = torch.randint(0, 200, (count, 10), generator=chance)
    return words, ((words < 100).sum(1) > 5).float()


def train(table: gw.RemoteModule, seed: int) -> tuple[float, float, bool]:
    """Runs on a trainer: first and last loss, and whether the table's gradient was sparse."""
    chance = torch.Generator().manual_seed(seed)
    judge = nn.Linear(WIDTH, 1)
    places = [*table.remote_parameters(), *map(gw.RRef, judge.parameters())]
    optimizer = gw.DistributedOptimizer(torch.optim.SGD, places, lr=4.0)
    losses = []
    for _ in range(STEPS):
        words, cheerful = texts(128, chance)
        with gw.context() as ctx:
            answers = judge(table(words)).squeeze(1)
            loss = binary_cross_entropy_with_logits(answers, cheerful)
            gw.backward(ctx, [loss])
            is_sparse = gw.rpc_sync("worker0", has_sparse_gradient, args=(ctx,))
            optimizer.step(ctx)
        losses.append(loss.item())
    return losses[0], losses[-1], is_sparse


def has_sparse_gradient(ctx: int) -> bool:
    return any(gradient.is_sparse for gradient in gw.get_gradients(ctx).values())


def main() -> None:
    table = gw.RemoteModule("worker0", Table)
    trainers = [
        gw.rpc_async(f"worker{rank}", train, args=(table, rank), timeout=0)
        for rank in (1, 2)
    ]
    for rank, trainer in enumerate(trainers, 1):
        first, last, is_sparse = trainer.wait()
        kind = "sparse" if is_sparse else "dense"
        print(f"worker{rank}: loss {first:.3f} to {last:.3f}, {kind} gradients")
    changed = table.get_module_rref().local_value().rows_changed()
    print(f"{changed} of {WORDS} rows changed")
    received = gw.rpc.statistics()["bytes_received"] / (2 * STEPS)
    full = WORDS * WIDTH * 4
    print(f"a step brought {received / 1e3:.0f} KB; the table has {full / 1e3:.0f} KB")


if __name__ == "__main__":
    with gw.init_rpc() as worker:
        if worker.id == 0:
            main()
