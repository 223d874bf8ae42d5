"""A transport around another one: passes everything on. For those that change a part of it."""

from __future__ import annotations

from .._wire.frames import Frame, Parcel
from ..threads import Executor
from .base import Answer, Card, IsOver, Receiver, Traffic, Transport


class Around:
    """Another transport, without its lanes: all requests pass through `post`."""

    has_lanes = False
    carries_own = False

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

    def start(self, me: int, key: bytes, receiver: Receiver) -> None:
        self._receiver = receiver
        self._inner.start(me, key, receiver)

    def post(
        self, to: Card, call: int, parcel: Parcel, deadline: float | None = None
    ) -> None:
        self._inner.post(to, call, parcel, deadline)

    def reply(self, to: int, call: int, parcel: Parcel) -> None:
        self._inner.reply(to, call, parcel)

    def exchange(
        self,
        to: Card,
        parcel: Parcel,
        timeout: float | None,
        is_over: IsOver | None = None,
    ) -> Frame:
        raise NotImplementedError(f"{self!r} has no lanes")

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
