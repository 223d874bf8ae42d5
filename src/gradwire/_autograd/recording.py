"""What the layers below need of distributed autograd: contexts travel with messages.

A message that leaves while a context is current belongs to it, even if none of its tensors requires
grad, so that every worker that a context reaches is known. What arrives with a context runs in it,
and is answered in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, is_grad_enabled

from .._rpc.torch_modes import allow_grad
from .._wire.frames import Frame, Parcel
from .._wire.messages import RESULT, Call
from .arguments import check_kinds
from .contexts import Context
from .lost_gradients import LostGradients
from .nodes import make_recv
from .service import Autograd


class Recording:
    """Records messages of one worker (a `Recorder` of `_rpc/interceptors.py`)."""

    def __init__(self, autograd: Autograd, *, warns: bool = True) -> None:
        """`warns`: warn of gradients that are lost for lack of a context."""
        self._lost = LostGradients() if warns else None
        self._contexts = autograd.contexts
        self._find = autograd.contexts.arrived
        self._number = autograd.numbers.next
        self._take_word = autograd.releases.take
        self.current = autograd.contexts.current
        self.check = check_kinds

    def leaving(
        self, context: Context, to: int, parcel: Parcel, tensors: Sequence[Tensor]
    ) -> None:
        """A message of a context leaves, with these tensors that require grad."""
        context.known.add(to)
        if tensors and is_grad_enabled() and not context.is_released:
            parcel.mark = mark = self._number()
            context.add_send(mark, to, tensors)
            parcel.afterwards = (partial(look_at_graph, context),)
        # The workers known by now will be told of its end. No others may learn of it any more.
        if context.is_released:
            parcel.mark = 0
        else:
            parcel.scope = context.id
        if parcel.kind != RESULT:  # which has no response
            word = self._take_word(to)
            if word is not None:
                parcel.over, parcel.freight = word.context, (word,)

    def lost_arguments(self) -> None:
        """This thread makes a call with arguments that require grad, without a context."""
        if self._lost is not None and is_grad_enabled():
            self._lost.in_arguments(are_contexts=len(self._contexts) > 0)

    def lost_result(self, request: Any) -> None:
        """The result of a call without a context requires grad."""
        if self._lost is None or type(request) is not Call:
            return
        if request.modes is None or allow_grad(request.modes):
            self._lost.in_result(request.function)

    def arrived(self, frame: Frame, sender: int, tensors: Sequence[Tensor]) -> Context:
        """A message of a context arrived, with these tensors that require grad; the context."""
        context = self._find(frame.scope)
        context.known.add(sender)
        if tensors and frame.mark:
            context.add_recv(frame.mark, sender, make_recv(tensors))
        elif tensors:
            for tensor in tensors:
                tensor.requires_grad_()
        return context


def look_at_graph(context: Context) -> None:
    """A message has been sent: analyse the graph while others work."""
    with context.lock:
        context.segments()
