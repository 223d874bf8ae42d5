"""One call of torch's engine for one segment: the C++ engine does the work.

The engine is called with all sources of the segment at once, and asked for the gradients of the
leaves it reaches and of the token behind the recvs. The nodes of the crossings call back: a send
for its gradients, for which it may have to wait; a recv with its own.

`Variable._execution_engine.run_backward` is what `torch.autograd.grad` calls once it has looked at
its arguments, which takes longer than running a small graph does. If it goes away, that takes its
place. So with `_profiler_enabled`: without it, every pass would pay for being recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from .graph import Segment
from .messages import CREATE, QUIET, RETAIN
from .nodes import TOKEN, Run, here

_NOT_PROFILED = nullcontext()
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


def _ones(root: Tensor, gradient: Tensor | None) -> Tensor:
    return torch.ones_like(root) if gradient is None else gradient


def profiled(name: str) -> AbstractContextManager[Any]:
    """Have the profiler show a block, if it runs."""
    if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        return torch.profiler.record_function(name)
    return _NOT_PROFILED


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
        captured = torch.autograd.Variable._execution_engine.run_backward(
            (*[r for r, _ in job.roots], *[send.output for send in segment.sends]),
            (*[_ones(*root) for root in job.roots], *[_SIGNAL for _ in segment.sends]),
            bool(job.flags & (RETAIN | CREATE)),
            bool(job.flags & CREATE),
            tuple(inputs),
            allow_unreachable=True,
            accumulate_grad=False,
        )
    finally:
        here.runs.pop()
        for crossing in crossings:
            crossing.runs.remove(run)
    count = len(leaves)
    return list(captured[:count]), list(captured[count : count + len(job.wanted)])
