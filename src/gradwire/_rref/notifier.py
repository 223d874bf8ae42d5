"""Sends notes about references: batches them for a moment, sends, retries.

One thread, started with the first reference, which reads what `HeldForks` puts into its queue.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import Empty

from .._rpc.agent import Agent
from .._rpc.futures import CallFuture
from ..errors import CallTimeout, GradwireError
from ..locks import CheckedLock
from .held_forks import HeldForks
from .messages import Notes, Recall

_GATHER = 0.03  # seconds for which notes are batched
_RETRY = 2.0  # seconds without a response before a retry
_LOOK = 0.25  # seconds between checks for unacknowledged notes


class Notifier:
    """The background thread that sends the notes of one worker."""

    def __init__(
        self,
        agent: Agent,
        held_forks: HeldForks,
        host: Callable[[Callable[[], object]], None],
    ) -> None:
        self.said = 0  # notes sent so far
        self._agent = agent
        self._held_forks = held_forks
        self._host = host
        self._queue = held_forks.events
        self._notes: list[tuple[int, Notes, CallFuture]] = []
        self._recalls: list[tuple[int, CallFuture]] = []
        self._tidying = CheckedLock()
        self._started = threading.Lock()
        self._stop = threading.Event()
        held_forks.watch = self.start

    def start(self) -> None:
        """Start the thread, if it does not run yet."""
        if self._started.acquire(blocking=False):
            self._host(self._run)

    def tidy(self, *, ask_until: float = 0.0) -> None:
        """Send all notes now, and ask about all references in doubt."""
        with self._tidying:
            self._look_at_answers()
            self._held_forks.handles_dropped(self._take_dropped())
            for worker, notes in self._held_forks.take_notes().items():
                self._send_notes(worker, notes)
            until = ask_until or time.monotonic()
            for token, transit in self._held_forks.take_doubts(until).items():
                recall = Recall(transit.child.owner, transit.child.fork, token)
                answer = self._request(transit.to, recall)
                if answer is None:
                    self._held_forks.child_settled(token, arrived=False)
                else:
                    self._recalls.append((token, answer))

    @property
    def unanswered(self) -> list[CallFuture]:
        with self._tidying:
            notes = [answer for *_, answer in self._notes]
            return notes + [answer for _, answer in self._recalls]

    def close(self) -> None:
        self._stop.set()
        self._queue.put(None)

    def _run(self) -> None:
        while not self._stop.wait(
            _GATHER
        ):  # each wake-up disturbs the threads that poll
            if self._queue.empty():
                self._sleep()
            else:
                self.tidy()

    def _sleep(self) -> None:
        """Sleep until there are notes; then batch them for a while."""
        try:
            item = self._queue.get(timeout=_LOOK if self._is_waiting() else None)
        except Empty:
            self.tidy()
        else:
            self._queue.put(item)

    def _is_waiting(self) -> bool:
        return bool(self._notes or self._recalls or self._held_forks.has_doubts)

    def _take_dropped(self) -> list[tuple[int, int]]:
        dropped = []
        for _ in range(self._queue.qsize()):
            try:
                item = self._queue.get_nowait()
            except Empty:
                break
            if item is not None:
                dropped.append(item)
        return dropped

    def _send_notes(self, worker: int, notes: Notes) -> None:
        self.said += 1
        answer = self._request(worker, notes)
        if answer is not None:
            self._notes.append((worker, notes, answer))

    def _request(self, worker: int, message: Notes | Recall) -> CallFuture | None:
        try:
            return self._agent.request(worker, message, _RETRY)
        except GradwireError:
            return None  # it is gone, or we are: then nothing is left to send

    def _look_at_answers(self) -> None:
        notes, self._notes = self._notes, []
        for worker, said, answer in notes:
            if not answer.done():
                self._notes.append((worker, said, answer))
            elif _outcome(answer) is _AGAIN:
                self._held_forks.put_back(worker, said)
        recalls, self._recalls = self._recalls, []
        for token, answer in recalls:
            if not answer.done():
                self._recalls.append((token, answer))
                continue
            arrived = _outcome(answer)
            if arrived is _AGAIN:
                self._held_forks.child_doubted(token)
            elif arrived is None:
                self._held_forks.child_expected(token, _LOOK)
            else:
                self._held_forks.child_settled(token, bool(arrived))


_AGAIN = object()


def _outcome(answer: CallFuture) -> object:
    """The response; _AGAIN if there was none; False if there never will be."""
    try:
        return answer.value()
    except CallTimeout:
        return _AGAIN
    except Exception:  # noqa: BLE001 it cannot be read, or will not come
        return False
