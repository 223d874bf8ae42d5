"""Making connections from one worker to another, with both ends authenticated.

A dialer belongs to a link. It tries the Unix socket first where both are on one host, falls back to
TCP, and stays with what worked.
"""

from __future__ import annotations

import logging
import os
import socket
import time

from ..errors import ProtocolError, WorkerLostError
from .addresses import unix_address
from .base import Card
from .handshake import CHALLENGE_SIZE, Purpose, new_hello, prove

log = logging.getLogger("gradwire")

_PATIENCE = 10.0  # seconds for one connection, handshake included


class Dialer:
    """Connects to one worker."""

    def __init__(self, me: int, key: bytes, to: Card, *, unix: bool) -> None:
        self.by_unix = unix and bool(to.unix)
        self._me = me
        self._key = key
        self._to = to
        self._link = int.from_bytes(os.urandom(8), "little")

    def open_first(self, deadline: float | None) -> socket.socket:
        """The link's shared connection; settles how the others are made.

        Raises:
            WorkerLostError, TimeoutError, ProtocolError: as `open`.
        """
        if self.by_unix and self._to.tcp is not None:
            try:
                return self._open(Purpose.SHARED, deadline)
            except OSError as error:
                if _is_past(deadline):
                    raise TimeoutError from error
                log.debug("no unix socket to %s: %s", self._to.name, error)
                self.by_unix = False
        return self.open(Purpose.SHARED, deadline)

    def open(self, purpose: Purpose, deadline: float | None) -> socket.socket:
        """A new connection.

        Raises:
            WorkerLostError: the worker cannot be reached.
            TimeoutError: not before the deadline.
            AuthenticationError, ProtocolError: what answers there is not who it should be.
        """
        try:
            return self._open(purpose, deadline)
        except OSError as error:
            if _is_past(deadline):
                raise TimeoutError from error
            reason = f"cannot connect ({error})"
            raise WorkerLostError(self._to.name, reason) from error

    def _open(self, purpose: Purpose, deadline: float | None) -> socket.socket:
        limit = time.monotonic() + _PATIENCE
        limit = limit if deadline is None else min(limit, deadline)
        sock = self._connect(limit)
        try:
            self._shake_hands(sock, purpose, limit)
        except BaseException:
            sock.close()
            raise
        return sock

    def _connect(self, limit: float) -> socket.socket:
        if self.by_unix:
            address: str | tuple[str, int] = unix_address(self._to.unix)
            sock = socket.socket(socket.AF_UNIX)
        elif self._to.tcp is None:
            raise OSError("it has no TCP address")
        else:
            sock = socket.create_connection(self._to.tcp, timeout=_left(limit))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return sock
        try:
            sock.settimeout(_left(limit))
            sock.connect(address)
        except BaseException:
            sock.close()
            raise
        return sock

    def _shake_hands(self, sock: socket.socket, purpose: Purpose, limit: float) -> None:
        hello = new_hello(purpose, self._me, self._to.id, self._link).to_bytes()
        sock.settimeout(_left(limit))
        sock.sendall(hello)
        try:
            challenge = receive_exactly(sock, CHALLENGE_SIZE, limit)
            sock.sendall(prove(self._key, hello, challenge))
            receive_exactly(sock, 1, limit)
        except ProtocolError as error:
            raise type(error)(f"worker {self._to.name!r}: {error}") from None


def _is_past(deadline: float | None) -> bool:
    return deadline is not None and time.monotonic() >= deadline


def _left(limit: float) -> float:
    """Seconds until then; never 0, which would mean not to wait at all."""
    return max(limit - time.monotonic(), 0.001)


def receive_exactly(sock: socket.socket, size: int, limit: float) -> bytes:
    """That many bytes, however slowly they come, before the limit.

    Raises:
        OSError: they did not come.
    """
    data = b""
    while len(data) < size:
        if time.monotonic() >= limit:
            raise TimeoutError("timed out in the handshake")
        sock.settimeout(_left(limit))
        more = sock.recv(size - len(data))
        if not more:
            raise ConnectionResetError("connection closed in the handshake")
        data += more
    return data
