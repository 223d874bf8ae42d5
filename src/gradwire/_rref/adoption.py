"""Forks that another holder made, until their owner has registered them.

A function that is passed such a reference runs at once. The first fetch of the value carries the
registration; what is not fetched within a moment is registered by an `Adopt` of its own, and the
request that brought the reference is answered only after that. Until then its sender keeps its own
fork, and so the value.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

from .._rpc.deferred_requests import Deferred
from .._rpc.futures import CallFuture
from ..errors import CallTimeout, GradwireError
from ..threads import Executor
from .ledger import Holding
from .messages import freed

_MOMENT = 0.01  # seconds that a fetch has to carry the registration


class Registry(Protocol):
    """Registers forks with their owners (`serialization.py`)."""

    def ask_to_adopt(self, holding: Holding) -> CallFuture: ...

    def adopted(self, holding: Holding, sender: int, token: int) -> None: ...


class Adoption:
    """The registration of one fork. Everything but `wait` may be called at any time, and again."""

    def __init__(
        self, registry: Registry, holding: Holding, sender: int, token: int
    ) -> None:
        self.is_over = False
        """The owner has registered the fork, or nobody needs it any more."""
        self._registry = registry
        self._holding = holding
        self._sender = sender
        self._token = token
        self._answer: CallFuture | None = None

    def begin(self) -> None:
        """Send the request to the owner, without waiting for the response."""
        if not self.is_over and self._answer is None:
            answer = self._answer = self._registry.ask_to_adopt(self._holding)
            answer.fate.seen = True
            answer.on_done(partial(self._answered, answer))

    def _answered(self, answer: CallFuture) -> None:
        try:
            if answer.value():
                self.succeeded()
        except CallTimeout:
            self._answer = None  # it may be lost: retry
            begin_all([self])
        except GradwireError:
            pass  # the user of the reference gets the error

    def succeeded(self) -> None:
        """The owner has registered the fork."""
        if not self.is_over:
            self.is_over = True
            self._registry.adopted(self._holding, self._sender, self._token)

    def wait(self, deadline: float | None = None) -> None:
        """Wait for the owner.

        Raises:
            StaleReferenceError: the value is gone.
            WorkerLostError: the owner is gone.
            TimeoutError: it was silent until the deadline.
        """
        while not self.is_over:
            self.begin()
            answer = self._answer
            assert answer is not None
            left = None if deadline is None else deadline - time.monotonic()
            try:
                accepted = answer.wait(left)
            except CallTimeout:
                if self._answer is answer:
                    self._answer = None
                continue
            if not accepted:
                raise freed(self._holding.value)
            self.succeeded()

    def settle(self) -> None:
        """Wait until the owner knows of the fork, or never will: then its use raises why."""
        try:
            self.wait()
        except GradwireError:
            pass


class Adoptions:
    """The adoptions of one worker that wait to be piggybacked on a fetch."""

    def __init__(self, executor: Executor) -> None:
        self._deferred: Deferred[Adoption] = Deferred(
            executor, _MOMENT, due=_is_pending, late=begin_all
        )
        self.add: Callable[[Adoption], None] = self._deferred.add


def _is_pending(adoption: Adoption) -> bool:
    return not adoption.is_over


def begin_all(adoptions: list[Adoption]) -> None:
    """Send the requests of these to their owners, without waiting for the responses."""
    for adoption in adoptions:
        try:
            adoption.begin()
        except GradwireError:
            pass  # the owner is gone, or we are: the user of the reference gets the error
