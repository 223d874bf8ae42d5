"""The values that one worker owns, and who keeps them alive.

A value lives while a handle here refers to it (plain Python references) or a fork elsewhere does
(`_kept`, by the books of `OwnerLedger`). `_used` finds those with handles here by their number, and
keeps nothing alive: a value which refers to itself by a handle is garbage like any other. A value
may be asked for before the call that makes it has come: it is then awaited, until that call comes
or cannot.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from typing import Any, NoReturn
from weakref import WeakValueDictionary

from .. import streams
from .._rpc.futures import Failed, fresh_copy, keepable
from ..errors import (
    CallTimeout,
    ClosedError,
    GradwireError,
    NotAllowedError,
    RemoteError,
    StaleReferenceError,
    WorkerLostError,
)
from ..ids import WorkerInfo
from ..locks import CheckedLock
from ..options import check_timeout
from ..threads import Bell, Executor
from .ledger import OwnerLedger
from .messages import fork_id, maker_of, spell


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
        self._lock = CheckedLock()

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
        """The value, which is ready; raises what its creation raised."""
        if self._failed is not None:
            error, trace = self._failed
            kind = type(error).__qualname__
            cause = RemoteError(self.owner.name, kind, str(error), trace)
            if not isinstance(error, Exception):
                raise cause  # the same exception would end this thread as well
            # If it was not copied: without the frames of the last time.
            raise fresh_copy(error).with_traceback(None) from cause
        if streams.in_use:
            streams.take(self._result)
        return self._result

    def give(self) -> Any:
        """The value, which is ready, to be sent; or `Failed`."""
        return self._result if self._failed is None else self._failed

    def when_ready(self, callback: Callable[[], object]) -> None:
        """Call `callback` when the value is ready or has failed; at once if it already is."""
        with self._lock:
            if not self.is_ready:
                self._waiting.append(callback)
                return
        callback()

    def wait(self, executor: Executor, seconds: float) -> Any:
        """Wait for the value.

        Raises:
            CallTimeout: not within that many seconds; 0 means no limit.
            TypeError, ValueError: not a valid timeout.
            Exception: what its creation raised.
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
        """Fail: it was not created in time."""
        what = f"the function that makes value {spell(self.id)}"
        raise CallTimeout(what, self.owner.name, seconds)

    def _end(self, result: Any, failed: Failed | None) -> None:
        streams.publish()  # it may be asked for from anywhere
        with self._lock:
            if self.is_ready:
                return  # its creator has given up on it
            self._result, self._failed = result, failed
            self.is_ready = True
            waiting, self._waiting = self._waiting, []
        for callback in waiting:
            callback()


def part_of(value: Any, part: str) -> Any:
    """The requested part of a value: itself, its type, or only whether it exists."""
    if part == "nothing":
        return None
    return type(value) if part == "type" and type(value) is not Failed else value


class OwnedValues:
    """Values of one worker."""

    def __init__(self, me: WorkerInfo, *, are_open: bool = False) -> None:
        self._me = me
        self._are_open = are_open
        """Whether any worker may use any of them."""
        self._lock = CheckedLock()
        self._ledger = OwnerLedger()
        self._used: WeakValueDictionary[int, OwnedValue] = WeakValueDictionary()
        self._kept: dict[int, OwnedValue] = {}
        self._awaited: dict[int, OwnedValue] = {}
        self._numbers = itertools.count(1)

    def __repr__(self) -> str:
        return (
            f"<OwnedValues of {self._me.name}: {len(self._kept)} values held by others>"
        )

    def new(self) -> OwnedValue:
        """A value of this worker that is still being created."""
        number = fork_id(self._me.id, next(self._numbers))
        with self._lock:
            self._ledger.fork_released(number, number)  # it is a value's, not a fork's
            owned = self._used[number] = OwnedValue(number, self._me)
            return owned

    def begin(self, number: int, creator: int) -> OwnedValue:
        """The call that creates a value has arrived."""
        with self._lock:
            owned = self._get(number) or OwnedValue(number, self._me)
            self._awaited.pop(number, None)
            if creator != self._me.id and self._ledger.fork_added(
                number, number, creator
            ):
                self._kept[number] = owned
            return owned

    def find(self, number: int, fork: int, user: int) -> OwnedValue:
        """The value, for a worker that has a fork of it; any of its forks, for 0.

        Raises:
            StaleReferenceError: it is gone, or the fork was released.
            NotAllowedError: it was not given to that worker.
        """
        with self._lock:
            if fork and self._ledger.is_over(fork):
                raise self._stale(number)
            if not self._may_use(number, fork, user):
                if self._get(number) is None and not self._ledger.may_come(number):
                    raise self._stale(number)
                raise NotAllowedError(
                    f"value {spell(number)} of worker {self._me.name!r} was not given to worker "
                    f"{user}: only workers that a reference was passed to can use it (unless its "
                    "owner has open_references)"
                )
            return self._get(number) or self._await(number)

    def use(self, number: int, fork: int, sender: int) -> OwnedValue:
        """The value, for a handle on this worker; releases the fork that it came with."""
        owned = self.find(number, fork, sender)
        with self._lock:
            self._used[number] = owned
        if fork:
            self.release([(number, fork)])
        return owned

    def fork(self, owned: OwnedValue, to: int) -> int:
        """A new fork, for another worker."""
        fork = fork_id(self._me.id, next(self._numbers))
        with self._lock:
            if self._ledger.fork_added(owned.id, fork, to):
                self._kept[owned.id] = owned
        return fork

    def adopt(self, number: int, fork: int, holder: int) -> bool:
        """Register a fork that another holder made; whether it counts."""
        with self._lock:
            if self._ledger.was_given(number, fork, holder):
                return True  # requested twice
            giver = maker_of(fork)
            if not (self._are_open or self._ledger.can_pass_on(number, giver)):
                return False
            try:
                owned = self._get(number) or self._await(number)
            except StaleReferenceError:
                self._ledger.fork_released(number, fork)
                return False
            if not self._ledger.fork_added(number, fork, holder):
                return False
            self._kept[number] = owned
            return True

    def release(self, forks: Iterable[tuple[int, int]], by: int | None = None) -> None:
        """Values and forks of them that are held no more; those that are `by`'s to release."""
        with self._lock:
            may = self._ledger.may_release
            forks = [(v, f) for v, f in forks if by is None or may(v, f, by)]
            over = [v for v, fork in forks if self._ledger.fork_released(v, fork)]
            dropped = [self._kept.pop(value, None) for value in over]
        del dropped  # not under the lock: a finalizer may be user code

    def creation_failed(self, number: int, why: str) -> None:
        """The call that creates a value will not arrive, unless it already has."""
        with self._lock:
            owned = self._awaited.pop(number, None)
            if owned is not None or self._get(number) is None:
                self._ledger.fork_released(number, number)
        if owned is not None:
            text = f"value {spell(number)} was never made: {why}"
            owned.fail(GradwireError(text))

    def worker_gone(self, worker: WorkerInfo) -> None:
        """Drop what only the lost worker held, and fail what it was to create."""
        with self._lock:
            over = self._ledger.worker_gone(worker.id)
            dropped = [self._kept.pop(value, None) for value in over]
            orphans = [n for n in self._awaited if maker_of(n) == worker.id]
            failed = [self._awaited.pop(number) for number in orphans]
        del dropped
        for owned in failed:
            owned.fail(WorkerLostError(worker.name, "it was to make this value"))

    def close(self) -> None:
        """Drop everything."""
        with self._lock:
            values = self._values()
            self._kept, self._awaited = {}, {}
        for owned in values.values():
            if not owned.is_ready:  # a thread may be waiting for it
                owned.fail(ClosedError("this worker was shut down"))
        del values

    def info(self) -> list[dict[str, Any]]:
        """The live values and their holders, for `debug_info`."""
        with self._lock:
            values = sorted(self._values().items())
            return [
                {
                    "value": spell(number),
                    "state": owned.state,
                    "forks": {
                        spell(fork): holder
                        for fork, holder in self._ledger.holders(number).items()
                    },
                }
                for number, owned in values
            ]

    def lent(self) -> list[dict[str, Any]]:
        """The values that other workers hold."""
        return [value for value in self.info() if value["forks"]]

    def _may_use(self, number: int, fork: int, user: int) -> bool:
        if self._are_open or user == self._me.id:
            return True
        return self._ledger.was_given(number, fork, user)

    def _get(self, number: int) -> OwnedValue | None:
        return (
            self._kept.get(number)
            or self._awaited.get(number)
            or self._used.get(number)
        )

    def _values(self) -> dict[int, OwnedValue]:
        return {**self._used, **self._awaited, **self._kept}

    def _await(self, number: int) -> OwnedValue:
        if not self._ledger.may_come(number):
            raise self._stale(number)
        owned = self._awaited[number] = OwnedValue(number, self._me)
        return owned

    def _stale(self, number: int) -> StaleReferenceError:
        return StaleReferenceError(
            f"value {spell(number)} of worker {self._me.name!r} has been freed: the reference to "
            "it was released, or arrived too late"
        )
