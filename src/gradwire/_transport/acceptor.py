"""New connections, until those who made them have proven that they know the key.

A stranger takes no thread: its socket is watched by the poller, and only the fixed-size hello and
proof are read (with TLS, its handshake before them). There are places for `Options.max_strangers`
of them, and for `max_strangers_per_address` from one address. When all are taken, whoever has been
silent for the longest time goes, so that connections that say nothing keep nobody out; who is sent
away for a member's sake tries again (`connector.py`). Refusals are logged once in an interval.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from typing import Any

from ..errors import ClosedError, ProtocolError
from ..locks import CheckedLock
from ..options import Options
from ..threads import Executor
from .credentials import check_name
from .endpoint import Endpoint
from .handshake import (
    HELLO_SIZE,
    PROOF_SIZE,
    VERSION,
    Hello,
    TlsDiffersError,
    Verdict,
    challenge,
    check_proof,
)
from .keys import named
from .peer_user import check_user
from .tls_socket import TlsSocket

log = logging.getLogger("gradwire")

_LOG_INTERVAL = 10.0

Welcome = Callable[[Hello, Any], None]


class Acceptor:
    """Admits peers that know the key. `welcome` takes an authenticated connection."""

    def __init__(
        self,
        endpoint: Endpoint,
        options: Options,
        welcome: Welcome,
        *,
        instance: int,
    ) -> None:
        self.credentials = endpoint.credentials
        self.receiver = endpoint.receiver
        self._instance = instance
        self.poller = endpoint.poller
        self.patience = options.handshake_timeout
        self._places = options.max_strangers
        self._places_of_one = options.max_strangers_per_address
        self.welcome = welcome
        self.executor = endpoint.executor
        self.refusals = _Refusals(endpoint.executor)
        self._lock = CheckedLock()
        self._strangers: dict[_Stranger, None] = {}  # by age, the oldest first
        self._closed = False

    def __repr__(self) -> str:
        return f"<Acceptor: {len(self._strangers)} to be authenticated>"

    def take(self, sock: socket.socket) -> None:
        """A peer connects."""
        stranger = _Stranger(self, sock)
        with self._lock:
            if self._closed:
                sock.close()
                return
            crowded_out = self._make_place(stranger)
            self._strangers[stranger] = None
            is_only = len(self._strangers) == 1
        if crowded_out is not None:
            self._refuse(crowded_out, "too many connections wait to be authenticated")
        if is_only:
            self.executor.look_at(stranger.deadline, self._end_late)
        stranger.begin()

    def judge(self, hello: Hello) -> Verdict:
        if hello.version != VERSION:
            return Verdict.WRONG_VERSION
        if hello.target != self._instance:
            return Verdict.WRONG_WORKER
        return Verdict.CLOSING if self._closed else Verdict.WELCOME

    def take_out(self, stranger: _Stranger) -> bool:
        """Remove it; whether it was still there."""
        with self._lock:
            was_here = stranger in self._strangers
            self._strangers.pop(stranger, None)
        return was_here

    def refuse(self, stranger: _Stranger, why: object) -> None:
        if self.take_out(stranger):
            self._refuse(stranger, why)

    def close(self) -> None:
        """Close all unauthenticated connections."""
        with self._lock:
            self._closed = True
            strangers, self._strangers = self._strangers, {}
        for stranger in strangers:
            stranger.close()

    def _make_place(self, newcomer: _Stranger) -> _Stranger | None:
        """Which connection to drop for the next one, if the limit is reached."""
        crowd = [one for one in self._strangers if one.origin == newcomer.origin]
        if newcomer.is_local or len(crowd) < self._places_of_one:
            crowd = list(self._strangers)
            if len(crowd) < self._places:
                return None
        silent = (one for one in crowd if not one.has_said_hello)
        found = next(silent, None) or crowd[0]
        del self._strangers[found]
        return found

    def _end_late(self) -> None:
        now = time.monotonic()
        with self._lock:
            late = [one for one in self._strangers if one.deadline <= now]
            for stranger in late:
                del self._strangers[stranger]
            first = next(iter(self._strangers), None)
        for stranger in late:
            self._refuse(stranger, "timed out in the handshake")
        if first is not None:
            self.executor.look_at(first.deadline, self._end_late)

    def _refuse(self, stranger: _Stranger, why: object) -> None:
        stranger.close()
        if not self._closed:
            self.refusals.add(f": {why}")
            self.receiver.refused(stranger.origin, str(why))


class _Stranger:
    """An unauthenticated connection: watched for its hello, then for its proof."""

    def __init__(self, acceptor: Acceptor, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.deadline = time.monotonic() + acceptor.patience
        self.is_local = sock.family == socket.AF_UNIX
        self._acceptor = acceptor
        self.origin = _origin(sock)
        self._raw = sock
        self._sock: socket.socket | TlsSocket = sock
        self._awaits_tls = False
        self._data = b""
        self._hello = b""
        self._key = b""
        self._answer = b""

    @property
    def has_said_hello(self) -> bool:
        return bool(self._hello)

    def fileno(self) -> int:
        return self._sock.fileno()

    def begin(self) -> None:
        """Check the peer's user, and whether the connection has to use TLS."""
        credentials = self._acceptor.credentials
        try:
            if self.is_local:
                check_user(self._raw)
            elif credentials.needs_tls(self._raw):
                self._awaits_tls = True
                self._acceptor.poller.watch(self)  # nothing is spent on silent peers
                return
        except OSError as error:
            self._acceptor.refuse(self, error)
        else:
            self.ready()

    def ready(self) -> None:
        """Data has arrived. Called by one thread at a time."""
        try:
            if self._awaits_tls:
                self._awaits_tls = False
                self._sock = self._acceptor.credentials.with_tls(
                    self._raw, accepts=True
                )
            if not self._hello:
                self._hello = self._read(HELLO_SIZE)
                self._greet()
            proof = self._read(PROOF_SIZE)
            check_proof(self._key, self._hello, self._answer, proof)
            self._enter()
        except BlockingIOError:
            self._acceptor.poller.watch(self)
        except TlsDiffersError as error:
            self._tell_of_tls()
            self._acceptor.refuse(self, error)
        except (OSError, RuntimeError) as error:  # with GradwireError
            self._acceptor.refuse(self, error)

    def _tell_of_tls(self) -> None:
        try:
            self._raw.recv(
                65536
            )  # what is left unread would end the connection at once
        except OSError:
            pass
        try:
            self._raw.send(
                challenge(self._acceptor.credentials.key, b"", Verdict.TLS_DIFFERS)
            )
        except OSError:
            pass

    def close(self) -> None:
        self._acceptor.poller.drop(self)
        self._sock.close()

    def _read(self, size: int) -> bytes:
        """That many bytes; BlockingIOError until all of them have arrived."""
        while len(self._data) < size:
            more = self._sock.recv(size - len(self._data))
            if not more:
                raise ConnectionResetError("connection closed in the handshake")
            self._data += more
        data, self._data = self._data, b""
        return data

    def _greet(self) -> None:
        hello = Hello.from_bytes(self._hello)
        if self._raw.family != socket.AF_UNIX:
            self._raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        verdict = self._acceptor.judge(hello)
        self._key = named(self._acceptor.credentials.keys(), hello.key_id)
        self._answer = challenge(self._key, self._hello, verdict)
        self._sock.send(self._answer)  # the first bytes: there is room for them
        if verdict is not Verdict.WELCOME:
            raise ProtocolError(f"worker {hello.sender}: {verdict.name.lower()}")

    def _enter(self) -> None:
        """It knows the key: it is a member's connection from now on."""
        if self._acceptor.receiver.knows(Hello.from_bytes(self._hello).sender):
            self._welcome()
        else:
            self._acceptor.executor.submit(self._welcome)  # asks the store

    def _welcome(self) -> None:
        if not self._acceptor.take_out(self):
            return  # too late
        self._acceptor.poller.drop(self)
        hello = Hello.from_bytes(self._hello)
        try:
            name = self._acceptor.receiver.name_of(hello.sender)
            if name is None:
                raise ProtocolError("there is no such worker in this world")
            if isinstance(self._sock, TlsSocket):
                check_name(self._sock, name)
            self._acceptor.welcome(hello, self._sock)
        except ClosedError as error:  # no fault of the other worker's
            log.debug("closed a connection of worker %d: %s", hello.sender, error)
            self._sock.close()
            return
        except (ProtocolError, RuntimeError) as error:  # no thread for it, say
            self._acceptor.refusals.add(f" of worker {hello.sender}: {error}")
            self._acceptor.receiver.refused(self.origin, str(error))
            self._sock.close()
            return
        try:
            self._sock.send(b".")
        except OSError:
            pass  # the socket is the link's now, which will notice


class _Refusals:
    """Logs the first refusal at once, and the others of an interval together."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._lock = CheckedLock()
        self._until = 0.0  # when the interval ends
        self._count = 0
        self._last = ""

    def add(self, why: str) -> None:
        now = time.monotonic()
        with self._lock:
            if now < self._until:
                self._count += 1
                self._last = why
                return
            self._until = now + _LOG_INTERVAL
        log.warning("refused a connection%s", why)
        self._executor.look_at(self._until, self._tell_others)

    def _tell_others(self) -> None:
        with self._lock:
            count, self._count = self._count, 0
            if count:
                self._until = time.monotonic() + _LOG_INTERVAL
        if count:
            text = "refused %d more connections, the last one%s"
            log.warning(text, count, self._last)
            self._executor.look_at(self._until, self._tell_others)


def _origin(sock: socket.socket) -> str:
    """Where a connection comes from, for messages to people."""
    if sock.family == socket.AF_UNIX:
        return "a Unix socket"
    try:
        return str(sock.getpeername()[0])
    except OSError:
        return "nowhere: it is over"
