"""A value that others may hold references to, at its owner: there, failed, or still to come."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from ..errors import CallTimeout
from ..ids import WorkerInfo
from ..rpc.futures import fresh_copy
from ..threads import Bell, Executor
from .messages import spell

_OURS = __name__.partition(".")[0] + "."


class OwnedValue:
    """Lives while a handle here or a fork elsewhere needs it (`service.py`)."""

    __slots__ = (
        "__weakref__",
        "_error",
        "_lock",
        "_result",
        "_waiting",
        "id",
        "is_ready",
        "owner",
    )

    def __init__(self, number: int, owner: WorkerInfo) -> None:
        self.id = number
        self.owner = owner
        self.is_ready = False
        self._result: Any = None
        self._error: BaseException | None = None
        self._waiting: list[Callable[[], object]] = []
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<OwnedValue {spell(self.id)}: {self.state}>"

    @property
    def state(self) -> str:
        if not self.is_ready:
            return "pending"
        return "failed" if self._error else type(self._result).__qualname__

    def set(self, result: Any) -> None:
        self._end(result, None)

    def fail(self, error: BaseException) -> None:
        self._end(None, _without_our_frames(error))

    def get(self) -> Any:
        """The value, which is ready; raises what its making raised."""
        if self._error is not None:
            error = fresh_copy(self._error)
            try:
                raise error.with_traceback(self._error.__traceback__)
            finally:
                del error  # or this frame and it would keep each other, and the value
        return self._result

    def when_ready(self, callback: Callable[[], object]) -> None:
        """Call `callback` when it is there or has failed; at once if it is."""
        with self._lock:
            if not self.is_ready:
                self._waiting.append(callback)
                return
        callback()

    def wait(self, executor: Executor, seconds: float) -> Any:
        """The value, when it is there.

        Raises:
            CallTimeout: not within so many seconds; 0 is for ever.
            BaseException: what its making raised.
        """
        if not self.is_ready:
            bell = Bell()
            self.when_ready(bell.ring)
            deadline = time.monotonic() + seconds if seconds else None
            with executor.waiting():
                bell.wait_until(deadline)
            if not self.is_ready:
                what = f"the function that makes value {spell(self.id)}"
                raise CallTimeout(what, self.owner.name, seconds)
        return self.get()

    def _end(self, result: Any, error: BaseException | None) -> None:
        with self._lock:
            if self.is_ready:
                return  # its creator has given up on it
            self._result, self._error = result, error
            self.is_ready = True
            waiting, self._waiting = self._waiting, []
        for callback in waiting:
            callback()


def _without_our_frames(error: BaseException) -> BaseException:
    """It is kept as long as the value: so keep the lines it went through, not their variables."""
    trace = error.__traceback__
    while trace and trace.tb_frame.f_globals.get("__name__", "").startswith(_OURS):
        trace = trace.tb_next
    traceback.clear_frames(trace)
    return error.with_traceback(trace)
