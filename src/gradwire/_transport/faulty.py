"""A transport that injects faults, chosen by a seed: for tests of everything above.

Wraps another transport. Requests and responses may be dropped, duplicated, delayed (and so
reordered), or the connection cut. It acts only on what its worker sends, so give every worker of a
world its own.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass

from .._wire.frames import Frame, Parcel
from ..errors import WorkerLostError
from ..locks import CheckedLock
from ..threads import Executor
from .base import NAP, Answer, Card, IsOver, Receiver, Respond, Traffic, Transport
from .keys import Keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """The probability of each fault, and the longest delay."""

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


class WrappedTransport:
    """Delegates everything to another transport. A base for those that change a part of it."""

    def __init__(self, inner: Transport, executor: Executor) -> None:
        self._inner = inner
        self._executor = executor
        self._receiver: Receiver | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} around {self._inner!r}>"

    @property
    def traffic(self) -> Traffic:
        return self._inner.traffic

    def links(self) -> dict[int, str]:
        return self._inner.links()

    def card(self, name: str, number: int, main: str) -> Card:
        return self._inner.card(name, number, main)

    def start(self, me: int, keys: Keys, receiver: Receiver) -> None:
        self._receiver = receiver
        self._inner.start(me, keys, receiver)

    def share_host(self, workers: int) -> None:
        self._inner.share_host(workers)

    def post(
        self, to: Card, call: int, parcel: Parcel, deadline: float | None = None
    ) -> None:
        self._inner.post(to, call, parcel, deadline)

    def exchange(
        self,
        to: Card,
        call: int,
        parcel: Parcel,
        *,
        deadline: float | None,
        is_over: IsOver | None = None,
    ) -> Frame:
        return self._inner.exchange(
            to, call, parcel, deadline=deadline, is_over=is_over
        )

    def attend(
        self, to: int, call: int, answer: Answer, deadline: float | None
    ) -> None:
        self._inner.attend(to, call, answer, deadline)

    def watch(self, to: Card) -> None:
        self._inner.watch(to)

    def forget(self, worker: int) -> None:
        self._inner.forget(worker)

    def close(self) -> None:
        self._inner.close()


@dataclass(slots=True)
class _Fate:
    """What happens to one parcel."""

    is_cut: bool = False
    is_dropped: bool = False
    delays: tuple[float, ...] = (0.0,)
    """Seconds, one for each time that it is sent."""


class FaultyTransport(WrappedTransport):
    """Another transport, with faults."""

    def __init__(
        self, inner: Transport, executor: Executor, *, seed: int, faults: Faults
    ) -> None:
        super().__init__(inner, executor)
        self.faults = faults
        self._me = -1
        self._random = random.Random(seed)
        self._lock = CheckedLock()
        self._gone: dict[int, str] = {}
        self._ended = threading.Condition()

    def start(self, me: int, keys: Keys, receiver: Receiver) -> None:
        self._me = me
        self._receiver = _FaultyReceiver(self, receiver)
        self._inner.start(me, keys, self._receiver)

    def post(
        self, to: Card, call: int, parcel: Parcel, deadline: float | None = None
    ) -> None:
        self.send(to.id, parcel, lambda: self._inner.post(to, call, copy(parcel)))

    def exchange(
        self,
        to: Card,
        call: int,
        parcel: Parcel,
        *,
        deadline: float | None,
        is_over: IsOver | None = None,
    ) -> Frame:
        fate = self._fate(to.id, parcel.kind)
        if fate.is_cut:
            self._cut(to.id)
            raise WorkerLostError(to.name, "the link was cut")
        if fate.is_dropped:
            parcel.was_sent()
            self._wait_in_vain(to, float("inf"), deadline, is_over)
        if fate.delays[0]:
            until = time.monotonic() + fate.delays[0]
            self._wait_in_vain(to, until, deadline, is_over)
        repeat = copy(parcel)
        frame = self._inner.exchange(
            to, call, parcel, deadline=deadline, is_over=is_over
        )
        for delay in fate.delays[1:]:  # after it, for its response goes another way
            self._later(delay, lambda: self._inner.post(to, call, repeat))
        return frame

    def close(self) -> None:
        super().close()
        with self._ended:
            self._ended.notify_all()

    def send(self, to: int, parcel: Parcel, send: Callable[[], None]) -> None:
        """Send a parcel according to its fate."""
        fate = self._fate(to, parcel.kind)
        if fate.is_cut:
            self._cut(to)
        elif not fate.is_dropped:
            for delay in fate.delays:
                if delay:
                    self._later(delay, send)
                else:
                    send()

    def hear_end(self, worker: int, reason: str) -> None:
        """A worker is gone: release whoever waits for it."""
        with self._ended:
            self._gone[worker] = reason
            self._ended.notify_all()

    def _fate(self, to: int, kind: int) -> _Fate:
        faults = self.faults
        if to == self._me or (faults.kinds is not None and kind not in faults.kinds):
            return _Fate()
        with (
            self._lock
        ):  # one draw each, whatever happens, so that seeds stay comparable
            cut, drop, repeat, delay, span = (self._random.random() for _ in range(5))
        seconds = span * faults.longest_delay if delay < faults.delay else 0.0
        times = 2 if repeat < faults.repeat else 1
        return _Fate(cut < faults.cut, drop < faults.drop, (seconds,) * times)

    def _wait_in_vain(
        self, to: Card, until: float, deadline: float | None, is_over: IsOver | None
    ) -> None:
        """Wait until then.

        Raises:
            TimeoutError, WorkerLostError: as `exchange`.
        """
        with self._executor.waiting(), self._ended:
            while (left := until - time.monotonic()) > 0:
                if to.id in self._gone:
                    raise WorkerLostError(to.name, self._gone[to.id])
                if deadline is not None:
                    left = min(left, deadline - time.monotonic())
                if left <= 0 or (is_over is not None and is_over()):
                    raise TimeoutError
                self._ended.wait(min(left, NAP))

    def _later(self, seconds: float, send: Callable[[], None]) -> None:
        def late() -> None:
            try:
                send()
            except WorkerLostError:
                pass  # the waiter for the response was told

        self._executor.call_at(time.monotonic() + seconds, late)

    def _cut(self, to: int) -> None:
        if self._receiver is not None:
            self._receiver.lost(to, "the link was cut")
        self._inner.forget(to)  # also if it was lost before: the other end may not know


class _FaultyReceiver:
    """The layer above, with faults in its responses."""

    def __init__(self, transport: FaultyTransport, receiver: Receiver) -> None:
        self._transport = transport
        self._receiver = receiver
        self.complete = receiver.complete
        self.knows = receiver.knows
        self.name_of = receiver.name_of
        self.refused = receiver.refused

    def serve(self, sender: int, frame: Frame, respond: Respond) -> None:
        send = self._transport.send
        self._receiver.serve(
            sender,
            frame,
            lambda parcel: send(sender, parcel, lambda: respond(copy(parcel))),
        )

    def lost(self, worker: int, reason: str) -> None:
        self._transport.hear_end(worker, reason)
        self._receiver.lost(worker, reason)

    def left(self, worker: int) -> None:
        self._transport.hear_end(worker, "it has left")
        self._receiver.left(worker)
