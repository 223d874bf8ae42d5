"""The transport inside one process: a whole world in one test.

Parcels are turned into the frames the other side would get, with their own copy of all bytes, and
delivered on the receiver's executor: in order, or in an order chosen by a seed.
"""

from __future__ import annotations

import random
import threading

from .._wire.frames import Frame, Parcel
from .._wire.messages import FAILURE, RESULT
from ..errors import WorkerLostError
from ..threads import Executor
from .base import Answer, Card, IsOver, Receiver, Traffic


class LoopbackNetwork:
    """Connects the workers of one process. With a seed, messages overtake each other."""

    def __init__(self, seed: int | None = None) -> None:
        self.random = None if seed is None else random.Random(seed)
        self.lock = threading.Lock()
        self.workers: dict[int, LoopbackTransport] = {}

    def __repr__(self) -> str:
        return f"<LoopbackNetwork of workers {sorted(self.workers)}>"

    def others(self, than: LoopbackTransport) -> list[LoopbackTransport]:
        with self.lock:
            return [t for t in self.workers.values() if t is not than]


class LoopbackTransport:
    """One worker's place in the network."""

    has_lanes = False
    carries_own = False

    def __init__(self, network: LoopbackNetwork, executor: Executor) -> None:
        self.traffic = Traffic()
        self._network = network
        self._executor = executor
        self._receiver: Receiver | None = None
        self.me = -1
        self._pending: list[tuple[int, Frame]] = []
        self._in_delivery: list[tuple[int, Frame]] = []

    def __repr__(self) -> str:
        return f"<LoopbackTransport of worker {self.me}>"

    def links(self) -> dict[int, str]:
        others = self._network.others(self)
        return {other.me: "in this process" for other in others}

    def card(self, name: str, number: int, main: str) -> Card:
        return Card(name=name, id=number, main=main)

    def start(self, me: int, key: bytes, receiver: Receiver) -> None:
        self.me = me
        self._receiver = receiver
        with self._network.lock:
            self._network.workers[me] = self

    def post(
        self, to: Card, call: int, parcel: Parcel, deadline: float | None = None
    ) -> None:
        other = self._network.workers.get(to.id)
        if other is None:
            raise WorkerLostError(to.name, "it is not in this process any more")
        self._hand(other, call, parcel)

    def reply(self, to: int, call: int, parcel: Parcel) -> None:
        other = self._network.workers.get(to)
        if other is not None:
            self._hand(other, call, parcel)

    def exchange(
        self,
        to: Card,
        parcel: Parcel,
        timeout: float | None,
        is_over: IsOver | None = None,
    ) -> Frame:
        raise NotImplementedError("loopback has no lanes")

    def attend(
        self, to: int, call: int, answer: Answer, deadline: float | None
    ) -> None:
        """There is nothing to read: what comes is delivered by the executor."""

    def watch(self, to: Card) -> None:
        """It is noticed anyway."""

    def forget(self, worker: int) -> None:
        """As the end of a connection would be noticed at its other end, so is this."""
        other = self._network.workers.get(worker)
        if other is not None:
            other.hear_loss(self.me, "it has ended the connection")

    def close(self) -> None:
        for other in self._leave():
            other.hear_leaving(self.me)

    def kill(self) -> None:
        """Vanish without a goodbye, as a killed process would."""
        for other in self._leave():
            other.hear_loss(self.me, "it was killed")

    def _hand(self, other: LoopbackTransport, call: int, parcel: Parcel) -> None:
        length = len(parcel.body) + parcel.bulk_length
        self.traffic.sent += length
        other.traffic.received += length
        other.put(self.me, parcel.arrive(call))

    def put(self, sender: int, frame: Frame) -> None:
        with self._network.lock:
            self._pending.append((sender, frame))
        self._executor.submit(self._deliver)

    def hear_leaving(self, worker: int) -> None:
        if self._receiver is None:
            return
        with self._network.lock:
            entries = [*self._in_delivery, *self._pending]
        for sender, frame in entries:
            # A goodbye overtakes no answer. That these come twice is harmless.
            if sender == worker and frame.kind in (RESULT, FAILURE):
                self._receiver.arrived(sender, frame)
        self._receiver.left(worker)

    def hear_loss(self, worker: int, reason: str) -> None:
        if self._receiver is not None:
            self._receiver.lost(worker, reason)

    def _leave(self) -> list[LoopbackTransport]:
        with self._network.lock:
            known = self._network.workers.pop(self.me, None) is not None
        return self._network.others(self) if known else []

    def _deliver(self) -> None:
        with self._network.lock:
            chance = self._network.random
            index = chance.randrange(len(self._pending)) if chance else 0
            entry = self._pending.pop(index)
            self._in_delivery.append(entry)
        try:
            if self._receiver is not None:
                self._receiver.arrived(*entry)
        finally:
            with self._network.lock:
                self._in_delivery.remove(entry)
