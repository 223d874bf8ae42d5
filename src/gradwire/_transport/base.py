"""What a transport offers, and what it needs from the layer above.

A transport moves requests to workers that it knows by their cards, and responses back. The number
of a request is unique to its sender. There are two ways to send one: `exchange`, in which the
calling thread waits for the response; or `post`, after which the response is delivered through
`Receiver.complete`.

A thread that waits for the response to a posted request calls `attend`, so that it can do the
reading. If no thread does, nothing is lost: transports also read by themselves.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Protocol

from .._wire.device_maps import are_names
from .._wire.frames import Frame, Parcel
from ..errors import ProtocolError
from ..ids import WorkerInfo, check_name
from .keys import Keys

NAP = 0.5
"""Seconds between the checks of a waiting thread for whether to wait any longer."""

IsOver = Callable[[], bool]
"""Whether the wait is to be given up."""


class NotConnected(TimeoutError):
    """No connection could be made in time; says why."""


def check_wait(deadline: float | None, is_over: IsOver | None) -> float | None:
    """Until when to sleep before checking again; None: until woken.

    Raises:
        TimeoutError: there is no reason to wait any longer.
    """
    if deadline is None and is_over is None:
        return None
    now = time.monotonic()
    if (deadline is not None and now >= deadline) or (
        is_over is not None and is_over()
    ):
        raise TimeoutError
    if is_over is None:
        return deadline
    return now + NAP if deadline is None else min(now + NAP, deadline)


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """What a worker publishes about itself."""

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
    instance: int = 0
    """Random and unique, also among workers that had this name, id or address before: a replayed
    card does not match the worker that is there now."""
    device_maps: dict[str, dict[str, str]] = field(default_factory=dict)
    """By worker, on which of its devices tensors of each of ours arrive."""

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
            if not are_names(fields["device_maps"]):
                raise ValueError("no device maps")
            fields["instance"].to_bytes(8, "little")
            return cls(**fields)
        except (
            ValueError,
            TypeError,
            KeyError,
            AttributeError,
            OverflowError,
        ) as error:
            raise ProtocolError(f"not a worker's card: {data[:200]!r}") from error


@dataclass(slots=True)
class Traffic:
    """Bytes that a worker has sent and received, by sockets and by shared memory.

    All connections count here without a lock: `+=` of plain numbers is not interrupted.
    """

    sent: int = 0
    received: int = 0
    direct: int = 0
    """Of devices: sent from device to device."""
    by_host: int = 0
    """Of devices: sent by way of the host."""

    def counts(self) -> dict[str, int]:
        """Them all, for people."""
        return {
            "bytes_sent": self.sent,
            "bytes_received": self.received,
            "device_bytes_sent_directly": self.direct,
            "device_bytes_sent_by_cpu": self.by_host,
        }


Respond = Callable[[Parcel], None]
"""Sends the response to one request, from any thread. Quietly nothing if the requester is gone."""


class Receiver(Protocol):
    """What the layer above does with arriving messages. Called on any thread."""

    def serve(self, sender: int, frame: Frame, respond: Respond) -> None:
        """Run a request. May block; responds once, now or later, or never to a duplicate.

        Raises:
            ProtocolError: the sender must not be served.
        """

    def knows(self, worker: int) -> bool:
        """Whether a worker is known to be in the world, without asking the store."""

    def name_of(self, worker: int) -> str | None:
        """The name of a worker in the world. May ask the store."""

    def refused(self, origin: str, reason: str) -> None:
        """A peer was refused."""

    def complete(self, sender: int, frame: Frame) -> None:
        """Complete a posted request, whose number the frame has. May run user callbacks."""

    def lost(self, worker: int, reason: str) -> None:
        """A worker is gone without a goodbye."""

    def left(self, worker: int) -> None:
        """A worker has said goodbye."""


class Answer(Protocol):
    """What a thread waits for."""

    def done(self) -> bool: ...

    def on_done(self, wake: Callable[[], None]) -> None:
        """Call `wake` when it is done; at once if it is."""


class Transport(Protocol):
    """Moves requests and responses between workers. All methods may be called from any thread."""

    @property
    def traffic(self) -> Traffic: ...

    def links(self) -> dict[int, str]:
        """The transport to each worker that this one calls, for messages to people."""

    def card(self, name: str, number: int, main: str) -> Card:
        """The card of the worker that this transport serves."""

    def start(self, me: int, keys: Keys, receiver: Receiver) -> None:
        """Begin to receive, as worker `me`, from peers that know a key."""

    def share_host(self, workers: int) -> None:
        """That many workers are on this host, including this one."""

    def post(
        self, to: Card, call: int, parcel: Parcel, deadline: float | None = None
    ) -> None:
        """Send a request, also to this worker itself.

        Raises:
            WorkerLostError: it is gone.
            TimeoutError: not before the deadline; a `NotConnected` says why.
            GradwireError: there can be no connection to it for now.
        """

    def exchange(
        self,
        to: Card,
        call: int,
        parcel: Parcel,
        *,
        deadline: float | None,
        is_over: IsOver | None = None,
    ) -> Frame:
        """Send a request, possibly to this worker itself, and wait for the response.

        Raises:
            WorkerLostError: it cannot be reached, or was lost meanwhile.
            TimeoutError: no response in time; or `is_over`, which is polled now and then, says that
                the response is no longer wanted.
        """

    def attend(
        self, to: int, call: int, answer: Answer, deadline: float | None
    ) -> None:
        """Wait until the answer or the deadline, reading what arrives from `to`."""

    def watch(self, to: Card) -> None:
        """Detect the loss of a worker from now on, even without traffic."""

    def forget(self, worker: int) -> None:
        """Close all connections to a worker that is lost or has left."""

    def close(self) -> None:
        """Say goodbye to all and stop."""
