"""What the layers below need of distributed autograd: contexts travel with messages.

A message that leaves while a context is current belongs to it, also if none of its tensors needs a
gradient, so that every worker that a context reaches is known. What arrives with a context is run
in it, and answered in it.
"""

from __future__ import annotations

from torch import Tensor

from .checks import check_kinds
from .service import Autograd
from .strands import strands_of


class Recording:
    """Records messages of one worker (a `Recorder` of `wire/cargo.py`)."""

    def __init__(self, autograd: Autograd) -> None:
        self._contexts = autograd.contexts
        self._numbers = autograd.numbers
        self.current = autograd.contexts.current_id
        self.end_to_tell = autograd.releases.take

    def leaving(self, number: int, to: int, tensors: list[Tensor]) -> int | None:
        """A message of a context leaves, with these tensors that need gradients; its mark.

        Raises:
            TypeError: one of a kind that cannot be recorded.
        """
        context = self._contexts.arrived(number)
        context.known.add(to)
        mark = 0
        if tensors and not context.is_released:
            check_kinds(tensors)
            mark = self._numbers.next()
            context.add_send(mark, to, tensors)
        # Whoever is known by now will be told of its end. Others must not hear of it any more.
        return None if context.is_released else mark

    def sent(self, number: int) -> None:
        """A message of a context has left: look at its graph, while others work."""
        context = self._contexts.arrived(number)
        with context.lock:
            strands_of(context)

    def arrived(
        self, number: int, mark: int, sender: int, tensors: list[Tensor]
    ) -> None:
        """A message of a context came, with these tensors that need gradients."""
        context = self._contexts.arrived(number)
        context.known.add(sender)
        if mark and tensors:
            context.add_recv(mark, sender, tensors)
