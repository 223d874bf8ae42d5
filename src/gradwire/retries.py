"""Retries of calls whose worker was lost and has come back.

A lost worker may have run the call, in part or in full. So only a function that is marked may be
retried: one for which running twice is as good as running once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from .errors import WorkerLostError
from .ids import WorkerInfo
from .options import check_timeout
from .worker import Worker

_SOON = 0.001  # seconds; 0 would be no limit

F = TypeVar("F", bound=Callable[..., Any])

_MARK = "__gradwire_idempotent__"


def idempotent(function: F) -> F:
    """Mark a function that may run twice as well as once, so that calls to it can be retried.

    >>> @gw.idempotent
    ... def newest_loss():
    ...     return 0.25
    >>> gw.rpc_sync("worker1", newest_loss, retries=2)
    0.25
    """
    setattr(function, _MARK, True)
    return function


def call_with_retries(
    worker: Worker,
    to: str | int | WorkerInfo,
    call: tuple[Callable[..., Any], Any, dict[str, Any] | None],
    timeout: float | None,
    retries: int,
    device_map: Mapping[Any, Any] | None = None,
) -> Any:
    """As `rpc_sync`; all attempts, and the waits for the worker, share one timeout.

    Raises:
        ValueError: the function is not marked as idempotent.
        WorkerLostError: the worker did not come back, or was lost again in the last attempt.
    """
    function = call[0]
    if not getattr(function, _MARK, False):
        name = getattr(function, "__qualname__", repr(function))
        raise ValueError(
            f"retries={retries}: {name} may run twice, so mark it with @gw.idempotent if it can"
        )
    seconds = worker.options.timeout if timeout is None else check_timeout(timeout)
    deadline = time.monotonic() + (seconds or math.inf)
    if isinstance(to, int):
        to = worker.get_worker_info(to)
    name = to.name if isinstance(to, WorkerInfo) else to
    lost = -1
    for left in range(retries, -1, -1):
        limit = max(deadline - time.monotonic(), _SOON) if seconds else 0
        try:
            info = worker.get_worker_info(name)
            lost = info.id
            return worker.rpc_sync(info, *call, limit, device_map)
        except WorkerLostError as error:
            if error.worker != name or not left:
                raise
            if not worker.wait_for(name, lost, deadline):
                raise
    raise AssertionError("unreachable: the last attempt returns or raises")
