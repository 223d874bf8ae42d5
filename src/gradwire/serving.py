"""Telling workers that serve others to stop."""

from __future__ import annotations

from .api import current_worker, rpc_sync
from .errors import WorkerLostError
from .ids import WorkerInfo


def stop_serving(to: str | int | WorkerInfo) -> None:
    """Make `serve` of another worker return, and that worker leave.

    Args:
        to: its name, id or info.

    Raises:
        GradwireError: the world has a fixed size, and all workers leave together.

    >>> stop_serving("worker1")  # doctest: +SKIP
    """
    try:
        rpc_sync(to, _stop)
    except WorkerLostError:
        pass  # it left before it answered, or is gone anyway


def _stop() -> None:
    """Run on the worker that serves."""
    current_worker().stop_serving()
