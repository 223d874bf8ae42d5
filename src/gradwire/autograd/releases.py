"""Telling other workers that contexts are over: gathered for a moment, said until answered."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial

from ..errors import ClosedError, GradwireError, WorkerLostError
from ..rpc.futures import CallFuture
from ..threads import Executor
from .messages import Release

log = logging.getLogger("gradwire")

_GATHER = 0.02  # seconds that releases may wait for others
_TRIES = 5
_PAUSE = 0.5


class Releases:
    """What is to be told by one worker."""

    def __init__(
        self, executor: Executor, send: Callable[[int, Release], CallFuture]
    ) -> None:
        self._executor = executor
        self._send = send
        self._lock = threading.Lock()
        self._waiting: dict[int, list[int]] = {}  # contexts, by worker

    def add(self, worker: int, context: int) -> None:
        """Tell a worker soon."""
        with self._lock:
            first = not self._waiting
            self._waiting.setdefault(worker, []).append(context)
        if first:
            self._executor.call_at(time.monotonic() + _GATHER, self._tell_all)

    def _tell_all(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        for worker, contexts in waiting.items():
            self._tell(worker, tuple(contexts), _TRIES)

    def _tell(self, worker: int, contexts: tuple[int, ...], tries: int) -> None:
        def answered() -> None:
            try:
                future.value()
            except (WorkerLostError, ClosedError):
                pass  # it has gone, or we have
            except Exception as error:  # noqa: BLE001 whatever it is: once more
                if tries > 1:
                    again = partial(self._tell, worker, contexts, tries - 1)
                    self._executor.call_at(time.monotonic() + _PAUSE, again)
                else:
                    log.warning("contexts %s stay on %d: %s", contexts, worker, error)

        try:
            future = self._send(worker, Release(contexts))
        except GradwireError:
            return
        future.on_done(answered)
