"""Gradients in transit from a recv to the matching send.

Where gradients are to be differentiable, they are themselves tensors that leave one worker and
arrive at another in the same context: a send here, a recv there, for later passes.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..errors import GradwireError, ProtocolError
from .contexts import Context, Numbers, unknown
from .messages import CREATE, Delivery
from .nodes import Crossing, Gradients, make_recv


def make(
    context: Context, recv: Crossing, gradients: Gradients, flags: int, numbers: Numbers
) -> Delivery | None:
    """The gradients of a recv, as they are sent; None: there are none.

    Raises:
        GradwireError: there are some, and the recv is of another context.
    """
    plain = bare(gradients)
    if plain is None:
        return None
    if recv.context != context.id:
        raise GradwireError(
            f"a tensor that arrived in context {recv.context} is part of a backward pass in "
            f"context {context.id}: detach() what you keep"
        )
    if flags & CREATE:
        traced = [
            i for i, g in enumerate(gradients) if g is not None and g.requires_grad
        ]
        if traced:
            link = numbers.next()
            context.add_send(link, recv.worker, [_at(gradients, i) for i in traced])
            return Delivery(recv.id, plain, link, traced)
    return Delivery(recv.id, plain)


def _at(gradients: Gradients, index: int) -> Tensor:
    found = gradients[index]
    assert found is not None
    return found


def bare(gradients: Gradients) -> Gradients | None:
    """Gradients without history; None: there are none."""
    is_any = False
    for gradient in gradients:
        if gradient is not None:
            is_any = True
            if gradient.requires_grad:
                return tuple([None if g is None else g.detach() for g in gradients])
    return gradients if is_any else None


def copied(delivery: Delivery) -> Delivery:
    """With their own memory, as if they had arrived in a message."""
    gradients = [None if g is None else g.clone() for g in delivery.gradients]
    return Delivery(delivery.send, gradients, delivery.link, delivery.linked)


def take(
    context: Context, sender: int, delivery: Delivery
) -> tuple[int, tuple[int, ...], Sequence[Tensor | None]]:
    """Accept the gradients of a message: its number, the slots with gradients, and the gradients.

    Raises:
        ProtocolError: some are missing, or they belong to nothing that was sent.
        GradwireError: the context has ended, and with it everything that was sent in it.
    """
    number, gradients, link, linked = delivery
    send = context.sends.get(number)
    if send is None and context.is_released:
        raise unknown(context.id)
    if send is None or send.crossing.worker != sender:
        raise ProtocolError(f"gradients for send {number}, which is unknown")
    count = send.crossing.count
    if len(gradients) != count:
        raise ProtocolError(
            f"send {number} of {count} tensors got {len(gradients)} gradients"
        )
    if send.devices:
        # Those of a tensor that arrived on another device come from there.
        gradients = [
            None if gradient is None else gradient.to(device)
            for gradient, device in zip(gradients, send.devices, strict=True)
        ]
    if link:
        context.add_recv(link, sender, make_recv([gradients[i] for i in linked]))
    slots = tuple([i for i, g in enumerate(gradients) if g is not None])
    return number, slots, gradients
