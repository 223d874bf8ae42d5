"""`torch.futures.wait_all`, which sees when a call has failed.

torch's own waits in C++ for values or C++ errors. Errors of Python are neither: they are raised by
looking at the value. So it would wait for all futures, although one of them has failed.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from .._rpc.futures import CallFuture
from . import state


def wait_all(futures: list[torch.futures.Future[Any]]) -> list[Any]:
    """The values of all futures; raises the first error as soon as it is there."""
    futures = list(futures)
    pending, over, failed = len(futures), threading.Event(), []
    lock = threading.Lock()

    def done(future: Any) -> None:
        nonlocal pending
        if _has_failed(future):
            failed.append(future)
        with lock:
            pending -= 1
        if failed or not pending:
            over.set()

    for future in futures:
        future.add_done_callback(done)
    if futures:
        with state.waiting():
            over.wait()
    for future in failed:
        future.wait()
    return [future.wait() for future in futures]


def _has_failed(future: Any) -> bool:
    if isinstance(future, CallFuture):
        return future.fate.error is not None
    try:
        future.value()
    except Exception:  # noqa: BLE001 user code
        return True
    return False
