"""What all connections of a worker use, and how they end."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from .._wire.frames import Limits
from ..errors import ProtocolError
from ..threads import Executor
from .base import Receiver, Traffic
from .busy_poll import Spin
from .framed_socket import Stream
from .poller import Poller
from .shared_memory import Recycler, SegmentMap, SegmentPool
from .thread_cache import Hosts

BROKEN = (EOFError, OSError, ProtocolError)
"""What reading or writing raises when a connection is over."""


@dataclass(slots=True)
class Station:
    """What all connections of a worker use."""

    me: int
    key: bytes
    executor: Executor
    hosts: Hosts
    poller: Poller
    receiver: Receiver
    limits: Limits
    spin: Spin
    recycler: Recycler
    traffic: Traffic

    def stream(
        self,
        sock: socket.socket,
        pool: SegmentPool | None,
        segments: SegmentMap | None,
    ) -> Stream:
        """Frames on a socket, with large areas in shared memory where there is some."""
        waiting = self.executor.waiting
        stream = Stream(sock, self.limits, self.recycler, waiting, self.traffic)
        stream.share_memory(pool, segments)
        return stream


def describe_end(error: BaseException) -> str:
    """Why a connection ended, for people."""
    if isinstance(error, ProtocolError):
        return f"connection closed, {error}"
    text = str(error) or type(error).__name__
    return (
        text if text.startswith("connection closed") else f"connection closed ({text})"
    )
