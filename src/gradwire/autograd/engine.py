"""One call of torch's engine for one segment: the C++ engine does the work.

The engine is called with all sources of the segment at once, and asked for the gradients of the
leaves it reaches and of the token behind the recvs. The nodes of the crossings call back: a send
for its gradients, for which it may have to wait; a recv with its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from .messages import CREATE, QUIET, RETAIN
from .nodes import TOKEN, Crossing, Run, Send, here

_SIGNAL = torch.zeros(())  # sends ignore what flows into them


class Start(NamedTuple):
    """Where a pass begins: roots, and the gradients that flow into them (None: ones)."""

    roots: Sequence[Tensor] = ()
    gradients: Sequence[Tensor | None] = ()
    wanted: Sequence[GradientEdge] = ()
    """What else to get the gradients of."""


class Job(NamedTuple):
    """What to run: where to start, what is reached, and how."""

    roots: Sequence[tuple[Tensor, Tensor | None]]
    sends: Sequence[Send]
    recvs: Sequence[Crossing]
    leaves: Sequence[Any]
    wanted: Sequence[GradientEdge]
    flags: int


def is_inside() -> bool:
    """Whether this thread is inside a call of the engine that was made here."""
    return bool(here.runs)


def execute(job: Job, run: Run) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """The gradients of the leaves, and those of what was wanted.

    Raises:
        Exception: whatever a node's backward raises.
    """
    leaves = () if job.flags & QUIET else job.leaves
    inputs = [GradientEdge(node, 0) for node in leaves]
    inputs += job.wanted
    if job.recvs:
        inputs.append(TOKEN)
    if not inputs:
        return [], []
    crossings = [*(send.crossing for send in job.sends), *job.recvs]
    for crossing in crossings:
        crossing.runs.append(run)
    here.runs.append(run)
    try:
        captured = torch.autograd.grad(
            [*(root for root, _ in job.roots), *(send.output for send in job.sends)],
            inputs,
            [*(grad for _, grad in job.roots), *(_SIGNAL for _ in job.sends)],
            retain_graph=bool(job.flags & (RETAIN | CREATE)),
            create_graph=bool(job.flags & CREATE),
            allow_unused=True,
        )
    finally:
        here.runs.pop()
        for crossing in crossings:
            crossing.runs.remove(run)
    count = len(leaves)
    return list(captured[:count]), list(captured[count : count + len(job.wanted)])
