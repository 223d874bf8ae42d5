"""A call of the engine in a pass, as its nodes see it."""

from __future__ import annotations

from collections.abc import Callable

from .actions import Run
from .messages import Delivery
from .nodes import Crossing, Gradients


class Exchange:
    """What brings a run its gradients, and takes them from it."""

    __slots__ = ("_deliver", "collect", "held", "is_over", "run")

    def __init__(
        self,
        run: Run,
        collect: Callable[[Crossing], Gradients],
        deliver: Callable[[Exchange, Crossing, Gradients], None],
        is_over: Callable[[], bool],
    ) -> None:
        self.run = run
        self.collect = collect
        self.is_over = is_over
        self._deliver = deliver
        self.held: dict[int, list[Delivery]] = {}
        """Gradients that leave when it is over, by worker."""

    def deliver(self, recv: Crossing, gradients: Gradients) -> None:
        self._deliver(self, recv, gradients)
