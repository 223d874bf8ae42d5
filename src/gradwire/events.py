"""Events and their subscribers.

`Event` is a list of callbacks with one rule: an exception in a callback is logged and does not
affect the others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

log = logging.getLogger("gradwire")


class Event(Generic[T]):
    """The callbacks of one kind of event."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._callbacks: list[Callable[[T], object]] = []

    def __repr__(self) -> str:
        return f"<Event {self._name}: {len(self._callbacks)} callbacks>"

    def subscribe(self, callback: Callable[[T], object]) -> Callable[[], None]:
        """Call `callback` each time; returns a function that unsubscribes it."""
        self._callbacks.append(callback)

        def unsubscribe() -> None:
            if callback in self._callbacks:
                self._callbacks.remove(callback)

        return unsubscribe

    def fire(self, what: T) -> None:
        for callback in list(self._callbacks):
            try:
                callback(what)
            except Exception:
                log.exception("a callback for %s raised", self._name)
