"""Sampling a graph that is partitioned over workers, for a graph neural network.

    gradwire launch -n 3 examples/graph_sampling.py

Even nodes belong to worker1, odd ones to worker2: each has their edges, their features and its own
part of the model. worker0 trains. For each batch it asks the owners for some neighbours of its
nodes, then for the encoded features of all of them; gradients flow back to the owners' parts.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

import gradwire as gw

NODES, CLASSES, DEGREE = 4000, 4, 20
SAMPLED, WIDTH = 8, 16
OWNERS = ("worker1", "worker2")


def class_of(nodes: Tensor) -> Tensor:
    return nodes // 2 % CLASSES


class Part(nn.Module):
    """What an owner has. Its nodes are weakly like their class; their neighbours tell more."""

    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        nodes = torch.arange(number, NODES, 2)
        likeness = one_hot(class_of(nodes), CLASSES).float()
        self.features = likeness + torch.randn(len(nodes), CLASSES)
        same = torch.randint(0, NODES // 8, (len(nodes), DEGREE)) * 8
        same += 2 * class_of(nodes).unsqueeze(1) + torch.randint(0, 2, same.shape)
        any_node = torch.randint(0, NODES, same.shape)
        self.neighbours = torch.where(torch.rand(same.shape) < 0.8, same, any_node)
        self.encoder = nn.Sequential(nn.Linear(CLASSES, WIDTH), nn.Tanh())

    def sample(self, nodes: Tensor) -> Tensor:
        """Some neighbours of each of these nodes, which are mine."""
        chosen = torch.randint(0, DEGREE, (len(nodes), SAMPLED))
        return self.neighbours[nodes // 2].gather(1, chosen)

    def encode(self, nodes: Tensor) -> Tensor:
        return self.encoder(self.features[nodes // 2])

    def parameter_references(self) -> list[gw.RRef]:
        return [gw.RRef(parameter) for parameter in self.parameters()]


def ask(parts: list[gw.RRef], method: str, nodes: Tensor) -> Tensor:
    """Ask each owner about its own of these nodes, all at once; one row for each node."""
    places = [(nodes % 2 == i).nonzero().squeeze(1) for i in range(len(parts))]
    asked = [
        getattr(part.rpc_async(), method)(nodes[place])
        for part, place in zip(parts, places, strict=True)
    ]
    rows = torch.cat([future.wait() for future in asked])
    return rows[torch.cat(places).argsort()]


def predict(parts: list[gw.RRef], head: nn.Module, nodes: Tensor) -> Tensor:
    near = ask(parts, "sample", nodes)
    around = ask(parts, "encode", near.flatten()).view(len(nodes), SAMPLED, WIDTH)
    return head(torch.cat([ask(parts, "encode", nodes), around.mean(1)], 1))


def main() -> None:
    torch.manual_seed(0)
    parts = [gw.remote(owner, Part, args=(i,)) for i, owner in enumerate(OWNERS)]
    head = nn.Linear(2 * WIDTH, CLASSES)
    places = [gw.RRef(parameter) for parameter in head.parameters()]
    for part in parts:
        places += part.rpc_sync().parameter_references()
    optimizer = gw.DistributedOptimizer(torch.optim.Adam, places, lr=0.02)
    for step in range(61):
        nodes = torch.randint(0, NODES, (128,))
        with gw.context() as ctx:
            scores = predict(parts, head, nodes)
            loss = cross_entropy(scores, class_of(nodes))
            gw.backward(ctx, [loss])
            optimizer.step(ctx)
        if step % 20 == 0:
            right = (scores.argmax(1) == class_of(nodes)).float().mean()
            print(f"step {step}: loss {loss:.2f}, {right:.0%} right")


if __name__ == "__main__":
    with gw.init_rpc() as worker:
        if worker.id == 0:
            main()
