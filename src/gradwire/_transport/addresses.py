"""The address a worker listens on, and the one it publishes.

By default a worker can be reached only from this machine. It listens on another interface if
told to (`Options.bind`), or if the rendezvous is on another machine: then on the interface that
leads there.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
import tempfile
import uuid
from pathlib import Path

from ..options import Options

_BACKLOG = 512


def host_identity() -> str:
    """Equal for processes that can share Unix sockets: one boot, one network namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/net')}"
    except OSError:
        return f"{socket.gethostname()}/{uuid.getnode()}"


def way_to(host: str) -> str:
    """This machine's address on the route to `host`; loopback if that is this machine."""
    for family, _, _, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(address)  # sends nothing, only chooses a route
            except OSError:
                continue
            return str(probe.getsockname()[0])
    return "127.0.0.1"


def is_loopback(address: tuple[str, int]) -> bool:
    return ipaddress.ip_address(address[0].partition("%")[0]).is_loopback


def bind_address(options: Options, rendezvous: str | None) -> str:
    """The address to listen on."""
    if options.bind is not None:
        return options.bind
    return "127.0.0.1" if rendezvous is None else way_to(rendezvous)


def listen_tcp(address: str, ports: tuple[int, int] | None) -> socket.socket:
    """A listening socket on one of the ports.

    Raises:
        OSError: none of them is free, or the address is not one of this machine's.
    """
    found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    family, where = found[0][0], str(found[0][4][0])
    first, last = ports or (0, 0)
    for port in range(first, last + 1):
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((where, port))
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            if port == last:
                tried = f"port {first}" if first == last else f"ports {first}-{last}"
                raise OSError(
                    f"cannot listen on {address!r}, {tried} ({error}); "
                    "set bind= and ports= (GRADWIRE_BIND, GRADWIRE_PORTS)"
                ) from error
        else:
            return listener
    raise AssertionError("unreachable")


def advertised(listener: socket.socket, options: Options) -> tuple[str, int]:
    """The address to publish."""
    host, port = listener.getsockname()[:2]
    if options.advertise is not None:
        host = options.advertise
    elif ipaddress.ip_address(host).is_unspecified:
        host = socket.gethostname()
    return host, port


def listen_unix() -> tuple[socket.socket, str]:
    """A listening Unix socket and its name.

    On Linux the name is abstract, so that a killed worker leaves no file behind.

    Raises:
        OSError: Unix sockets cannot be used here.
    """
    listener = socket.socket(socket.AF_UNIX)
    try:
        if sys.platform == "linux":
            name = f"@gradwire-{uuid.uuid4().hex}"
        else:
            name = os.path.join(tempfile.mkdtemp(prefix="gradwire-"), "socket")
        listener.bind(unix_address(name))
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener, name


def unix_address(name: str) -> str:
    return "\0" + name[1:] if name.startswith("@") else name


def forget_unix(name: str) -> None:
    """Remove what a Unix socket left in the file system."""
    if not name.startswith("@"):
        Path(name).unlink(missing_ok=True)
        Path(name).parent.rmdir()
