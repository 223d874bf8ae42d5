"""Methods of objects on several workers, called at the same time.

What optimizers, modules and checkpoints have in common: an object on each owner, one call to each,
and all that went wrong reported together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .errors import OwnersError
from .rpc.futures import CallFuture
from .rref.reference import RRef

Calls = Mapping[str, "tuple[RRef[Any], str, tuple[Any, ...]]"]
"""By name of the owner: an object there, a method of it, and the arguments."""


def call_all(calls: Calls) -> dict[str, Any]:
    """What the methods return, by name of the owner. Waits for all of them, whatever happens.

    Those elsewhere are started first; what is on this worker runs meanwhile, in this thread.

    Raises:
        Exception: what went wrong on the one owner where something did.
        OwnersError: the same, where it was several.
    """
    futures: dict[str, CallFuture] = {}
    results: dict[str, Any] = {}
    errors: dict[str, Exception] = {}
    for name, (target, method, args) in calls.items():
        try:
            if not target.is_owner():
                futures[name] = getattr(target.rpc_async(), method)(*args)
        except Exception as error:  # noqa: BLE001 the others go on
            errors[name] = error
    for name in sorted(calls.keys() - errors.keys(), key=futures.__contains__):
        target, method, args = calls[name]
        try:
            if name in futures:
                results[name] = futures[name].wait()
            else:
                results[name] = getattr(target.local_value(), method)(*args)
        except Exception as error:  # noqa: BLE001 user code
            errors[name] = error
    if len(errors) > 1:
        raise OwnersError({name: errors[name] for name in calls if name in errors})
    if errors:
        raise next(iter(errors.values()))
    return {name: results[name] for name in calls}
