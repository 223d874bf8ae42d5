"""A value that others may hold references to, at its owner: there, failed, or still to come."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from .._rpc.futures import Failed, fresh_copy, keepable
from ..errors import CallTimeout, RemoteError
from ..ids import WorkerInfo
from ..options import check_timeout
from ..threads import Bell, Executor
from .messages import spell


class OwnedValue:
    """Lives while a handle here or a fork elsewhere needs it (`service.py`)."""

    __slots__ = (
        "__weakref__",
        "_failed",
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
        self._failed: Failed | None = None
        self._waiting: list[Callable[[], object]] = []
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<OwnedValue {spell(self.id)}: {self.state}>"

    @property
    def state(self) -> str:
        if not self.is_ready:
            return "pending"
        return "failed" if self._failed else type(self._result).__qualname__

    def set(self, result: Any) -> None:
        if type(result) is Failed:
            self._end(None, result)
        else:
            self._end(result, None)

    def fail(self, error: BaseException) -> None:
        self._end(None, keepable(error))

    def get(self) -> Any:
        """The value, which is ready; raises what its making raised."""
        if self._failed is not None:
            error, trace = self._failed
            kind = type(error).__qualname__
            cause = RemoteError(self.owner.name, kind, str(error), trace)
            if not isinstance(error, Exception):
                raise cause  # what ended the function would end this thread too
            # Where there is no copy: without the lines it went through the last time.
            raise fresh_copy(error).with_traceback(None) from cause
        return self._result

    def give(self) -> Any:
        """The value, which is ready, to be sent; or `Failed`."""
        return self._result if self._failed is None else self._failed

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
            TypeError, ValueError: they are no time.
            Exception: what its making raised.
        """
        check_timeout(seconds)
        if not self.is_ready:
            bell = Bell()
            self.when_ready(bell.ring)
            deadline = time.monotonic() + seconds if seconds else None
            with executor.waiting():
                bell.wait_until(deadline)
            if not self.is_ready:
                self.give_up(seconds)
        return self.get()

    def give_up(self, seconds: float) -> NoReturn:
        """It did not come within so many seconds."""
        what = f"the function that makes value {spell(self.id)}"
        raise CallTimeout(what, self.owner.name, seconds)

    def _end(self, result: Any, failed: Failed | None) -> None:
        with self._lock:
            if self.is_ready:
                return  # its creator has given up on it
            self._result, self._failed = result, failed
            self.is_ready = True
            waiting, self._waiting = self._waiting, []
        for callback in waiting:
            callback()


def part_of(value: Any, part: str) -> Any:
    """What was asked for of a value: itself, its type, or only that it is there."""
    if part == "nothing":
        return None
    return type(value) if part == "type" and type(value) is not Failed else value
