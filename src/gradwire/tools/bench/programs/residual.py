"""A residual block over three workers: what the first layer makes is used by the second and after.

So gradients meet on the caller: it may run its part of the graph only when the second layer's are
there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..library import dist_autograd, rpc
from ..program import Program, Step, always

_weight = torch.eye(3, requires_grad=True)


def layer(x: Tensor) -> Tensor:
    return (x @ _weight).relu()


def _train(rank: int) -> Step:
    x = torch.ones(3, 3, requires_grad=True)

    def step() -> float:
        with dist_autograd.context() as context_id:
            first = rpc.rpc_sync("worker1", layer, args=(x,))
            second = rpc.rpc_sync("worker2", layer, args=(first,))
            dist_autograd.backward(context_id, [(second + first + x).sum()])
            gradient: Tensor = dist_autograd.get_gradients(context_id)[x]
        return gradient.sum().item()

    return step


PROGRAMS = [
    Program(
        name="residual model, 3 workers, forward + backward",
        goal=3,
        begin=_train,
        servers=2,
        check=always(27),
        steps=300,
        warm_up=60,
    )
]
