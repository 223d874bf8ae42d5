"""Exceptions as messages, and messages as exceptions: their own type, where it can be sent."""

from __future__ import annotations

import builtins
from typing import Any

import torch

from .. import errors
from ..errors import RemoteError
from ..tracebacks import has_other_frames, text_of
from .messages import Failure
from .pickling import PickleSerializer, Serializer


def describe_failure(
    error: BaseException, pickler: Serializer | None, trace: str | None = None
) -> Failure:
    """An exception as a message; without a pickler, as text only."""
    trace = trace or _trace_of(error)
    beside: list[torch.Tensor] = []
    pickled = None
    if pickler is not None:
        try:
            pickled = pickler.dumps(error, beside)
        except Exception:  # noqa: BLE001 user code
            beside = []  # its text has to suffice
    try:
        message = str(error)
    except Exception:  # noqa: BLE001 user code
        message = "<it cannot be put in words>"
    return Failure(type(error).__qualname__, message, trace, pickled, beside)


def _trace_of(error: BaseException) -> str:
    """Its traceback; for one that came from another worker and was re-raised, the original one."""
    cause = error.__cause__
    if isinstance(cause, RemoteError) and not has_other_frames(error):
        return cause.trace
    return text_of(error)


def shorten(failure: Failure, most: int) -> Failure:
    """The beginning of the message and the end of the traceback, which fit into every limit."""
    message, trace = failure.message[:most], failure.trace[-most:]
    return Failure(failure.type_name[:most], message, trace, None, [])


def revive_failure(failure: Failure, worker: str) -> Exception:
    """The exception to raise here for a remote failure: of its own type, if possible."""
    cause = RemoteError(worker, failure.type_name, failure.message, failure.trace)
    error: Any = None
    if failure.pickled is not None:
        try:
            pickler = PickleSerializer({}, same_main=True)
            error = pickler.loads(failure.pickled, failure.tensors)
        except Exception:  # noqa: BLE001 user code
            error = None  # its type cannot be recreated here: the cause has the text
    else:
        name = failure.type_name
        kind = getattr(builtins, name, None) or getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            try:
                error = kind(failure.message)
            except TypeError:
                error = None
    if not isinstance(error, Exception):
        return cause
    error.__cause__ = cause
    return error
