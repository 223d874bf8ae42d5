"""The gradients of one pass on one worker: those that came for sends, those of recvs that leave."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

from ..errors import GradwireError
from ..threads import Bell
from . import deliveries
from .actions import Action, Arrived
from .contexts import Context
from .desk import Desk
from .messages import Delivery
from .nodes import Crossing, Gradients


class Ended(Exception):
    """The pass has failed elsewhere: get out of the engine."""


class Mail:
    """What came and what leaves. Its lock guards that, and the progress of the pass."""

    def __init__(self, desk: Desk, context: Context, flags: int) -> None:
        self.lock = threading.Lock()
        self.progress: Any = None  # known once the pass has begun here
        self.gradients: dict[int, Gradients] = {}
        """For sends, by id; whoever uses them takes them out."""
        self._desk = desk
        self._context = context
        self._flags = flags
        self._bells: dict[int, Bell] = {}

    def receive(self, sender: int, arrived: Iterable[Delivery]) -> list[Arrived]:
        """Keep what came, with the lock held; what it is for."""
        found = []
        for delivery in arrived:
            gradients = deliveries.take(self._context, sender, delivery)
            self.gradients.setdefault(delivery[0], gradients)
            found.append(deliveries.arrived(delivery[0], gradients))
        return found

    def collect(self, send: Crossing) -> Gradients:
        """The gradients for a send; waits for them."""
        bell = None
        with self.lock:
            if self.progress.fate(send.id) is None and not self.progress.is_over:
                bell = self._bells[send.id] = Bell()
        if bell is not None:
            with self._desk.executor.waiting():
                bell.wait(None)
        if self.progress.has_failed:
            raise Ended
        if self.progress.fate(send.id):
            return self.gradients.pop(send.id)
        return (None,) * send.count

    def wake(self, send: int) -> None:
        """It is known what becomes of a send."""
        with self.lock:
            bell = self._bells.pop(send, None)
        if bell is not None:
            bell.ring()

    def put(
        self, recv: Crossing, gradients: Gradients, held: dict[int, list[Delivery]]
    ) -> list[Action]:
        """Put the gradients of a recv with what is held; what follows, if they are for here.

        Raises:
            GradwireError: it is one of another context, and there are some.
        """
        progress = self.progress
        if progress.is_over:
            raise Ended
        if recv.context != self._context.id:
            if any(gradient is not None for gradient in gradients):
                raise GradwireError(
                    f"a tensor that arrived in context {recv.context} is part of a backward "
                    f"pass in context {self._context.id}: detach() it, if it is to be kept"
                )
            return []
        actions: list[Action] = []
        to = recv.worker
        delivery = deliveries.make(
            self._context, recv, gradients, self._flags, self._desk.numbers
        )
        if delivery is None:
            with self.lock:
                return list(progress.came_empty(recv.id))
        if to == self._desk.me:
            number, plain, link, linked = delivery
            delivery = number, deliveries.copied(plain), link, linked
        with self.lock:
            progress.left(recv.id)
            if to == self._desk.me:
                (arrived,) = self.receive(to, (delivery,))
                actions = progress.delivered_here(arrived)
            else:
                held.setdefault(to, []).append(delivery)
        return actions
