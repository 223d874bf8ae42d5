"""Markers before the sends that wait, where a graph also has nodes on devices.

A send that waits must be entered only when nothing else can run (`segments.py`). For nodes on the
CPU, sequence numbers ensure that: one thread runs all of them, highest first. Nodes on a device are
run by torch's own thread for that device. Meanwhile the CPU's thread may find nothing but a send,
enter it, and be blocked when the device hands nodes back to the CPU: say that of a recv, whose
gradients the other workers need before they can send any here.

So, before each such send, a marker goes round: to the queue of every device and back to the CPU's,
through nodes that are last in each. When it comes out of a queue, everything before it has run.
Every time that a gradient can pass from one queue to another adds a round. Only then is the send
entered; and the next marker, for the send before, starts when that has returned.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .node_order import set_number
from .nodes import LEAF_NODE, RECV_NODE, Send

_CPU = torch.device("cpu")


def are_needed() -> bool:
    """Whether this process has anything on devices."""
    return (
        torch.cuda.is_initialized()
        or torch.xpu.is_initialized()
        or torch.backends.mps.is_available()
    )


def put_before(sends: Sequence[Send], sources: Iterable[Any]) -> list[Tensor]:
    """What to start from instead of sends, given oldest first.

    `sources`: the nodes where the segment begins.
    """
    devices, crossings = _survey([*sources, *(send.node for send in sends)])
    if not devices:
        return [send.output for send in sends]
    top: list[Tensor] = []
    for send in sends:
        top = [_hop(_CPU, [send.output, *top])]
        for _ in range(crossings):
            for device in [*devices, _CPU]:
                top = [_hop(device, top)]
    return top


def _survey(sources: Iterable[Any]) -> tuple[list[torch.device], int]:
    """The devices of a graph, and how often its gradients go from one queue to another."""
    devices: dict[torch.device, None] = {}
    found: dict[Any, torch.device] = {}
    stack = [(source, _device(source)) for source in sources]
    crossings = 0
    while stack:
        node, device = stack.pop()
        if node in found:
            continue
        found[node] = device
        if device != _CPU:
            devices[device] = None
        if type(node) is RECV_NODE:
            continue
        for following, _ in node.next_functions:
            if following is not None and type(following) is not LEAF_NODE:
                target = found.get(following) or _device(following)
                crossings += target != device
                stack.append((following, target))
    return list(devices), crossings


def _device(node: Any) -> torch.device:
    """Which queue a node goes to: that of what it made in the forward."""
    for made in node._input_metadata:
        if made.device.type not in ("cpu", "meta"):
            device: torch.device = made.device
            return device
    return _CPU


def _hop(device: torch.device, below: list[Tensor]) -> Tensor:
    with torch.enable_grad():
        made: Tensor = _apply(device, *below)
    node: Any = made.grad_fn
    set_number(node, 0)  # no other node has that: see `Send.enter_late`
    return made


class _Hop(Function):
    """Passes the marker on."""

    @staticmethod
    def forward(ctx: Any, device: torch.device, *below: Tensor) -> Tensor:
        ctx.below = [tensor.device for tensor in below]
        ctx.set_materialize_grads(False)
        return torch.empty((), device=device)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        return None, *[torch.zeros((), device=device) for device in ctx.below]


_apply: Any = _Hop.apply
