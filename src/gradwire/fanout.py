"""Concurrent method calls on objects of several workers.

What optimizers, modules and checkpoints have in common: an object on each owner, one call to each,
and all errors reported together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ._rref.reference import RRef
from .errors import OwnersError, RemoteError
from .tracebacks import text_of

Calls = Mapping[str, "tuple[RRef[Any], str, tuple[Any, ...]]"]
"""By name of the owner: an object there, a method of it, and the arguments."""


def call_all(calls: Calls) -> dict[str, Any]:
    """The results of the methods, by name of the owner. Waits for all of them in any case.

    Remote ones are started first; the local one runs meanwhile, in this thread. The last remote
    call is synchronous, which is faster than making all of them futures.

    Raises:
        Exception: the error, if one owner failed.
        OwnersError: the errors, if several failed.
    """
    results: dict[str, Any] = {}
    errors: dict[str, Exception] = {}
    here = [name for name, (target, _, _) in calls.items() if target.is_owner()]
    others = [name for name in calls if name not in here]
    last = others.pop() if others else None

    def attempt(name: str, way: Callable[[RRef[Any]], Any]) -> None:
        target, method, args = calls[name]
        try:
            results[name] = getattr(way(target), method)(*args)
        except Exception as error:  # noqa: BLE001 user code, and the others continue
            errors[name] = error

    def run_here() -> None:
        while here:
            attempt(here.pop(0), RRef.local_value)

    for name in others:
        attempt(name, RRef.rpc_async)
    futures = dict(results)
    if last is not None:
        attempt(last, lambda target: target.rpc_meanwhile(run_here))
    run_here()  # if the last could not be called, or there is none
    for name, future in futures.items():
        try:
            results[name] = future.wait()
        except Exception as error:  # noqa: BLE001 as above
            errors[name] = error
    if len(errors) > 1:
        failed = {name: errors[name] for name in calls if name in errors}
        raise OwnersError(failed, {name: _trace(e) for name, e in failed.items()})
    if errors:
        raise next(iter(errors.values()))
    return {name: results[name] for name in calls}


def _trace(error: Exception) -> str:
    """The traceback: the remote one, or the local one."""
    cause = error.__cause__
    return cause.trace if isinstance(cause, RemoteError) else text_of(error)
