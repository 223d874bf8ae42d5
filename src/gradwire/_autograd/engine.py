"""One call of torch's engine for one segment: the C++ engine does the work.

The engine is called with all sources of the segment at once, and asked for the gradients of the
leaves it reaches. The nodes of the crossings call back: a send for its gradients, for which it may
have to wait; a recv with its own. For that the engine is asked to reach the token behind the recvs.
Where it can be, this is cut short: if the gradients of all sends are there, the engine starts with
these behind the sends; if all recvs come last anyway, it is asked for their gradients. Then no
Python is run inside, but what users have put there.

`Variable._execution_engine.run_backward` is what `torch.autograd.grad` calls once it has looked at
its arguments, which takes longer than running a small graph does. If it goes away, that takes its
place. So with `_profiler_enabled`: without it, every pass would pay for being recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from . import device_queues
from .graph import Segment
from .messages import CREATE, QUIET, RETAIN
from .nodes import TOKEN, Crossing, Gradients, Run, here
from .torch_modes import is_watched

_USUAL = torch.float32
_ahead: list[Tensor] = []  # gradients of roots to come, each for one
_SIGNAL = torch.zeros(())  # sends ignore what flows into them
_KEEPS_GRAPH = RETAIN | CREATE
_run_backward: Callable[..., Gradients] = (
    torch.autograd.Variable._execution_engine.run_backward
)


class Start(NamedTuple):
    """Where a pass begins: roots, and the gradients that flow into them (None: ones)."""

    roots: Sequence[Tensor] = ()
    gradients: Sequence[Tensor | None] = ()
    wanted: Sequence[GradientEdge] = ()
    """What else to get the gradients of."""
    parked: Collection[int] = ()
    """Workers that have something to go on with, because the pass was begun before."""


class Job(NamedTuple):
    """What to run, from which roots, what for, and how."""

    roots: Sequence[tuple[Tensor, Tensor | None]]
    segment: Segment
    wanted: Sequence[GradientEdge]
    flags: int
    given: dict[int, Gradients] | None
    """The gradients of all sends; None: they are to be asked for. Emptied when used."""


class Found(NamedTuple):
    """The gradients of the leaves, of what was wanted, and of the last recvs."""

    leaves: list[Tensor | None]
    wanted: Sequence[Tensor | None] = ()
    recvs: Sequence[tuple[Crossing, Gradients]] = ()


def ones_for(root: Tensor) -> Tensor:
    """The gradient of a root with respect to itself."""
    is_usual = type(root) is Tensor and root.dtype is _USUAL and root.is_cpu
    if is_usual and not root.shape:
        try:
            return _ahead.pop()
        except IndexError:
            pass
    return torch.ones_like(root)


def make_ones_ahead() -> None:
    """Make the gradient of a usual root to come, while there is time."""
    if not _ahead and not is_watched():
        ones = torch.ones((), dtype=_USUAL, device="cpu")
        if type(ones) is Tensor:
            _ahead.append(ones)


def _ones(root: Tensor, gradient: Tensor | None) -> Tensor:
    return ones_for(root) if gradient is None else gradient


is_profiled: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]


def is_inside() -> bool:
    """Whether this thread is inside a call of the engine that was made here."""
    return bool(here.runs)


def execute(job: Job, run: Run) -> Found:
    """Call the engine.

    Raises:
        Exception: whatever a node's backward raises.
    """
    segment = job.segment
    leaves = () if job.flags & QUIET else segment.leaves
    inputs = [GradientEdge(node, 0) for node in leaves]
    inputs += job.wanted
    is_short = job.given is not None and len(segment.last) == len(segment.recvs)
    recvs = [*segment.recvs, *segment.foreign]
    ends = recvs if is_short else ()
    for node in ends:
        inputs += [GradientEdge(node, i) for i in range(node.crossing.count)]
    nodes = [] if is_short else [node.crossing for node in recvs]
    if nodes:
        inputs.append(TOKEN)
    if not inputs:
        return Found([])
    if job.given is None:
        nodes += [send.crossing for send in segment.sends]
    captured = _call(job, inputs, nodes, run)
    at = len(leaves) + len(job.wanted)
    found = []
    for node in ends:
        found.append((node.crossing, captured[at : at + node.crossing.count]))
        at += node.crossing.count
    wanted = captured[len(leaves) : len(leaves) + len(job.wanted)]
    return Found(list(captured[: len(leaves)]), wanted, found)


def accumulate(job: Job, run: Run) -> None:
    """Call the engine as an ordinary backward would: it fills `.grad`.

    Raises:
        Exception: whatever a node's backward raises.
    """
    segment = job.segment
    nodes = [node.crossing for node in (*segment.recvs, *segment.foreign)]
    nodes += [send.crossing for send in segment.sends]
    _call(job, (), nodes, run)


def _call(
    job: Job, inputs: Sequence[GradientEdge], nodes: Sequence[Crossing], run: Run
) -> Gradients:
    """`nodes`: those that will call back. No inputs: all leaves, to be accumulated."""
    outputs, gradients = _sources(job)
    for crossing in nodes:
        crossing.runs.append(run)
    try:
        return call(tuple(outputs), gradients, tuple(inputs), job.flags, run)
    finally:
        for crossing in nodes:
            crossing.runs.remove(run)


def call(
    outputs: tuple[Tensor | GradientEdge, ...],
    gradients: list[Tensor],
    inputs: tuple[GradientEdge, ...],
    flags: int,
    run: Run | None = None,
) -> Gradients:
    """What the engine finds for the inputs. Empties the list, so that it may keep what is in it.

    Raises:
        Exception: whatever a node's backward raises.
    """
    given = (*gradients,)
    gradients.clear()
    runs = here.runs
    runs.append(run)
    try:
        return _run_backward(
            outputs,
            given,
            flags & _KEEPS_GRAPH,
            flags & CREATE,
            inputs,
            True,  # some may not be reached
            not inputs,  # to be accumulated then
        )
    finally:
        runs.pop()


def _sources(job: Job) -> tuple[list[Tensor | GradientEdge], list[Tensor]]:
    outputs: list[Tensor | GradientEdge] = [root for root, _ in job.roots]
    gradients = [_ones(*root) for root in job.roots]
    if job.given is None:
        sends = job.segment.sends
        for send in sends:
            send.keep_ends()
        starts = [send.output for send in sends]
        if device_queues.are_needed() and len(sends) + len(job.roots) > 1:
            starts = device_queues.put_before(
                sends, [root.grad_fn for root, _ in job.roots]
            )
        outputs += starts
        gradients += [_SIGNAL for _ in starts]
        return outputs, gradients
    for send in job.segment.sends:
        given = job.given.pop(send.crossing.id)  # who keeps it would have it copied
        for edge, gradient in zip(send.edges, send.pick(given), strict=True):
            if gradient is not None:
                outputs.append(GradientEdge(*edge))
                gradients.append(gradient)
    return outputs, gradients
