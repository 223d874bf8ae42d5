"""Split learning: two parties train one model without sharing their data.

    gradwire launch -n 2 examples/split_learning.py

The data owner (worker0) has the inputs and the lower half of the model, the label owner (worker1)
the labels and the upper half. Activations go up, gradients come down. With `allow`, each party runs
only the functions that it lists for the other, and accepts only tensors and plain data.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import gradwire as gw

SAMPLES = 400


class LabelOwner:
    """What stays on worker1."""

    def __init__(self) -> None:
        torch.manual_seed(2)
        self.labels = (
            secret_inputs().prod(1) > 0
        ).long()  # stands for a file of its own
        self.top = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))
        self.optimizer = torch.optim.Adam(self.top.parameters(), lr=0.02)


def secret_inputs() -> Tensor:
    return torch.randn(SAMPLES, 2, generator=torch.Generator().manual_seed(0))


label_owner: LabelOwner


def score(samples: Tensor, activations: Tensor) -> tuple[Tensor, float]:
    """The loss of some samples, of which the label owner sees only this."""
    answers = label_owner.top(activations)
    labels = label_owner.labels[samples]
    right = (answers.argmax(1) == labels).double().mean().item()
    return cross_entropy(answers, labels), right


def update() -> None:
    """Use the gradients that the backward pass has left."""
    label_owner.optimizer.step()
    label_owner.optimizer.zero_grad()


def train() -> None:
    """What the data owner does; its inputs never leave."""
    torch.manual_seed(1)
    inputs = secret_inputs()
    bottom = nn.Sequential(nn.Linear(2, 16), nn.ReLU())
    optimizer = torch.optim.Adam(bottom.parameters(), lr=0.02)
    for epoch in range(31):
        for samples in torch.randperm(SAMPLES).split(100):
            with gw.context() as ctx:
                activations = bottom(inputs[samples])
                loss, right = gw.rpc_sync("worker1", score, args=(samples, activations))
                gw.backward(ctx, [loss], accumulate=True)  # fills .grad on both sides
            optimizer.step()
            optimizer.zero_grad()
            gw.rpc_sync("worker1", update)
        if epoch % 10 == 0:
            print(f"epoch {epoch}: loss {loss:.3f}, {right:.0%} right")
    try:
        gw.rpc_sync("worker1", torch.save, args=(inputs[:1], "/tmp/anything"))
    except gw.NotAllowedError:
        print("worker1 runs nothing else for us")


def main() -> None:
    global label_owner
    with gw.init_rpc(allow=[score, update]) as worker:
        if worker.id == 1:
            label_owner = LabelOwner()
        gw.barrier()
        if worker.id == 0:
            train()


if __name__ == "__main__":
    main()
