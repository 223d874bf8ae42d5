"""Making connections from one worker to another, with both ends authenticated.

A dialer belongs to a link. It tries the Unix socket first if both are on one host, falls back to
TCP, and keeps what worked.

Transient failures are retried, with backoff, until the deadline of the call: this process has no
descriptors left, the other one's backlog is full, it closed the connection because it had too
many. That is not a loss of the worker. It is lost if the system reports that no process listens
there, or after as long a silence as on an existing connection (`Options.heartbeat`,
`Options.host_heartbeat`).
"""

from __future__ import annotations

import errno
import logging
import os
import random
import socket
import sys
import time
from collections.abc import Callable

from ..errors import ClosedError, GradwireError, ProtocolError, WorkerLostError
from .addresses import unix_address
from .base import Card, NotConnected
from .credentials import Credentials, check_name
from .framed_socket import Stream
from .handshake import CHALLENGE_SIZE, Purpose, new_hello, prove
from .keys import id_of
from .peer_user import check_user
from .tls_socket import TlsSocket

log = logging.getLogger("gradwire")

_PATIENCE = 10.0  # seconds for one attempt, handshake included
_LONGEST = 60.0  # seconds for all attempts, where a call has no deadline
_FIRST_PAUSE, _LONGEST_PAUSE = 0.002, 0.25  # seconds between attempts
_REFUSED = 0.0 if sys.platform == "linux" else 1.0
"""Seconds after which a refusal is believed: other systems refuse, too, when a backlog is full."""

_PASSING = {
    errno.EAGAIN,  # a Unix socket with a full backlog
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOBUFS,
    errno.ENOMEM,
    errno.EADDRNOTAVAIL,  # no port is left on this side
    errno.EINTR,
    errno.EPIPE,
    errno.ECONNRESET,
    errno.ECONNABORTED,
}
_NO_ANSWER = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN}


def _never() -> bool:
    return False


class Dialer:
    """Connects to one worker, until `is_over`: this worker is shut down."""

    def __init__(
        self,
        credentials: Credentials,
        to: Card,
        *,
        unix: bool,
        silence: tuple[float, float] = (0.0, 0.0),
        is_over: Callable[[], bool] = _never,
    ) -> None:
        self.by_unix = unix and bool(to.unix)
        self._credentials = credentials
        self._to = to
        self._silence = silence
        """Seconds that it may be silent, on its host and elsewhere; 0 for no limit."""
        self._is_over = is_over
        self.by_tls = False
        """Whether what it opened last has TLS."""
        self._link = int.from_bytes(os.urandom(8), "little")

    def open_first(self, deadline: float | None) -> Stream:
        """The link's shared connection; settles how the others are made.

        Raises: as `open`.
        """
        if self.by_unix and self._to.tcp is not None:
            try:
                return self._retry(Purpose.SHARED, deadline)
            except OSError as error:
                if isinstance(error, NotConnected):
                    raise
                log.debug("no unix socket to %s: %s", self._to.name, error)
                self.by_unix = False
        return self.open(Purpose.SHARED, deadline)

    def open(
        self,
        purpose: Purpose,
        deadline: float | None,
        is_needless: Callable[[], bool] = _never,
    ) -> Stream:
        """A new connection.

        Raises:
            WorkerLostError: the worker is gone.
            NotConnected: there is none by the deadline, or it `is_needless` by now.
            GradwireError: there is none after a long time, and no deadline.
            AuthenticationError, ProtocolError: what answers there is not who it should be.
        """
        try:
            return self._retry(purpose, deadline, is_needless)
        except NotConnected:
            raise
        except OSError as error:
            reason = f"cannot connect ({error})"
            if isinstance(error, ConnectionRefusedError | FileNotFoundError):
                reason = f"it has exited: no process listens at its address ({error})"
            raise WorkerLostError(self._to.name, reason) from None

    def _retry(
        self,
        purpose: Purpose,
        deadline: float | None,
        is_needless: Callable[[], bool] = _never,
    ) -> Stream:
        """Try until it works, or fails for good (OSError)."""
        began = heard_at = time.monotonic()
        pause = _FIRST_PAUSE
        reason: OSError | None = None  # the last sign of life, unless there was none
        while True:
            try:
                return self._open(purpose, self._limit(heard_at, deadline))
            except OSError as error:
                if not _is_silence(error):
                    heard_at, reason = time.monotonic(), error
                reason = reason or error
                elapsed = time.monotonic() - began
                self._raise_if_final(error, heard_at, elapsed)
                self._raise_if_late(reason, elapsed, deadline)
            pause = min(2 * pause, _LONGEST_PAUSE)
            left = pause if deadline is None else deadline - time.monotonic()
            time.sleep(max(0.0, min(pause * random.uniform(0.5, 1), left)))
            if self._is_over():
                raise ClosedError("this worker is shut down")
            if is_needless():
                raise NotConnected(f"cannot connect ({reason})")

    def _raise_if_final(self, error: OSError, heard_at: float, elapsed: float) -> None:
        """Raise unless a retry may succeed."""
        if not _is_silence(error):
            if not _is_passing(error, elapsed):
                raise error
            return
        silence, limit = time.monotonic() - heard_at, self._longest_silence
        if limit and silence >= limit:
            text = describe_silence(silence, is_remote=not self.by_unix)
            raise WorkerLostError(self._to.name, f"cannot connect ({text})") from error

    def _raise_if_late(
        self, reason: OSError, elapsed: float, deadline: float | None
    ) -> None:
        """Raise if there is no time for another attempt."""
        text = f"cannot connect ({reason})"
        if deadline is not None and time.monotonic() >= deadline:
            raise NotConnected(text) from reason
        if deadline is None and elapsed >= _LONGEST:
            raise GradwireError(
                f"worker {self._to.name!r}: {text} for {elapsed:.0f} s"
            ) from reason

    @property
    def _longest_silence(self) -> float:
        return self._silence[0] if self.by_unix else self._silence[1]

    def _limit(self, heard_at: float, deadline: float | None) -> float:
        """The deadline of an attempt."""
        limit = time.monotonic() + _PATIENCE
        if self._longest_silence:
            limit = min(limit, heard_at + self._longest_silence)
        return limit if deadline is None else min(limit, deadline)

    def _open(self, purpose: Purpose, limit: float) -> Stream:
        sock = self._connect(limit)
        try:
            return self._shake_hands(sock, purpose, limit)
        except BaseException:
            sock.close()
            raise

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
            check_user(sock)
        except BaseException:
            sock.close()
            raise
        return sock

    def _shake_hands(
        self, sock: socket.socket, purpose: Purpose, limit: float
    ) -> Stream:
        try:
            stream, proof = self._proof(sock, purpose, limit)
            stream.sendall(proof)
            receive_exactly(stream, 1, limit)
            return stream
        except ProtocolError as error:
            raise type(error)(f"worker {self._to.name!r}: {error}") from None

    def _proof(
        self, sock: socket.socket, purpose: Purpose, limit: float
    ) -> tuple[socket.socket | TlsSocket, bytes]:
        """What to send, and by what, when the other side has proven itself."""
        stream = self._with_tls(sock, limit)
        me, key = self._credentials.me, self._credentials.key
        link = self._link
        hello = new_hello(purpose, me, self._to.instance, link, id_of(key)).to_bytes()
        stream.settimeout(_left(limit))
        stream.sendall(hello)
        answer = receive_exactly(stream, CHALLENGE_SIZE, limit)
        return stream, prove(key, hello, answer)

    def _with_tls(self, sock: socket.socket, limit: float) -> socket.socket | TlsSocket:
        """The connection, with TLS if required."""
        self.by_tls = self._credentials.needs_tls(sock)
        if not self.by_tls:
            return sock
        wrapped = self._credentials.with_tls(sock, accepts=False)
        wrapped.handshake(limit)
        check_name(wrapped, self._to.name)
        return wrapped

    def is_alive(self, limit: float) -> bool | None:
        """Whether it answers; None if it is silent, which proves nothing."""
        try:
            with self._connect(limit) as sock:
                self._proof(sock, Purpose.SHARED, limit)
        except (ConnectionRefusedError, ProtocolError):  # or another process
            return False
        except OSError:
            return None
        return True


def is_alive(credentials: Credentials, worker: Card, patience: float) -> bool | None:
    """Whether a worker answers at its address; None if that cannot be determined now."""
    dialer = Dialer(credentials, worker, unix=False)
    return dialer.is_alive(time.monotonic() + patience)


def describe_silence(seconds: float, *, is_remote: bool) -> str:
    """Why a silent worker counts as lost."""
    text = f"nothing heard for {seconds:.1f} s"
    if is_remote:
        return text
    return f"{text}: it is stopped, or something holds its GIL"  # its kernel is ours


def _is_silence(error: OSError) -> bool:
    """Whether nothing was heard from the other side, not even a refusal."""
    return isinstance(error, TimeoutError) or error.errno in _NO_ANSWER


def _is_passing(error: OSError, elapsed: float) -> bool:
    """Whether the failure is transient."""
    if isinstance(error, ConnectionRefusedError):
        return elapsed < _REFUSED
    if isinstance(error, socket.gaierror):
        return error.errno == socket.EAI_AGAIN
    return error.errno in _PASSING or isinstance(error, ConnectionResetError)


def _left(limit: float) -> float:
    """Seconds until then; never 0, which would mean not to wait at all."""
    return max(limit - time.monotonic(), 0.001)


def receive_exactly(sock: socket.socket | TlsSocket, size: int, limit: float) -> bytes:
    """That many bytes, however slowly they arrive, before the limit.

    Raises:
        OSError: they did not arrive.
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
