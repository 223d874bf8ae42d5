"""The transport within one process: a whole world in one test, and a worker's requests to itself.

Parcels are converted to the frames that the other side would get, with their own copy of all bytes,
and delivered on the receiver's executor: in order, or in an order chosen by a seed.
"""

from __future__ import annotations

import logging
import random
from functools import partial
from typing import NamedTuple

from .._wire.frames import Frame, Parcel
from ..errors import ProtocolError, WorkerLostError
from ..locks import CheckedLock
from ..threads import Bell, Executor
from .base import Answer, Card, IsOver, Receiver, Traffic, check_wait
from .exchange import Exchange
from .keys import Keys

log = logging.getLogger("gradwire")


class LoopbackNetwork:
    """Connects the workers of one process. With a seed, messages are reordered."""

    def __init__(self, seed: int | None = None) -> None:
        self.random = None if seed is None else random.Random(seed)
        self.lock = CheckedLock()
        self.workers: dict[int, LoopbackTransport] = {}

    def __repr__(self) -> str:
        return f"<LoopbackNetwork of workers {sorted(self.workers)}>"

    def others(self, than: LoopbackTransport) -> list[LoopbackTransport]:
        with self.lock:
            return [t for t in self.workers.values() if t is not than]


class _Message(NamedTuple):
    """A frame in flight."""

    sender: int
    frame: Frame
    is_request: bool


class LoopbackTransport:
    """One worker's end of the network."""

    def __init__(self, network: LoopbackNetwork, executor: Executor) -> None:
        self.traffic = Traffic()
        self._network = network
        self._executor = executor
        self._receiver: Receiver | None = None
        self.me = -1
        self._pending: list[_Message] = []
        self._in_delivery: list[_Message] = []
        self._exchanges: dict[tuple[int, int], Exchange] = {}  # by worker and call

    def __repr__(self) -> str:
        return f"<LoopbackTransport of worker {self.me}>"

    def links(self) -> dict[int, str]:
        others = self._network.others(self)
        return {other.me: "in this process" for other in others}

    def card(self, name: str, number: int, main: str) -> Card:
        return Card(name=name, id=number, main=main)

    def start(self, me: int, keys: Keys, receiver: Receiver) -> None:
        self.me = me
        self._receiver = receiver
        with self._network.lock:
            self._network.workers[me] = self

    def share_host(self, workers: int) -> None:
        """Nothing here polls."""

    def post(
        self, to: Card, call: int, parcel: Parcel, deadline: float | None = None
    ) -> None:
        self._send(self._find(to), call, parcel, is_request=True)

    def exchange(
        self,
        to: Card,
        call: int,
        parcel: Parcel,
        *,
        deadline: float | None,
        is_over: IsOver | None = None,
    ) -> Frame:
        key, exchange, bell = (to.id, call), Exchange(), Bell()
        exchange.on_done(bell.ring)
        self._exchanges[key] = exchange
        try:
            self._send(self._find(to), call, parcel, is_request=True)
            parcel.was_sent()
            with self._executor.waiting():
                while not exchange.done():
                    bell.wait_until(check_wait(deadline, is_over))
        finally:
            self._exchanges.pop(key, None)
        if exchange.frame is None:
            raise WorkerLostError(to.name, exchange.reason or "")
        return exchange.frame

    def attend(
        self, to: int, call: int, answer: Answer, deadline: float | None
    ) -> None:
        """There is nothing to read: what comes is delivered by the executor."""

    def watch(self, to: Card) -> None:
        """Losses are always noticed here."""

    def forget(self, worker: int) -> None:
        """As the end of a connection would be noticed at its other end, so is this."""
        self._fail_exchanges(worker, "connection closed")
        other = self._network.workers.get(worker)
        if other is not None:
            other.hear_loss(self.me, "it has ended the connection")

    def close(self) -> None:
        for other in self._leave():
            other.hear_leaving(self.me)

    def kill(self) -> None:
        """Vanish without a goodbye, like a killed process."""
        for other in self._leave():
            other.hear_loss(self.me, "it was killed")

    def put(self, message: _Message) -> None:
        """Deliver a message."""
        with self._network.lock:  # both or none, also for signal handlers
            self._pending.append(message)
            self._executor.submit(self._deliver)

    def hear_leaving(self, worker: int) -> None:
        if self._receiver is None:
            return
        with self._network.lock:
            messages = [*self._in_delivery, *self._pending]
        for message in messages:
            # A goodbye overtakes no response. That these come twice is harmless.
            if message.sender == worker and not message.is_request:
                self._respond(message)
        self._fail_exchanges(worker, "it has left")
        self._receiver.left(worker)

    def hear_loss(self, worker: int, reason: str) -> None:
        self._fail_exchanges(worker, reason)
        if self._receiver is not None:
            self._receiver.lost(worker, reason)

    def _find(self, to: Card) -> LoopbackTransport:
        other = self._network.workers.get(to.id)
        if other is None:
            raise WorkerLostError(to.name, "it is not in this process any more")
        return other

    def _send(
        self, other: LoopbackTransport, call: int, parcel: Parcel, *, is_request: bool
    ) -> None:
        length = len(parcel.body) + parcel.bulk_length
        if parcel.device_at >= 0:
            self.traffic.direct += parcel.bulk_length - parcel.device_at
        self.traffic.sent += length
        other.traffic.received += length
        other.put(_Message(self.me, parcel.arrive(call), is_request))

    def _reply(self, to: int, call: int, parcel: Parcel) -> None:
        other = self._network.workers.get(to)
        if other is not None:
            self._send(other, call, parcel, is_request=False)
            parcel.was_sent()

    def _leave(self) -> list[LoopbackTransport]:
        with self._network.lock:
            known = self._network.workers.pop(self.me, None) is not None
        for worker, _ in list(self._exchanges):
            self._fail_exchanges(worker, "this worker was shut down")
        return self._network.others(self) if known else []

    def _fail_exchanges(self, worker: int, reason: str) -> None:
        for (to, _), waiting in list(self._exchanges.items()):
            if to == worker:
                waiting.fail(reason)

    def _deliver(self) -> None:
        with self._network.lock:
            chance = self._network.random
            index = chance.randrange(len(self._pending)) if chance else 0
            message = self._pending.pop(index)
            self._in_delivery.append(message)
        try:
            if not message.is_request:
                self._respond(message)
            elif self._receiver is not None:
                sender, frame, _ = message
                respond = partial(self._reply, sender, frame.call)
                self._receiver.serve(sender, frame, respond)
        except ProtocolError as error:
            log.warning("dropped a request: %s", error)
        finally:
            with self._network.lock:
                self._in_delivery.remove(message)

    def _respond(self, message: _Message) -> None:
        """A response has come."""
        waiting = self._exchanges.pop((message.sender, message.frame.call), None)
        if waiting is not None:
            waiting.complete(message.frame)
        elif self._receiver is not None:
            self._receiver.complete(message.sender, message.frame)
