"""Objects whose methods run one at a time when other workers call them.

An object is serial if its class is marked, or if it was created by `made_serial`. Its lock is kept
in a table by the object's address for as long as the object lives: nothing is added to the object
itself.
"""

from __future__ import annotations

import types
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from ..locks import CheckedLock
from ..threads import Bell

C = TypeVar("C", bound=type)

_MARK = "__gradwire_serial__"


def serial(cls: C) -> C:
    """Mark a class, `cls`: method calls from workers on one of its objects run one at a time.

    They run in the order in which they arrive. Without the mark they run concurrently, in several
    threads.

    >>> @gw.serial
    ... class Counter:
    ...     count = 0
    ...     def increment(self):
    ...         self.count += 1
    >>> counter = gw.remote("worker1", Counter)
    >>> futures = [counter.rpc_async().increment() for _ in range(100)]
    >>> _ = [future.wait() for future in futures]
    >>> counter.to_here().count
    100
    """
    setattr(cls, _MARK, True)
    return cls


class FairLock:
    """A fair lock: acquired in order of arrival, and released by any thread."""

    def __init__(self) -> None:
        self._lock = CheckedLock()
        self._is_taken = False
        self._waiting: deque[Bell] = deque()

    def acquire(self, waiting: Callable[[], AbstractContextManager[None]]) -> None:
        """Acquire the lock, waiting inside `waiting()`."""
        with self._lock:
            if not self._is_taken:
                self._is_taken = True
                return
            bell = Bell()
            self._waiting.append(bell)
        with waiting():
            bell.wait(None)

    def release(self) -> None:
        """Release the lock to the next in the queue."""
        with self._lock:
            if self._waiting:
                self._waiting.popleft().ring()
            else:
                self._is_taken = False


_locks: dict[int, FairLock] = {}
"""By address of the object."""
_noting = CheckedLock()


def lock_of(value: Any) -> FairLock | None:
    """The fair lock of a serial object; None if the object is not serial."""
    found = _locks.get(id(value))
    if found is None and getattr(type(value), _MARK, False):
        return _note(value)
    return found


def made_serial(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function and mark the object that it returns as serial.

    Raises:
        TypeError: it does not support weak references.
    """
    value = func(*(args or ()), **(kwargs or {}))
    if type(value) is types.CoroutineType:
        return _awaited(value)
    _note(value)
    return value


async def _awaited(coroutine: Any) -> Any:
    value = await coroutine
    _note(value)
    return value


def _note(value: Any) -> FairLock:
    address = id(value)
    with _noting:
        if address not in _locks:
            try:
                weakref.finalize(value, _locks.pop, address, None).atexit = False
            except TypeError:
                raise TypeError(
                    f"a {type(value).__qualname__} cannot be serial: return an object of a "
                    "class of your own"
                ) from None
            _locks[address] = FairLock()
        return _locks[address]
