"""Learns from Ray that an actor is gone, and tells the world.

Workers that are connected find out themselves, in most cases as quickly. A node that is cut off
closes no connection; whichever notices first, Ray or our heartbeat, decides.
"""

from __future__ import annotations

import threading
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayActorError

from ..errors import GradwireError
from ..worker import Worker

_LOOK = 0.2  # seconds until a watch that was closed ends


class Watch:
    """One thread of the driver that waits for the end of any of these actors."""

    def __init__(self, worker: Worker, actors: list[Any]) -> None:
        self._worker = worker
        self._closed = threading.Event()
        self._numbers: dict[Any, int] = {}
        """By actor: the id of the worker that it is now."""
        self._pending = {actor.number.remote(): actor for actor in actors}
        self._thread = threading.Thread(target=self._run, name="gradwire ray watch")
        self._thread.daemon = True
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.is_set() and self._pending:
            done, _ = ray.wait([*self._pending], num_returns=1, timeout=_LOOK)
            for ref in done:
                self._take(ref, self._pending.pop(ref))

    def _take(self, ref: Any, actor: Any) -> None:
        """An actor has joined, and is watched from now on; or it is gone, and may come back."""
        try:
            self._numbers[actor] = ray.get(ref)
        except RayActorError as error:
            if actor in self._numbers and not self._closed.is_set():
                self._tell(self._numbers.pop(actor), f"Ray says: {error}".strip())
            if not isinstance(error, ActorDiedError):
                self._pending[actor.number.remote()] = actor
        else:
            self._pending[actor.live.remote()] = actor

    def _tell(self, number: int, reason: str) -> None:
        self._worker.count_as_lost(number, reason)
        for info in self._worker.get_worker_infos():
            if info.id != self._worker.id:
                try:
                    call = self._worker.rpc_async(info, hear_of_loss, (number, reason))
                except GradwireError:
                    continue  # it is gone as well
                call.add_done_callback(_look_at)


def _look_at(call: Any) -> None:
    """A worker that is gone, or allows no such calls, finds out by itself."""
    try:
        call.value()
    except Exception:  # noqa: BLE001 of another process
        pass


def hear_of_loss(number: int, reason: str) -> None:
    """Run on the other workers of the world."""
    from ..api import current_worker

    current_worker().count_as_lost(number, reason)
