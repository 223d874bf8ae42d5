"""The nodes of the autograd graph where tensors leave a worker and arrive at one.

A *send* is at the end of the sender's graph: a node over exactly the tensors that left. Its own
output is an empty tensor that nobody sees; a pass calls the engine with it, and the node's backward
asks the current run (`engine.py`) for the gradients that came back.

Many tensors that are sent are leaves. The node of a send of leaves does not depend on when it is
created, because a leaf stays one however its values change: it is created on demand. Tensors with
a history may be modified in place, and are then elsewhere in the graph: their node is created at
once.

A *recv* is at the beginning of the receiver's graph: one node that is the `grad_fn` of all the
tensors that arrived together. Its backward hands their gradients to the run. The tensors are put
into the graph in place: same objects, same memory. A leaf that is the input of all recvs makes them
differentiable, and is what the engine is asked to reach so that it runs them.

The names of the nodes are PyTorch's, which people know from graphs and profiles. A node knows its
`Crossing`, which does not know the node: no cycles, so a graph is freed with its context.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, is_anomaly_enabled, is_grad_enabled
from torch.autograd import Function
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from .. import tracebacks
from . import hooks
from .node_order import set_number

Gradients = tuple[Tensor | None, ...]
Edge = tuple[Any, int]
"""A node, and which of the tensors that it made."""

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

    def is_over(self) -> bool:
        """Whether the pass has ended meanwhile."""


class _Here(threading.local):
    """The runs in progress in this thread, innermost last."""

    def __init__(self) -> None:
        self.runs: list[Run | None] = []


here = _Here()
_making = threading.RLock()  # for nodes that are created late


class Crossing:
    """One message's tensors that require grad, at one of its ends."""

    is_hooked = False
    """Users have put hooks on the node."""

    def __init__(self, number: int, worker: int, context: int, count: int) -> None:
        self.id = number
        self.worker = worker
        """The one at the other end."""
        self.context = context
        self.count = count
        self.runs: list[Run] = []
        """Those under way that pass through here: one, unless passes overlap."""

    def become(self, number: int, worker: int, context: int) -> None:
        """Stand for this message from now on."""
        self.id, self.worker, self.context = number, worker, context

    def __repr__(self) -> str:
        return f"<Crossing {self.id}: {self.count} tensors, worker {self.worker}>"

    def run(self) -> Run:
        """The run that executes this node.

        With overlapping passes it is that of this thread; a device's thread has none.
        """
        if len(self.runs) == 1:
            return self.runs[0]
        run = here.runs[-1] if here.runs else None
        if run is not None and run in self.runs:
            return run
        raise RuntimeError(
            f"the node of {self!r} can only be run by a distributed backward pass: use "
            "backward(context_id, [loss]) instead of loss.backward()"
        )


class Send:
    """Tensors that left."""

    leaves: Sequence[Tensor] = ()
    """The tensors, if all are leaves and nobody has asked for the node yet."""
    devices: Sequence[torch.device] = ()
    """Where the tensors are, if tensors of devices are sent at all."""
    place = 0
    """When the engine enters it, after all else that is ready: later places first.

    From 1 on: 0 is for what comes later still (`device_queues.py`).
    """
    _output: Tensor | None = None
    _origin: tracebacks.CallStack = ()
    """In anomaly mode, where a node that was not created yet would have been."""
    _ends: Sequence[Tensor] | None = None

    def __init__(self, crossing: Crossing, tensors: Sequence[Tensor]) -> None:
        self.crossing = crossing
        for tensor in tensors:
            if not tensor.is_leaf:
                break
        else:
            if not (is_anomaly_enabled() and here.runs):  # it notes the backward, too
                self.leaves = tensors
                self._origin = tracebacks.call_stack() if is_anomaly_enabled() else ()
                return
        self._output = _made_send(crossing, tensors)

    def __repr__(self) -> str:
        return f"<Send of {self.crossing!r}>"

    @property
    def output(self) -> Tensor:
        """Where the engine starts."""
        output = self._output
        return self._make_late() if output is None else output

    @property
    def node(self) -> Any:
        return self.output.grad_fn

    @property
    def edges(self) -> tuple[Edge, ...]:
        """What is behind the node: for each tensor the node that created it, and which output."""
        edges: tuple[Edge, ...] = self.node.next_functions
        return edges

    @property
    def count(self) -> int:
        """How many tensors it has."""
        return self.crossing.count

    def only(self, indexes: Sequence[int]) -> Send:
        """A send of a subset of its tensors."""
        return self if len(indexes) == self.count else PartialSend(self, indexes)

    def pick(self, gradients: Gradients) -> Gradients:
        """Its part of what arrived for the message."""
        return gradients

    def keep_ends(self) -> None:
        """Save where its tensors are in the graph, before a run of its node frees that.

        It keeps tensors at the same places in the graph, without values.
        """
        if self._ends is None and self.count > 1:
            node: Any = self.node
            self._ends = node.saved_tensors

    def ends(self, indexes: Sequence[int]) -> list[Tensor]:
        """Tensors at the places of these."""
        self.keep_ends()
        assert self._ends is not None
        return [self._ends[index] for index in indexes]

    def enter_late(self, place: int) -> None:
        """Set the sequence number at which the engine enters it."""
        self.place = place
        if self._output is not None:
            _set_place(self._output, place)

    def _make_late(self) -> Tensor:
        with _making:
            if self._output is not None:
                return self._output
            output = _made_late(self.crossing, self.leaves)
            _set_place(output, self.place)
            if self._origin:
                node: Any = output.grad_fn
                node.metadata["traceback_"] = tracebacks.lines_of(self._origin)
            self._output, self.leaves = output, ()
            return output


class PartialSend(Send):
    """A subset of the tensors of a message: those that will get gradients.

    What is behind the others must not run, so the subset has a node of its own.
    """

    def __init__(self, send: Send, indexes: Sequence[int]) -> None:
        self.crossing = send.crossing
        self.place = send.place
        self._whole = send
        self._indexes = tuple(indexes)

    @property
    def count(self) -> int:
        return len(self._indexes)

    def only(self, indexes: Sequence[int]) -> Send:
        kept = tuple([index for index in self._indexes if index in indexes])
        return self if kept == self._indexes else PartialSend(self._whole, kept)

    def keep_ends(self) -> None:
        """As they are kept already."""

    def pick(self, gradients: Gradients) -> Gradients:
        return tuple([gradients[index] for index in self._indexes])

    def _make_late(self) -> Tensor:
        with _making:
            if self._output is None:
                ends = self._whole.ends(self._indexes)
                output = _made(_apply_part, self._whole, self._indexes, *ends)
                _set_place(output, self.place)
                self._output = output
            return self._output


def _set_place(output: Tensor, place: int) -> None:
    node: Any = output.grad_fn
    set_number(node, place)


def make_recv(tensors: Sequence[Tensor]) -> Any:
    """The node of a recv of these tensors, which become part of the graph in place.

    It has no crossing until its origin is set (`Crossing.become`).
    """
    for tensor in tensors:
        if tensor.requires_grad:
            tensor.requires_grad_(False)  # it would stay a leaf
    crossing = Crossing(0, 0, 0, len(tensors))
    _made(_apply_recv, _TOKEN, crossing, tuple(tensors))
    return tensors[0].grad_fn


def _made(apply: Any, *inputs: Any) -> Any:
    """The result of a function of ours, with a node for it."""
    if is_grad_enabled():
        return apply(*inputs)
    with torch.enable_grad():
        return apply(*inputs)


def _made_late(crossing: Crossing, leaves: Sequence[Tensor]) -> Tensor:
    """The output of a send of leaves, as if created when they left."""
    if not all(leaf.is_leaf for leaf in leaves):
        raise RuntimeError(
            f"a leaf of {crossing!r} is no longer a leaf: after it was sent, it was frozen "
            "and then modified in place; send a copy of it"
        )
    frozen = [leaf for leaf in leaves if not leaf.requires_grad]
    try:
        for leaf in frozen:
            leaf.requires_grad_()
        with torch.inference_mode(False):
            return _made_send(crossing, leaves)
    finally:
        for leaf in frozen:
            leaf.requires_grad_(False)


def _send_forward(ctx: Any, crossing: Crossing, *tensors: Tensor) -> Tensor:
    ctx.crossing = crossing
    if len(tensors) > 1:  # perhaps not all will get gradients (`PartialSend`)
        ctx.save_for_backward(*tensors)
    return _BLANK.detach()  # a new one each time, created in the fastest way


def _made_send(crossing: Crossing, tensors: Sequence[Tensor]) -> Tensor:
    """The output of a node over these. If there are several, it keeps their places in the graph."""
    output: Tensor
    held = [_made(_hold, tensor) for tensor in tensors if tensor.is_leaf]
    if len(tensors) == 1:
        output = _made(_apply_send, crossing, *tensors)
    else:
        try:
            with saved_tensors_hooks(_forget, _recall):
                output = _made(_apply_send, crossing, *tensors)
        except RuntimeError:  # hooks are disabled here: then it keeps their values, too
            output = _made(_apply_send, crossing, *tensors)
    del held
    return output


def _hold(leaf: Tensor) -> Tensor:
    """An object that keeps the node behind a leaf alive, in C++, as long as it lives itself.

    torch looks that node up under a lock of the leaf, and acquires the GIL as well to create a new
    one. A Python function is applied with the GIL held, and so must not wait for that lock while
    another thread, which computes with the leaf, creates the node: a deadlock (seen in torch 2.13;
    `tests/upstream/leaf_lock.py`). An operation of torch's own waits for it without the GIL.
    """
    return leaf.view_as(leaf) if leaf.layout is torch.strided else leaf.clone()


def leaf_node(leaf: Tensor) -> Any:
    """The node behind a leaf; None if it no longer is a leaf, or was frozen."""
    if not (leaf.is_leaf and leaf.requires_grad):
        return None
    node: Any = _made(_hold, leaf).grad_fn
    return node.next_functions[0][0]


def _forget(tensor: Tensor) -> None:
    """For a saved tensor, torch itself keeps the place in the graph; nobody needs its values."""


def _recall(_: None) -> Tensor:
    return _BLANK


def _send_backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
    crossing = ctx.crossing
    return None, *crossing.run().collect(crossing)


def _part_forward(
    ctx: Any, send: Send, indexes: Sequence[int], *ends: Tensor
) -> Tensor:
    ctx.send, ctx.indexes = send, indexes
    return _BLANK.detach()


def _part_backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
    crossing = ctx.send.crossing
    gradients = crossing.run().collect(crossing)
    if crossing.is_hooked:  # and that node is not run
        gradients = hooks.called(ctx.send.node, gradients, _BLANK)
    return None, None, *[gradients[index] for index in ctx.indexes]


def _recv_forward(ctx: Any, token: Tensor, crossing: Crossing, tensors: Any) -> Any:
    ctx.crossing = crossing
    ctx.materialize_grads = False  # all that `set_materialize_grads` does
    return tensors


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
_apply_part = _function("SendRpc", _part_forward, _part_backward)
_apply_recv = _function("RecvRpc", _recv_forward, _recv_backward)


def _node_types() -> tuple[type, type, type]:
    crossing = Crossing(0, 0, 0, 1)
    send, recv = Send(crossing, [_TOKEN]), make_recv([torch.empty(())])
    return type(send.node), type(recv), type(TOKEN.node)


SEND_NODE, RECV_NODE, LEAF_NODE = _node_types()
"""The types of the nodes of sends and recvs, and of those behind leaves (AccumulateGrad)."""
hooks.note(SEND_NODE)
hooks.note(RECV_NODE)
