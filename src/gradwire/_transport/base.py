"""What a transport offers, and what it asks of the layer above.

A transport moves parcels to workers it knows by their cards. There are two ways to send a request:
`post` it, and the answer comes in later through `Receiver.arrived`; or, where the transport has
lanes, `exchange` it: the calling thread keeps a connection to itself until the answer is there.

Whoever waits for a posted request's answer calls `attend`, so that the waiting thread can do the
reading. Nothing is lost if nobody does: transports also read by themselves.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Protocol

from .._wire.frames import Frame, Parcel
from ..errors import ProtocolError
from ..ids import WorkerInfo, check_name

NAP = 0.5
"""Seconds after which one who waits looks whether there is still a reason to."""

IsOver = Callable[[], bool]
"""Whether what is waited for is not wanted any more."""


class NotConnected(TimeoutError):
    """No connection could be made in time; says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """What a worker tells the others about itself."""

    name: str
    id: int
    host: str = ""
    """Equal for workers that may reach each other by Unix sockets."""
    unix: str = ""
    tcp: tuple[str, int] | None = None
    plain: bool = False
    """It accepts no pickles."""
    main: str = ""
    """Equal for workers that run the same script."""
    cores: str = "0"
    """The cores it may run on: bits of a hexadecimal number."""

    @property
    def info(self) -> WorkerInfo:
        return WorkerInfo(self.name, self.id)

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Card:
        """The card that `to_bytes` wrote.

        Raises:
            ProtocolError: it is not one.
        """
        try:
            fields = json.loads(data)
            if fields["tcp"] is not None:
                host, port = fields["tcp"]
                fields["tcp"] = (str(host), int(port))
            check_name(fields["name"])
            int(fields["cores"], 16)
            return cls(**fields)
        except (ValueError, TypeError, KeyError) as error:
            raise ProtocolError(f"not a worker's card: {data[:200]!r}") from error


@dataclass(slots=True)
class Traffic:
    """Bytes that a worker has sent and received, by sockets and by shared memory.

    All connections count here without a lock: `+=` of plain numbers is not interrupted.
    """

    sent: int = 0
    received: int = 0


class Receiver(Protocol):
    """What the layer above does with what arrives. Called on any thread."""

    def answer(self, sender: int, frame: Frame) -> Parcel:
        """Run a request that came by a lane and return its answer. May take its time."""

    def arrived(self, sender: int, frame: Frame) -> None:
        """Take a posted request or an answer. May take its time."""

    def lost(self, worker: int, reason: str) -> None:
        """A worker is gone without a goodbye."""

    def left(self, worker: int) -> None:
        """A worker has said goodbye."""


class Answer(Protocol):
    """What someone waits for."""

    def done(self) -> bool: ...

    def on_done(self, wake: Callable[[], None]) -> None:
        """Call `wake` when it is done; at once if it is."""


class Transport(Protocol):
    """Moves parcels to other workers. All methods may be called from any thread."""

    has_lanes: bool
    carries_own: bool
    """Whether requests of a worker to itself go this way, too."""

    @property
    def traffic(self) -> Traffic: ...

    def links(self) -> dict[int, str]:
        """How the workers that we call are reached, for people."""

    def card(self, name: str, number: int, main: str) -> Card:
        """The card of the worker that this transport serves."""

    def start(self, me: int, key: bytes, receiver: Receiver) -> None:
        """Begin to receive, as worker `me`, from those who know the key."""

    def post(
        self, to: Card, call: int, parcel: Parcel, deadline: float | None = None
    ) -> None:
        """Send a request.

        Raises:
            WorkerLostError: it is gone.
            TimeoutError: not before the deadline; a `NotConnected` says why.
            GradwireError: there can be no connection to it for now.
        """

    def reply(self, to: int, call: int, parcel: Parcel) -> None:
        """Answer a posted request. Quietly nothing, if who asked is gone."""

    def exchange(
        self,
        to: Card,
        parcel: Parcel,
        timeout: float | None,
        is_over: IsOver | None = None,
    ) -> Frame:
        """Send a request by a lane and wait for its answer.

        Raises:
            WorkerLostError: it cannot be reached, or went away meanwhile.
            TimeoutError: no answer in time; or it `is_over`, which is asked now and then: the
                answer is not wanted any more.
        """

    def attend(
        self, to: int, call: int, answer: Answer, deadline: float | None
    ) -> None:
        """Wait, reading what comes from `to`, until the answer or the deadline is there."""

    def watch(self, to: Card) -> None:
        """Have the loss of a worker noticed from now on, also if nobody speaks to it."""

    def forget(self, worker: int) -> None:
        """Close what is open to a worker that is lost or has left."""

    def close(self) -> None:
        """Say goodbye to all and stop."""
