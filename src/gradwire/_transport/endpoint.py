"""What all connections of a worker share, and how they end."""

from __future__ import annotations

from dataclasses import dataclass

from .._wire.frames import Limits
from ..errors import ProtocolError
from ..threads import Executor
from .base import Receiver, Traffic
from .busy_poll import BusyPoll
from .credentials import Credentials
from .framed_socket import FramedSocket, FrameReader, SharedMemory, Stream
from .poller import Poller
from .shared_memory import Recycler
from .tls_socket import TlsFrameReader, TlsSocket

BROKEN = (EOFError, OSError, ProtocolError)
"""What reading or writing raises when a connection is over."""


@dataclass(slots=True)
class Endpoint:
    """What all connections of a worker share."""

    credentials: Credentials
    executor: Executor
    poller: Poller
    receiver: Receiver
    limits: Limits
    busy_poll: BusyPoll
    recycler: Recycler
    traffic: Traffic

    def framed(self, sock: Stream, shared: SharedMemory) -> FramedSocket:
        """Frames on a socket, with large areas in shared memory where there is some."""
        waiting = self.executor.waiting
        framed = FramedSocket(
            sock,
            self.limits,
            self.recycler,
            waiting,
            self.traffic,
            reader=TlsFrameReader if isinstance(sock, TlsSocket) else FrameReader,
        )
        framed.share_memory(shared)
        return framed


def describe_end(error: BaseException) -> str:
    """Why a connection ended, for messages to people."""
    if isinstance(error, ProtocolError):
        return f"connection closed, {error}"
    text = str(error) or type(error).__name__
    return (
        text if text.startswith("connection closed") else f"connection closed ({text})"
    )
