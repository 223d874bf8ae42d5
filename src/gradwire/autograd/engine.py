"""One call of torch's engine for one segment: the C++ engine does the work.

The engine is called with all sources of the segment at once, and asked for the gradients of the
leaves it reaches and of the token behind the recvs. The nodes of the crossings call back: a send
for its gradients, for which it may have to wait; a recv with its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from .graph import Segment
from .messages import CREATE, QUIET, RETAIN
from .nodes import TOKEN, Run, here

_SIGNAL = torch.zeros(())  # sends ignore what flows into them


class Start(NamedTuple):
    """Where a pass begins: roots, and the gradients that flow into them (None: ones)."""

    roots: Sequence[Tensor] = ()
    gradients: Sequence[Tensor | None] = ()
    wanted: Sequence[GradientEdge] = ()
    """What else to get the gradients of."""


class Job(NamedTuple):
    """What to run, from which roots, what for, and how."""

    roots: Sequence[tuple[Tensor, Tensor | None]]
    segment: Segment
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
    segment = job.segment
    leaves = () if job.flags & QUIET else segment.leaves
    inputs = [GradientEdge(node, 0) for node in leaves]
    inputs += job.wanted
    if segment.recvs:
        inputs.append(TOKEN)
    if not inputs:
        return [], []
    crossings = [*[send.crossing for send in segment.sends], *segment.recvs]
    for crossing in crossings:
        crossing.runs.append(run)
    here.runs.append(run)
    try:
        captured = torch.autograd.grad(
            [*[r for r, _ in job.roots], *[send.output for send in segment.sends]],
            inputs,
            [*[g for _, g in job.roots], *[_SIGNAL for _ in segment.sends]],
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
