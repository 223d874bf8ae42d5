"""A call that calls the next worker, which calls the next one: in a ring of three or four."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ..library import dist_autograd, rpc
from ..program import Program, Step, always


def hop(left: int, here: int, workers: int, x: Tensor) -> Tensor:
    """Go on to the next worker, `left` times more."""
    if left == 0:
        return x + x
    to = (here + 1) % workers
    result: Tensor = rpc.rpc_sync(
        f"worker{to}", hop, args=(left - 1, to, workers, x + x)
    )
    return result


def _forward(workers: int, hops: int, rank: int) -> Step:
    x = torch.ones(3, 3)
    return lambda: hop(hops, rank, workers, x).sum().item()


def _forward_and_backward(workers: int, hops: int, rank: int) -> Step:
    x = torch.ones(3, 3, requires_grad=True)

    def step() -> float:
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [hop(hops, rank, workers, x).sum()])
            gradient: Tensor = dist_autograd.get_gradients(context_id)[x]
        return gradient.sum().item()

    return step


def _programs(workers: int, hops: int) -> list[Program]:
    hop_or_hops = "hop" if hops == 1 else "hops"
    title = f"nested calls, {workers} workers, {hops} {hop_or_hops}"
    expected = always(9.0 * 2 ** (hops + 1))
    ring = f"ring of {workers}"
    servers = workers - 1
    forward = Program(
        name=f"{title}, forward",
        goal=3.5 if hops == 4 else None,
        begin=partial(_forward, workers, hops),
        servers=servers,
        check=expected,
        steps=500 // hops,
        warm_up=100 // hops,
        group=ring,
    )
    both = Program(
        name=f"{title}, forward + backward",
        goal=3 if hops == 4 else None,
        begin=partial(_forward_and_backward, workers, hops),
        servers=servers,
        check=expected,
        steps=300 // hops,
        warm_up=60 // hops,
        group=ring,
    )
    return [forward, both]


PROGRAMS = [p for n in (3, 4) for hops in range(1, 5) for p in _programs(n, hops)]
