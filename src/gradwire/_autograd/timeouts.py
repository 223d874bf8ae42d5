"""Time limits of passes, where the caller sets one.

By default a pass has no limit: it ends with its result, with an error, or with the loss of a worker
that it needs. A worker that lives and never responds, because it is stopped or stuck in a hook, is
none of these. The leader cannot watch the clock while it waits inside torch's engine, so a pass
whose time is up is ended from outside, like one that another worker has aborted. That is retried
until the pass has ended, for it may just be between two steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from ..errors import BackwardTimeout
from ..locks import CheckedLock
from ..threads import Executor
from .contexts import Context

_AGAIN = 0.02  # seconds until ending a pass is retried
_NEVER = float("inf")


class _Limit(NamedTuple):
    deadline: float
    context: Context
    error: BackwardTimeout


class Limits:
    """The limits of the passes that one worker leads. `end` ends a pass, if it finds it."""

    def __init__(
        self,
        executor: Executor,
        end: Callable[[Context, int, BackwardTimeout], None],
    ) -> None:
        self._executor = executor
        self._end = end
        self._lock = CheckedLock()
        self._limits: dict[int, _Limit] = {}  # by number of the pass
        self._alarm = _NEVER  # one for all: most passes end long before

    @contextmanager
    def limit(self, context: Context, number: int, seconds: float) -> Iterator[None]:
        """Around a pass, which is ended after that time.

        Raises:
            BackwardTimeout: it was, in place of the error it ended with.
        """
        error = BackwardTimeout(context.id, seconds)
        deadline = time.monotonic() + seconds
        with self._lock:
            self._limits[number] = _Limit(deadline, context, error)
            self._set_alarm(deadline)
        try:
            yield
        except Exception:
            if time.monotonic() >= deadline:
                raise error from None
            raise
        finally:
            with self._lock:
                del self._limits[number]

    def _set_alarm(self, when: float) -> None:
        """With the lock."""
        if when < self._alarm:
            self._alarm = when
            self._executor.call_at(when, self._ring)

    def _ring(self) -> None:
        now = time.monotonic()
        with self._lock:
            if now < self._alarm:
                return
            self._alarm = _NEVER
            limits = [*self._limits.items()]
            if limits:
                first = min(limit.deadline for _, limit in limits)
                self._set_alarm(max(first, now + _AGAIN))
        for number, limit in limits:
            if limit.deadline <= now:
                self._end(limit.context, number, limit.error)
