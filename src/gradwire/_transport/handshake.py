"""How two ends of a new connection prove that they know the world's key, before anything else.

    connector → acceptor   hello      magic, version, purpose, which key, who, to whom, link, nonce
    acceptor → connector   challenge  head: magic, version, verdict, nonce
                                      HMAC(key, "acceptor", hello, head)
    connector → acceptor   proof      HMAC(key, "connector", hello, challenge)

All three have a fixed size, and nothing else is read before the proof holds. The nonces are fresh
and both MACs cover them, so an old handshake cannot be played again; the two MACs differ by their
label, so neither end's can be reflected back to it.

Pure: bytes in, bytes out. `sockets.py` moves them.
"""

from __future__ import annotations

import hmac
import os
import struct
from dataclasses import dataclass
from enum import IntEnum

from ..errors import AuthenticationError, ProtocolError

VERSION = 14
MAGIC = b"GRADWIRE"
_TLS = b"\x16\x03"  # the first bytes of a TLS connection
_HELLO = struct.Struct("<8sHHIqQQ32s")
_HEAD = struct.Struct("<8sHHI32s")  # of the challenge; its MAC follows
HELLO_SIZE = _HELLO.size
PROOF_SIZE = 32
CHALLENGE_SIZE = _HEAD.size + PROOF_SIZE


class Purpose(IntEnum):
    """What a connection is for."""

    SHARED = 1
    """Any number of requests in flight; one to each worker."""
    LEASED = 2
    """One request at a time."""
    SEGMENTS = 3
    """Descriptors of shared memory; Unix sockets only."""


class Verdict(IntEnum):
    """The acceptor's verdict on a hello."""

    WELCOME = 0
    WRONG_VERSION = 1
    WRONG_WORKER = 2
    CLOSING = 3
    TLS_DIFFERS = 4
    """Only one end uses TLS. Said without TLS, which the other end is prepared for."""


_DIFFERS = "one end uses TLS and the other does not: set tls (GRADWIRE_TLS) alike on all workers"


class TlsDiffersError(ProtocolError):
    """One end of a connection uses TLS, the other does not."""

    def __init__(self, text: str = _DIFFERS) -> None:
        super().__init__(text)


@dataclass(frozen=True, slots=True)
class Hello:
    """Who connects, to whom, and why."""

    purpose: Purpose
    sender: int
    target: int
    """`Card.instance` of the worker that it is for, so that nobody can pass it on to another."""
    link: int
    """Random; the same for all connections of one link."""
    nonce: bytes
    version: int = VERSION
    key_id: int = 0
    """Which of the world's keys the connector uses (`keys.py`)."""

    def to_bytes(self) -> bytes:
        fields = (
            self.version,
            self.purpose,
            self.key_id,
            self.sender,
            self.target,
            self.link,
        )
        return _HELLO.pack(MAGIC, *fields, self.nonce)

    @classmethod
    def from_bytes(cls, data: bytes) -> Hello:
        """The hello in these bytes.

        Raises:
            TlsDiffersError: it is one of TLS.
            ProtocolError: it is not one.
        """
        magic, version, purpose, key_id, sender, target, link, nonce = _HELLO.unpack(
            data
        )
        if data.startswith(_TLS):
            raise TlsDiffersError
        if magic != MAGIC:
            raise ProtocolError(f"not a gradwire connection: it begins {data[:16]!r}")
        try:
            kind = Purpose(purpose)
        except ValueError:
            raise ProtocolError(f"connection for unknown purpose {purpose}") from None
        return cls(kind, sender, target, link, nonce, version, key_id)


def new_hello(
    purpose: Purpose, sender: int, target: int, link: int, key_id: int = 0
) -> Hello:
    return Hello(purpose, sender, target, link, os.urandom(32), key_id=key_id)


def challenge(key: bytes, hello: bytes, verdict: Verdict) -> bytes:
    """The acceptor's response to a hello."""
    head = _HEAD.pack(MAGIC, VERSION, verdict, 0, os.urandom(32))
    return head + _mac(key, b"acceptor", hello, head)


def prove(key: bytes, hello: bytes, answer: bytes) -> bytes:
    """The connector's proof, once the acceptor's own holds.

    Raises:
        AuthenticationError: the acceptor does not know the key.
        ProtocolError: the acceptor is something else, or refuses; says why.
        ConnectionRefusedError: it is shutting down.
    """
    head, mac = answer[: _HEAD.size], answer[_HEAD.size :]
    magic, version, verdict, _, _ = _HEAD.unpack(head)
    if magic != MAGIC:
        raise ProtocolError("the process at that address is not a gradwire worker")
    if verdict == Verdict.TLS_DIFFERS:
        raise TlsDiffersError
    if verdict == Verdict.WRONG_VERSION:
        raise ProtocolError(f"it speaks version {version}, this worker {VERSION}")
    if not hmac.compare_digest(mac, _mac(key, b"acceptor", hello, head)):
        raise AuthenticationError("it does not know this world's key")
    if verdict == Verdict.CLOSING:
        raise ConnectionRefusedError("it is shutting down")
    if verdict != Verdict.WELCOME:
        reasons = {known.value: known.name.lower() for known in Verdict}
        raise ProtocolError(
            f"it refused the connection: {reasons.get(verdict, verdict)}"
        )
    return _mac(key, b"connector", hello, answer)


def check_proof(key: bytes, hello: bytes, answer: bytes, proof: bytes) -> None:
    """Verify the connector's proof.

    Raises:
        AuthenticationError: it does not know the key.
    """
    if not hmac.compare_digest(proof, _mac(key, b"connector", hello, answer)):
        raise AuthenticationError("it does not know this world's key")


def _mac(key: bytes, label: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, label + b"\0" + b"".join(parts), "sha256")
