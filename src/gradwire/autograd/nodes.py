"""The nodes of the autograd graph where tensors leave a worker and arrive at one.

A *send* stands at the end of the sender's graph: a node over exactly the tensors that left. Its
own output is an empty tensor that nobody sees; a pass calls the engine with it, and the node's
backward asks the run under way (`engine.py`) for the gradients that came back.

A *recv* stands at the beginning of the receiver's graph: one node that made all the tensors that
arrived together. Its backward hands their gradients to the run. The tensors are put into the graph
where they are: same objects, same memory. A leaf that all recvs have as their input makes them
differentiable, and is what the engine is asked to reach so that it runs them.

The names of the nodes are those of PyTorch's, which people know from graphs and profiles. A node
knows its `Crossing`, which knows nothing of the node: no cycles, so a graph goes when its context
does.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import get_gradient_edge

from . import hooks

Gradients = tuple[Tensor | None, ...]

_PREFIX = "torch::distributed::autograd::"
_TOKEN = torch.zeros((), requires_grad=True)
_BLANK = torch.zeros(())

TOKEN = get_gradient_edge(_TOKEN)
"""What lies behind every recv."""


class Run(Protocol):
    """What the nodes need of a call of the engine."""

    def collect(self, send: Crossing) -> Gradients:
        """The gradients for a send; waits for them."""

    def deliver(self, recv: Crossing, gradients: Gradients) -> None:
        """The gradients of a recv."""


class _Here(threading.local):
    """The runs under way in this thread, innermost last."""

    def __init__(self) -> None:
        self.runs: list[Run | None] = []


here = _Here()


class Crossing:
    """One message's tensors that require grad, at one of its ends."""

    __slots__ = ("context", "count", "id", "is_hooked", "runs", "worker")

    def __init__(self, number: int, worker: int, context: int, count: int) -> None:
        self.id = number
        self.worker = worker
        """The one at the other end."""
        self.context = context
        self.count = count
        self.runs: list[Run] = []
        """Those under way that pass through here: one, unless passes overlap."""
        self.is_hooked = False
        """Users have put hooks on the node."""

    def __repr__(self) -> str:
        return f"<Crossing {self.id}: {self.count} tensors, worker {self.worker}>"

    def run(self) -> Run:
        """The run that a node of ours is executed by.

        With overlapping passes it is the one of this thread; a device's thread has none.
        """
        if len(self.runs) == 1:
            return self.runs[0]
        run = here.runs[-1] if here.runs else None
        if run is not None and run in self.runs:
            return run
        raise RuntimeError(
            f"the node of {self!r} can only be run by a distributed backward pass"
        )


class Send(NamedTuple):
    """Tensors that left."""

    crossing: Crossing
    output: Tensor
    """Where the engine starts."""

    @property
    def node(self) -> Any:
        return self.output.grad_fn


class Recv(NamedTuple):
    """Tensors that arrived."""

    crossing: Crossing
    node: Any


def make_send(crossing: Crossing, tensors: Sequence[Tensor]) -> Send:
    """A send of these tensors, which all require grad."""
    if torch.is_grad_enabled():
        return Send(crossing, _apply_send(crossing, *tensors))
    with torch.enable_grad():
        return Send(crossing, _apply_send(crossing, *tensors))


def make_recv(crossing: Crossing, tensors: Sequence[Tensor]) -> Recv:
    """A recv of these tensors, which become part of the graph in place."""
    for tensor in tensors:
        if tensor.requires_grad:
            tensor.requires_grad_(False)  # it would stay a leaf
    if torch.is_grad_enabled():
        _apply_recv(_TOKEN, crossing, tuple(tensors))
    else:
        with torch.enable_grad():
            _apply_recv(_TOKEN, crossing, tuple(tensors))
    return Recv(crossing, tensors[0].grad_fn)


def _send_forward(ctx: Any, crossing: Crossing, *tensors: Tensor) -> Tensor:
    ctx.crossing = crossing
    return _BLANK.detach()  # a new one each time, made in the quickest way


def _send_backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
    crossing = ctx.crossing
    return None, *crossing.run().collect(crossing)


def _recv_forward(ctx: Any, token: Tensor, crossing: Crossing, tensors: Any) -> Any:
    ctx.crossing = crossing
    ctx.set_materialize_grads(False)
    return tensors[0] if len(tensors) == 1 else tensors


def _recv_backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None]:
    crossing = ctx.crossing
    crossing.run().deliver(crossing, gradients)
    return None, None, None


def _function(name: str, forward: Any, backward: Any) -> Any:
    """How to apply a `Function`; the name of its nodes is this and `Backward`.

    It is applied without what `Function.apply` does for transforms such as `vmap`, which takes as
    long as the rest: tensors inside of those cannot be sent.
    """
    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    function: Any = type(_PREFIX + name, (Function,), members)
    return super(Function, function).apply


_apply_send = _function("SendRpc", _send_forward, _send_backward)
_apply_recv = _function("RecvRpc", _recv_forward, _recv_backward)


def _node_types() -> tuple[type, type, type]:
    crossing = Crossing(0, 0, 0, 1)
    send, recv = make_send(crossing, [_TOKEN]), make_recv(crossing, [torch.empty(())])
    return type(send.node), type(recv.node), type(TOKEN.node)


SEND_NODE, RECV_NODE, LEAF_NODE = _node_types()
"""The types of the nodes of sends and recvs, and of those behind leaves (AccumulateGrad)."""
hooks.note(SEND_NODE)
hooks.note(RECV_NODE)
