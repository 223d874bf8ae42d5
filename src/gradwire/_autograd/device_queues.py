"""Gates before the sends that wait, where a graph has nodes on devices too.

A send that waits must be entered only when nothing else can be run (`segments.py`). For nodes on
the CPU their numbers see to that: all are run by one thread, which takes the highest first. Nodes
on a device are run by a thread of torch's own for that device. While they are, the CPU's thread may
find nothing but a send, enter it, and be asleep when the device hands nodes back to the CPU: say
that of a recv, whose gradients the other workers need before they can send any here.

So, before each such send, a signal goes round: to the queue of every device and back to the CPU's,
through nodes that are the last in each. When one comes out of a queue, all that was in it has been
run. Every time that a gradient can go from one queue to another costs a round more. Only then the
send is entered; and the next signal, for the send before, is sent when it has returned.
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
    """What to start from instead of sends, given from the oldest to the newest on.

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
    """Passes the signal on."""

    @staticmethod
    def forward(ctx: Any, device: torch.device, *below: Tensor) -> Tensor:
        ctx.below = [tensor.device for tensor in below]
        ctx.set_materialize_grads(False)
        return torch.empty((), device=device)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        return None, *[torch.zeros((), device=device) for device in ctx.below]


_apply: Any = _Hop.apply
