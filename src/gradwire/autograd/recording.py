"""What the layers below need of distributed autograd: contexts travel with messages.

A message that leaves while a context is current belongs to it, also if none of its tensors needs a
gradient, so that every worker that a context reaches is known. What arrives with a context is run
in it, and answered in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .service import Autograd


class Recording:
    """Records messages of one worker (a `Recorder` of `wire/cargo.py`)."""

    def __init__(self, autograd: Autograd) -> None:
        self._autograd = autograd
        self._contexts = autograd.contexts

    def current(self) -> int:
        """The context of this thread; 0 for none."""
        context = self._contexts.current()
        return 0 if context is None else context.id

    def run(self, number: int, handling: Callable[[], Any]) -> Any:
        """Handle a message in its context."""
        with self._contexts.entered(self._contexts.arrived(number)):
            return handling()

    def leaving(self, number: int, to: int, tensors: list[Tensor]) -> int | None:
        """A message of a context leaves, with these tensors that need gradients; its mark."""
        context = self._contexts.arrived(number)
        mark = self._autograd.record_send(context, to, tensors) or 0
        # Whoever is known by now will be told of its end. Others must not hear of it any more.
        return None if context.is_released else mark

    def arrived(
        self, number: int, mark: int, sender: int, tensors: list[Tensor]
    ) -> None:
        """A message of a context came, with these tensors that need gradients."""
        context = self._contexts.arrived(number)
        self._autograd.record_recv(context, sender, mark or None, tensors)
