"""A TCP socket with TLS around it, for `framed_socket.py` as if it were a plain one.

Not Python's `SSLSocket`: one thread reads and another one writes here, which OpenSSL does not allow
without a lock, and after `shutdown` that class goes on without TLS. This one moves the bytes itself
and has OpenSSL work in memory. What came is decrypted at once, so nothing that the poller cannot
see is left inside of OpenSSL; readers take all of it (`TlsFrameReader`).
"""

from __future__ import annotations

import socket
import ssl
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from ..errors import AuthenticationError, ProtocolError
from ..locks import CheckedLock
from .framed_socket import FrameReader
from .handshake import MAGIC, TlsDiffersError

_SENT = 112 << 10  # bytes encrypted at a time: larger pieces would each allocate
_RECEIVED = 256 << 10  # bytes read at a time
_RECORD = 16 << 10  # the largest TLS record

_MOST = 64 << 10  # of a handshake

_NOWHERE = memoryview(bytearray())

Buffer = bytes | memoryview


class TlsSocket:
    """One end of a connection. Blocks where the socket in it does."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext) -> None:
        self._sock = sock
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        is_server = context.protocol == ssl.PROTOCOL_TLS_SERVER
        self._tls = context.wrap_bio(self._in, self._out, server_side=is_server)
        self._lock = CheckedLock()  # OpenSSL's objects are not thread-safe
        self._sending = CheckedLock()
        self._shaken = False
        self._heard = 0
        self._is_over = False
        self._received = _NOWHERE  # for encrypted bytes; strangers have none
        self._chunks: deque[bytes] = deque()
        self._unsent = memoryview(b"")
        self._taken = 0  # bytes of the caller's that are in `_unsent`

    def __repr__(self) -> str:
        return f"<TlsSocket {self._tls.version()}>"

    @property
    def has_more(self) -> bool:
        """Whether bytes have come that nobody has read."""
        return bool(self._chunks)

    def names(self) -> frozenset[str]:
        """The names in the other end's certificate, which has been verified."""
        certificate: dict[str, Any] = self._tls.getpeercert() or {}
        entries = certificate.get("subjectAltName", ())
        return frozenset(name for kind, name in entries if kind == "DNS")

    def handshake(self, limit: float | None = None) -> None:
        """Verify each other's certificates. `recv` does it, too.

        Raises:
            AuthenticationError: the other end has none that holds.
            TlsDiffersError: the other end does not use TLS.
            OSError: the connection is over, or it is past the limit.
        """
        while not self._shaken:
            try:
                with self._lock:
                    self._tls.do_handshake()
                self._shaken = True
                self._received = memoryview(bytearray(_RECEIVED))
                self._flush()
            except ssl.SSLWantReadError:
                self._flush()
                if limit is not None:
                    self._sock.settimeout(max(limit - time.monotonic(), 0.001))
                data = self._sock.recv(_RECORD)
                self._heard += len(data)
                if self._heard > _MOST:
                    raise ProtocolError("more bytes than a handshake has") from None
                if not data:
                    raise ConnectionResetError(
                        "connection closed in the handshake"
                    ) from None
                if data.startswith(MAGIC):
                    raise TlsDiffersError from None
                self._in.write(data)
            except ssl.SSLError as error:
                self._flush()  # says why
                raise AuthenticationError(f"TLS failed: {_reason(error)}") from None

    # Reading

    def recv(self, size: int) -> bytes:
        if not self._chunks:
            self._take_in(_NOWHERE)
        if not self._chunks:
            return b""
        data = self._chunks.popleft()
        if len(data) > size:
            self._chunks.appendleft(data[size:])
            data = data[:size]
        return data

    def recv_into(self, buffer: memoryview) -> int:
        if not self._chunks and (count := self._take_in(buffer)):
            return count
        at, size = 0, len(buffer)
        while self._chunks and at < size:
            data = self.recv(size - at)
            buffer[at : at + len(data)] = data
            at += len(data)
        return at

    def _take_in(self, buffer: memoryview) -> int:
        """Decrypt what comes: into the buffer as far as it fits, the rest into chunks.

        Returns:
            The bytes in the buffer. If there are none and no chunks, the connection is over.

        Raises:
            BlockingIOError: nothing is there.
            ProtocolError: it was altered on the way.
        """
        self.handshake()
        count = self._decrypt(buffer)  # data that arrived with the end of the handshake
        while not (count or self._chunks or self._is_over):
            received = self._sock.recv_into(self._received)
            self._is_over = not received
            self._in.write(self._received[:received])
            count = self._decrypt(buffer)
        return count

    def _decrypt(self, buffer: memoryview) -> int:
        read: Any = self._tls.read  # typeshed knows one of its two forms
        at, last = 0, len(buffer) - _RECORD
        with self._lock:
            try:
                while at <= last:
                    at += read(_RECORD, buffer[at:])
                while data := read(_RECORD):
                    self._chunks.append(data)
                self._is_over = True
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLZeroReturnError:
                self._is_over = True
            except ssl.SSLError as error:
                raise ProtocolError(
                    f"TLS was closed, or the data was modified in transit: {_reason(error)}"
                ) from None
        return at

    # Writing

    def send(self, data: Buffer) -> int:
        """As that of a socket: if it would block, call it again with the same bytes.

        Raises:
            GradwireError: this thread was interrupted while it reads; nothing was sent.
        """
        with self._sending:  # who has let it in may still be saying so
            if not self._unsent:
                piece = memoryview(data).cast("B")[:_SENT]
                with self._lock:
                    self._tls.write(piece)
                    self._unsent = memoryview(self._out.read())
                self._taken = len(piece)
            while self._unsent:
                self._unsent = self._unsent[self._sock.send(self._unsent) :]
            return self._taken

    def sendmsg(self, buffers: Sequence[Buffer]) -> int:
        """Some of them, at least of the first."""
        if len(buffers[0]) >= _RECORD or len(buffers) == 1:
            return self.send(buffers[0])
        size, few = 0, []
        for buffer in buffers:
            few.append(buffer[: _SENT - size])
            size += len(few[-1])
            if size >= _RECORD:
                break
        return self.send(b"".join(few))

    def sendall(self, data: bytes) -> None:
        while data:
            data = data[self.send(data) :]

    def _flush(self) -> None:
        """Send what OpenSSL has to say itself: little, for which there is room."""
        with self._lock:
            data = self._out.read()
        if data:
            self._sock.sendall(data)

    # As the underlying socket

    def fileno(self) -> int:
        return self._sock.fileno()

    def setblocking(self, flag: bool) -> None:
        self._sock.setblocking(flag)

    def settimeout(self, seconds: float | None) -> None:
        self._sock.settimeout(seconds)

    def shutdown(self, how: int) -> None:
        self._sock.shutdown(how)

    def close(self) -> None:
        self._sock.close()


class TlsFrameReader(FrameReader):
    """Takes in all that has been decrypted, which the poller would not tell it of again."""

    def pull(self) -> None:
        super().pull()
        while self._sock.has_more:  # type: ignore[attr-defined]
            super().pull()


def _reason(error: ssl.SSLError) -> str:
    text = getattr(error, "verify_message", "") or error.reason or str(error)
    return text.lower().replace("_", " ")
