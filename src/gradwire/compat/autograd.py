"""`torch.distributed.autograd`, with Gradwire behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .._autograd.contexts import Context
from .._autograd.service import Autograd
from ..uncompiled import uncompiled
from . import state

_COUNT_BITS = 48


class DistAutogradContext:
    """One context, as one worker knows it."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def __repr__(self) -> str:
        return f"<DistAutogradContext of {self._context!r}>"

    def _context_id(self) -> int:
        return self._context.id

    def _known_worker_ids(self) -> set[int]:
        """The workers that are told when it ends."""
        return set(self._context.known)

    def _send_functions(self) -> dict[int, Any]:
        """By number, the nodes where tensors left."""
        return {number: send.node for number, send in self._context.sends.items()}

    def _recv_functions(self) -> dict[int, Any]:
        """By number, the nodes where tensors arrived."""
        return dict(self._context.recvs)


def is_available() -> bool:
    return True


def _autograd() -> Autograd:
    service: Autograd = state.get().worker.autograd
    return service


def _init(worker_id: int) -> None:
    """Nothing to do: it comes with the worker."""


def _new_context() -> DistAutogradContext:
    return DistAutogradContext(_autograd().new_context())


def _release_context(context_id: int) -> None:
    _autograd().release(context_id)


def _retrieve_context(context_id: int) -> DistAutogradContext:
    return DistAutogradContext(_autograd().contexts.get(context_id))


def _is_valid_context(context_id: int) -> None:
    _autograd().contexts.get(context_id)


def _current_context() -> DistAutogradContext:
    context = _autograd().contexts.current()
    if context is None:
        raise RuntimeError(
            "Current thread doesn't have a valid autograd context. Please wrap your code "
            "using: `with torch.distributed.autograd.context() as context_id` to generate a "
            "valid context"
        )
    return DistAutogradContext(context)


def _get_max_id() -> int:
    """The last number that this worker may give to a message."""
    worker: int = state.get().worker.id
    return (worker << _COUNT_BITS) + (1 << _COUNT_BITS) - 1


def _get_debug_info() -> dict[str, int]:
    found: dict[str, int] = _autograd().debug_info()
    return found


@uncompiled
def backward(
    context_id: int, roots: Sequence[Tensor], retain_graph: bool = False
) -> None:
    """Run one backward pass from these losses, through all workers of a context."""
    _autograd().backward(context_id, roots, retain_graph)


@uncompiled
def get_gradients(context_id: int) -> dict[Tensor, Tensor]:
    """The gradients of this worker's leaves in a context."""
    return _autograd().get_gradients(context_id)


class context:  # noqa: N801 torch's name
    """A context for a forward pass over workers and its backward passes; gives its id."""

    def __enter__(self) -> int:
        self.autograd_context = _new_context()
        return self.autograd_context._context_id()

    def __exit__(self, *error: object) -> None:
        _release_context(self.autograd_context._context_id())
