"""How a worker authenticates: with the world's key, and to other machines also with a certificate.

TLS is version 1.3, and both ends have a certificate with the worker's name. These are either the
user's (`Options.tls_ca`, `tls_cert`, `tls_key`), read again for every connection, so that they can
be replaced while workers run; or the world's own: the private key of its authority is derived from
the world's key, so every worker knows it, and issues itself a certificate that is valid for a day.
No files to manage, and nothing to revoke.

Traffic within the machine is not encrypted: anyone who could read it could read our memory as well.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import ssl
import tempfile
import time

from ..errors import AuthenticationError, GradwireError
from ..locks import CheckedLock
from ..options import Options
from .keys import Keys
from .tls_socket import TlsSocket

_RENEW = 12 * 3600.0  # seconds after which to issue another one
_LACKS = (
    "connections to other machines use TLS, which needs the package cryptography: install "
    "'gradwire[tls]', or give tls_ca, tls_cert and tls_key, or on a network that you trust "
    "tls=False (GRADWIRE_TLS=0)"
)


class Credentials:
    """The credentials of one worker."""

    def __init__(self, options: Options, me: int, name: str, keys: Keys) -> None:
        self.me = me
        self.keys = keys
        self._wanted = options.tls
        self._files = options.tls_ca, options.tls_cert, options.tls_key
        self._name = name
        self._lock = CheckedLock()
        self._contexts: dict[bool, tuple[object, ssl.SSLContext]] = {}

    @property
    def key(self) -> bytes:
        """The key to use."""
        return self.keys()[0]

    def needs_tls(self, sock: socket.socket) -> bool:
        """Whether a connection has to use TLS. Both ends reach the same conclusion."""
        if sock.family == socket.AF_UNIX:
            return False
        return leaves_machine(sock) if self._wanted is None else self._wanted

    def with_tls(self, sock: socket.socket, *, accepts: bool) -> TlsSocket:
        """TLS around a connection, before anything is sent.

        Raises:
            GradwireError: there can be no certificate.
        """
        with self._lock:
            return TlsSocket(sock, self._context(accepts))

    def _context(self, accepts: bool) -> ssl.SSLContext:
        """A TLS context with the current certificates."""
        state = self._state()
        known = self._contexts.get(accepts)
        if known is None or known[0] != state:
            self._contexts[accepts] = known = state, self._new_context(accepts)
        return known[1]

    def _state(self) -> object:
        """Changes whenever the certificates do."""
        paths = [path for path in self._files if path]
        if not paths:
            return time.monotonic() // _RENEW, self.keys()
        try:
            found = [os.stat(path) for path in paths]
        except OSError as error:
            raise GradwireError(f"cannot use a file for TLS: {error}") from None
        return [(one.st_ino, one.st_mtime_ns, one.st_size) for one in found]

    def _new_context(self, accepts: bool) -> ssl.SSLContext:
        kind = ssl.PROTOCOL_TLS_SERVER if accepts else ssl.PROTOCOL_TLS_CLIENT
        context = ssl.SSLContext(kind)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = (
            False  # it is the worker's name that counts: `check_name`
        )
        context.verify_mode = ssl.CERT_REQUIRED
        if accepts:
            context.num_tickets = 0  # each connection is verified separately
        self._load(context)
        return context

    def _load(self, context: ssl.SSLContext) -> None:
        ca, certificate, key = self._files
        if ca and certificate and key:
            try:
                context.load_verify_locations(ca)
                context.load_cert_chain(certificate, key)
            except (OSError, ssl.SSLError) as error:
                raise GradwireError(
                    f"cannot use tls_ca={ca!r}, tls_cert={certificate!r}, tls_key={key!r}: {error}"
                ) from None
            return
        issued = [_issue(key, self._name) for key in self.keys()]
        context.load_verify_locations(cadata="".join(root for root, _ in issued))
        chain = issued[0][1]
        # OpenSSL reads certificates and keys only from files. This one is private.
        file, path = tempfile.mkstemp(prefix="gradwire-")
        try:
            with open(file, "wb") as out:
                out.write(chain)
            context.load_cert_chain(path)
        finally:
            os.unlink(path)


def check_name(sock: TlsSocket, name: str) -> None:
    """Whether the other end is the worker of that name.

    Raises:
        AuthenticationError: its certificate is another one's.
    """
    names = sock.names()
    if name not in names:
        shown = ", ".join(sorted(names)) or "no names"
        raise AuthenticationError(f"its certificate is for {shown}, not for {name!r}")


def leaves_machine(sock: socket.socket) -> bool:
    """Whether the other end is on another machine."""
    ours, theirs = (_address(a) for a in (sock.getsockname(), sock.getpeername()))
    return not (theirs.is_loopback or ours == theirs)


def _address(address: tuple[str, int]) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    found = ipaddress.ip_address(address[0].partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped:
        return found.ipv4_mapped
    return found


def _issue(world_key: bytes, name: str) -> tuple[str, bytes]:
    try:
        from .world_authority import issue
    except ModuleNotFoundError:
        raise GradwireError(_LACKS) from None
    return issue(world_key, name)
