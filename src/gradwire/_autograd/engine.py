"""One call of torch's engine for one segment: the C++ engine does the work.

The engine is called with all sources of the segment at once, for the gradients of the leaves it
reaches. The nodes of crossings call back: a send for its gradients, for which it may have to wait;
a recv with its own. To run recvs, the engine is asked to reach the token behind them. Where
possible, this is cut short: if the gradients of all sends have arrived, the engine starts with them
behind the sends; and of a small graph it is asked for the gradients of the recvs. Then no Python
runs inside, except the user's own.

`Variable._execution_engine.run_backward` is what `torch.autograd.grad` calls after checking its
arguments, which takes longer than running a small graph. If it is removed, that takes its place.
The same holds for `_profiler_enabled`: without it, every pass would pay for being recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from . import device_queues
from .messages import CREATE, RETAIN
from .nodes import TOKEN, Crossing, Gradients, Run, Send, here

_SMALL = 200  # nodes of a graph that takes negligible time to run
_SIGNAL = torch.zeros(())  # sends ignore what flows into them
_KEEPS_GRAPH = RETAIN | CREATE
_edge: Callable[[tuple[Any, int]], GradientEdge] = partial(tuple.__new__, GradientEdge)
"""Makes one in a third of the time."""
_run_backward: Callable[..., Gradients] = (
    torch.autograd.Variable._execution_engine.run_backward
)


class Job(NamedTuple):
    """What to run: from where, for which gradients, and how."""

    roots: Sequence[tuple[Tensor, Tensor | None]]
    """Roots, and the gradients that flow into them; None: ones."""
    sends: Sequence[Send]
    given: dict[int, Sequence[Tensor | None]] | None
    """The gradients of the sends; None: they are to be asked for. Emptied when used."""
    size: int
    """How many nodes are run."""
    leaves: Sequence[Any]
    """The nodes behind these."""
    wanted: Sequence[GradientEdge]
    recvs: Collection[Any]
    """Their nodes."""
    flags: int


Found = tuple[list["Tensor | None"], Gradients, list[tuple[Crossing, Gradients]]]
"""The gradients of the leaves, of what was wanted, and of recvs that did not call back."""

is_profiled: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]


def execute(job: Job, run: Run) -> Found:
    """Call the engine.

    Raises:
        Exception: whatever a node's backward raises.
    """
    inputs = [_edge((node, 0)) for node in job.leaves]
    inputs += job.wanted
    nodes: list[Crossing] = []
    ends: Collection[Any] = ()
    if job.given is None or job.size > _SMALL:  # then gradients are sent before it ends
        nodes += [node.crossing for node in job.recvs]
        if nodes:
            inputs.append(TOKEN)
        if job.given is None:
            nodes += [send.crossing for send in job.sends]
    else:
        ends = job.recvs
        for node in ends:
            inputs += [_edge((node, i)) for i in range(node.crossing.count)]
    if not inputs:
        return [], (), []
    captured = _call(job, tuple(inputs), nodes, run)
    at = len(job.leaves)
    leaves = [*captured[:at]]
    wanted = captured[at : at + len(job.wanted)]
    at += len(job.wanted)
    found = []
    for node in ends:
        end = at + node.crossing.count
        found.append((node.crossing, captured[at:end]))
        at = end
    return leaves, wanted, found


def accumulate(job: Job, run: Run) -> None:
    """Call the engine as an ordinary backward would: it fills `.grad`.

    Raises:
        Exception: whatever a node's backward raises.
    """
    nodes = [node.crossing for node in job.recvs]
    nodes += [send.crossing for send in job.sends]
    assert job.given is None
    _call(job, (), nodes, run)


def _call(
    job: Job, inputs: tuple[GradientEdge, ...], nodes: Sequence[Crossing], run: Run
) -> Gradients:
    """What the engine returns for the inputs. No inputs: all leaves, to be accumulated.

    `nodes`: those that call back.
    """
    outputs, given = _sources(job)
    for crossing in nodes:
        crossing.runs.append(run)
    runs = here.runs
    runs.append(run)
    try:
        return _run_backward(
            tuple(outputs),
            given,
            job.flags & _KEEPS_GRAPH,
            job.flags & CREATE,
            inputs,
            True,  # some may not be reached
            not inputs,  # to be accumulated then
        )
    finally:
        runs.pop()
        for crossing in nodes:
            crossing.runs.remove(run)


def _sources(job: Job) -> tuple[list[Any], tuple[Tensor, ...]]:
    """Where the engine starts, and with which gradients. They are not shared."""
    outputs: list[Any] = []
    gradients: list[Tensor] = []
    for root, given in job.roots:
        outputs.append(root)
        gradients.append(torch.ones_like(root) if given is None else given)
    if job.given is None:
        return _sends(job, outputs, gradients)
    for send in job.sends:
        came = job.given.pop(send.crossing.id)  # a reference to it would force a copy
        for edge, gradient in zip(send.edges, came, strict=True):
            if gradient is not None:
                outputs.append(_edge(edge))
                gradients.append(gradient)
    return outputs, tuple(gradients)


def _sends(
    job: Job, outputs: list[Any], gradients: list[Tensor]
) -> tuple[list[Any], tuple[Tensor, ...]]:
    """The same, from the nodes of sends, which ask for their gradients."""
    for send in job.sends:
        send.keep_ends()
    starts = [send.output for send in job.sends]
    if device_queues.are_needed() and len(starts) + len(job.roots) > 1:
        nodes = [root.grad_fn for root, _ in job.roots]
        starts = device_queues.put_before(job.sends, nodes)
    return [*outputs, *starts], (*gradients, *[_SIGNAL for _ in starts])
