"""A transport that misbehaves on purpose, by a seed: for tests of everything above.

Wraps another transport. What leaves may be dropped, repeated, delayed (and so overtaken), or the
link cut. Nothing is changed on arrival, so give every worker of a world its own.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass

from .._wire.frames import Parcel
from ..errors import WorkerLostError
from ..threads import Executor
from .around import Around
from .base import Card, Transport


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """How likely each fault is for a parcel, and how long a delay may be."""

    drop: float = 0.0
    repeat: float = 0.0
    delay: float = 0.0
    cut: float = 0.0
    longest_delay: float = 0.01
    kinds: frozenset[int] | None = None
    """Only messages of these kinds are touched; None: all."""

    def __post_init__(self) -> None:
        for name in ("drop", "repeat", "delay", "cut"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)!r}: not a probability")


class FaultyTransport(Around):
    """Another transport, with faults."""

    def __init__(
        self, inner: Transport, executor: Executor, *, seed: int, faults: Faults
    ) -> None:
        super().__init__(inner, executor)
        self.faults = faults
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    def post(
        self, to: Card, call: int, parcel: Parcel, deadline: float | None = None
    ) -> None:
        self._send(to.id, parcel.kind, lambda: self._inner.post(to, call, copy(parcel)))

    def reply(self, to: int, call: int, parcel: Parcel) -> None:
        self._send(to, parcel.kind, lambda: self._inner.reply(to, call, copy(parcel)))

    def _send(self, to: int, kind: int, send: Callable[[], None]) -> None:
        faults = self.faults
        if faults.kinds is not None and kind not in faults.kinds:
            send()
            return
        with (
            self._lock
        ):  # one draw each, whatever happens, so that seeds stay comparable
            cut, drop, repeat, delay, span = (self._random.random() for _ in range(5))
        if cut < faults.cut:
            self._cut(to)
            return
        if drop < faults.drop:
            return
        for _ in range(2 if repeat < faults.repeat else 1):
            if delay < faults.delay:
                self._later(span * faults.longest_delay, send)
            else:
                send()

    def _later(self, seconds: float, send: Callable[[], None]) -> None:
        def late() -> None:
            try:
                send()
            except WorkerLostError:
                pass  # whoever waits for an answer was told

        self._executor.call_at(time.monotonic() + seconds, late)

    def _cut(self, to: int) -> None:
        if self._receiver is not None:
            self._receiver.lost(to, "the link was cut")
        self._inner.forget(to)  # also if it was lost before: the other end may not know
