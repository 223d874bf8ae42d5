"""Gradients on their way from a recv to the matching send.

Where gradients are to be differentiable, they are themselves tensors that leave one worker and
arrive at another in the same context: a send here, a recv there, for later passes.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..errors import ProtocolError
from .actions import Arrived
from .contexts import Context, Numbers, unknown
from .messages import CREATE, Delivery
from .nodes import Crossing, Gradients, make_recv


def make(
    context: Context, recv: Crossing, gradients: Gradients, flags: int, numbers: Numbers
) -> Delivery | None:
    """The gradients of a recv, as they are sent; None: there are none."""
    plain = bare(gradients)
    if plain is None:
        return None
    link = 0
    linked: tuple[int, ...] = ()
    if flags & CREATE:
        traced = [(i, g) for i, g in enumerate(gradients) if g is not None]
        traced = [(i, g) for i, g in traced if g.requires_grad]
        if traced:
            link, linked = numbers.next(), tuple([i for i, _ in traced])
            context.add_send(link, recv.worker, [g for _, g in traced])
    return recv.id, plain, link, linked


def bare(gradients: Gradients) -> Gradients | None:
    """Gradients without history; None: there are none."""
    is_any = False
    for gradient in gradients:
        if gradient is not None:
            is_any = True
            if gradient.requires_grad:
                return tuple([None if g is None else g.detach() for g in gradients])
    return gradients if is_any else None


def copied(gradients: Sequence[Tensor | None]) -> Gradients:
    """With memory of their own, as they would have if they had come by a message."""
    return tuple([None if g is None else g.clone() for g in gradients])


def take(context: Context, sender: int, delivery: Delivery) -> Gradients:
    """The gradients of a delivery.

    Raises:
        ProtocolError: it lacks some, or is for nothing that was sent.
    """
    number, gradients, link, linked = delivery
    check(context, sender, number, gradients)
    if link:
        context.add_recv(link, sender, make_recv([gradients[i] for i in linked]))
    return gradients


def arrived(number: int, gradients: Sequence[Tensor | None]) -> Arrived:
    """What there is of the gradients for a send."""
    return number, tuple([i for i, g in enumerate(gradients) if g is not None])


def check(
    context: Context, sender: int, number: int, gradients: Sequence[Tensor | None]
) -> None:
    """Refuse gradients that are for nothing that was sent, or not for all of it.

    Raises:
        ProtocolError: they are.
        GradwireError: the context is over, and all that was sent with it.
    """
    send = context.sends.get(number)
    if send is None and context.is_released:
        raise unknown(context.id)
    if send is None or send.crossing.worker != sender:
        raise ProtocolError(f"gradients for send {number}, which is not there")
    count = send.crossing.count
    if len(gradients) != count:
        raise ProtocolError(
            f"send {number} of {count} tensors got {len(gradients)} gradients"
        )
