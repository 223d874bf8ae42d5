"""Errors in a pass, carried to the worker that began it.

An error is described once, where it happens, and recreated once, where the pass began; workers in
between pass on the description.
"""

from __future__ import annotations

from .._wire.failures import describe_failure, revive_failure
from .._wire.messages import Failure
from .._wire.pickling import PickleSerializer
from ..errors import GradwireError, WorkerLostError
from .messages import Failed


def describe(error: BaseException, worker: int, *, pickles: bool) -> Failed:
    """An error on a worker, with its notes (no advice). `pickles`: the receivers may unpickle."""
    pickler = PickleSerializer({}, same_main=False) if pickles else None
    failure = describe_failure(error, pickler)
    advice = error._advice if isinstance(error, GradwireError) else None
    notes = [note for note in getattr(error, "__notes__", ()) if note != advice]
    return Failed(
        worker,
        failure.type_name,
        "\n".join([failure.message, *notes]),
        failure.trace,
        failure.pickled,
        tuple(failure.tensors),
    )


def revive(failed: Failed, name: str, *, pickles: bool) -> Exception:
    """The error on another worker, which has this name: its own type, where possible."""
    failure = Failure(
        failed.type_name,
        failed.message,
        failed.trace,
        failed.pickled if pickles else None,
        list(failed.tensors),
    )
    return revive_failure(failure, name)


def to_raise(failed: Failed, error: BaseException) -> BaseException:
    """The error for the caller of a pass: names the worker, with the original as its cause."""
    if isinstance(error, WorkerLostError) or not isinstance(error, Exception):
        return error
    text = failed.message or failed.type_name
    outer = GradwireError(f"Error on Node {failed.worker}: {text}")
    outer.__cause__ = error
    return outer
