"""Telling other workers that contexts have ended, until they acknowledge it.

The report is piggybacked on the next request of another context to that worker, one per request, so
that it wakes no thread at either end. What is left after a moment, because there was no such
request or no response, is batched into messages of its own. Reports are idempotent.

The worker that began a context tells the workers it knows, and these tell those they know. A worker
that would have learned it from a lost one *claims* the context where it was begun: that worker then
tells it of the end, or responds that the context has ended.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from .._rpc.deferred_requests import Deferred
from .._rpc.futures import CallFuture
from ..errors import ClosedError, GradwireError, WorkerLostError
from ..threads import Executor
from .messages import Claim, Release

log = logging.getLogger("gradwire")

Send = Callable[[int, Release | Claim], CallFuture]

_GATHER = 0.02  # seconds; reports that no request has carried are sent after one to two of these
_TRIES = 5
_PAUSE = 0.5


class Word:
    """The report that a context has ended, for one worker; the freight of its request."""

    __slots__ = ("context", "is_told", "worker")

    def __init__(self, worker: int, context: int) -> None:
        self.worker = worker
        self.context = context
        self.is_told = False

    def delivered(self) -> None:
        self.is_told = True

    def in_doubt(self) -> None:
        """It will be sent once more."""


class Releases:
    """The reports of one worker."""

    def __init__(self, executor: Executor, send: Send) -> None:
        self._executor = executor
        self._send = send
        self._free: defaultdict[int, list[Word]] = defaultdict(list)
        """By worker, those that no request takes along, the oldest first."""
        self._deferred: Deferred[Word] = Deferred(
            executor, _GATHER, due=self._is_due, late=self._tell_all
        )

    def add(self, worker: int, context: int) -> None:
        """Tell a worker soon."""
        word = Word(worker, context)
        self._free[worker].append(word)
        self._deferred.add(word)

    def take(self, worker: int) -> Word | None:
        """The report to piggyback on a request to a worker."""
        free = self._free.get(worker)
        try:
            return free.pop() if free else None  # atomic: needs no lock
        except IndexError:  # another thread was first
            return None

    def claim(
        self, worker: int, contexts: Sequence[int], over: Callable[[int], None]
    ) -> None:
        """Claim contexts at the worker that began them; `over` is told which have ended."""

        def answered(found: Any) -> None:
            for context in found:
                over(context)

        self._say(worker, Claim(tuple(contexts)), answered)

    def _is_due(self, word: Word) -> bool:
        """Whether a late report is still unsent; no request takes it from now on."""
        try:
            self._free[word.worker].remove(word)
        except ValueError:  # a request has carried it
            pass
        return not word.is_told

    def _tell_all(self, late: Iterable[Word]) -> None:
        contexts: dict[int, list[int]] = {}
        for word in late:
            contexts.setdefault(word.worker, []).append(word.context)
        for worker, over in contexts.items():
            self._say(worker, Release(tuple(over)))

    def _say(
        self,
        worker: int,
        message: Release | Claim,
        heard: Callable[[Any], None] | None = None,
        tries: int = _TRIES,
    ) -> None:
        def answered() -> None:
            try:
                answer = future.value()
                if heard is not None:
                    heard(answer)
            except (WorkerLostError, ClosedError):
                pass  # it has left, or this worker has
            except Exception as error:  # noqa: BLE001 whatever it is: once more
                if tries > 1:
                    again = partial(self._say, worker, message, heard, tries - 1)
                    self._executor.call_at(time.monotonic() + _PAUSE, again)
                else:
                    log.warning(
                        "%s: no response from worker %d: %s", message, worker, error
                    )

        try:
            future = self._send(worker, message)
        except GradwireError:
            return
        future.on_done(answered)
