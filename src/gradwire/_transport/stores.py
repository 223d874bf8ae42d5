"""Opens the store that workers meet in: `env://`, `tcp://host:port`, `file:///path`, an object.

A store opened here listens on the address asked for, or has a file for this user alone. That keeps
others from disturbing a world; its secrets do not depend on it (`keys.py`).
"""

from __future__ import annotations

import errno
import ipaddress
import os
import re
import socket
import struct
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from urllib.parse import ParseResult, parse_qs, urlparse

from torch.distributed import (  # type: ignore[attr-defined]
    FileStore,
    PrefixStore,
    Store,
    TCPStore,
)

from ..errors import GradwireError
from .cluster_environments import cluster_place
from .wait_report import WaitReport, wait_for_listener

_STEP = 0.05
_REOPEN = 3.0  # seconds for an old store at the same port to go away
_BACKLOG = 4096
_SILENCE = 30.0  # seconds without a response after which a store counts as lost


@dataclass(slots=True)
class Place:
    """Where workers meet, and who this worker is there."""

    store: Store
    rank: int | None
    size: int | None
    host: str | None
    """Another machine of the world, if there is one: that of the store, if that is another."""
    where: str = "the store"
    """For people."""
    is_host: bool = False
    """Whether this process serves the store, which then ends with it."""

    def let_come_and_go(self, least: int, given_size: int | None) -> None:
        """Make it a place for an elastic world, whatever size the environment says.

        Raises:
            ValueError: the program has given a size.
        """
        if given_size is not None:
            raise ValueError(
                f"world_size={given_size} and min_workers={least}: a world has a fixed size or "
                "workers come and go, so leave one of them out"
            )
        self.size = None


def find_place(
    method: str | None,
    store: Store | None,
    rank: int | None,
    size: int | None,
    timeout: float,
    *,
    multi_tenant: bool = False,
) -> Place:
    """The store that `env://`, `tcp://host:port`, `file:///path` or an object stand for.

    `multi_tenant`, as torch has it: a tcp:// store of this process at that port is used again.

    Raises:
        ValueError: something is missing or makes no sense; says what.
        GradwireError: the store cannot be reached.
    """
    if store is not None:
        return Place(store, rank, size, _remote_host(_host_of(store)))
    url = urlparse(method or "env://")
    if url.scheme not in ("env", "tcp", "file"):
        raise ValueError(f"{method!r}: use env://, tcp://host:port or file:///path")
    is_env = url.scheme == "env"
    cluster = cluster_place(os.environ if is_env else {})
    settings = {**cluster.variables, **os.environ} if is_env else {}
    settings |= {k.upper(): values[-1] for k, values in parse_qs(url.query).items()}
    rank = _number("RANK", settings) if rank is None else rank
    size = _number("WORLD_SIZE", settings) if size is None else size
    if is_env and rank is None and "MASTER_ADDR" not in settings:
        raise ValueError(_no_launcher())
    check_place(rank, size)
    if url.scheme == "file":
        path = url.netloc + url.path
        if not path:
            raise ValueError(f"{method!r} names no file: use file:///path")
        make_private(path)
        return Place(FileStore(path), rank, size, None, f"file://{path}")
    host, port = _env_address(settings, cluster.hint) if is_env else _tcp_address(url)
    # torchrun's agent hosts the store that it tells its workers about.
    hosting = rank == 0 and settings.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    found = _tcp_store(host, port, hosting, timeout, multi_tenant=multi_tenant)
    elsewhere = cluster.neighbor or _remote_host(host)
    return Place(found, rank, size, elsewhere, f"tcp://{host}:{port}", is_host=hosting)


def _no_launcher() -> str:
    script = Path(sys.argv[0]).name or "train.py"
    return (
        "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are not set: start the program with "
        f"`gradwire launch -n 4 {script}`, or give init_rpc a rank, a world_size and "
        "init_method='tcp://host:port'"
    )


def _number(name: str, settings: Mapping[str, str]) -> int | None:
    text = settings.get(name)
    try:
        return None if text is None else int(text)
    except ValueError:
        raise ValueError(f"{name}={text!r}: must be a number") from None


def _tcp_address(url: ParseResult) -> tuple[str, int]:
    if url.hostname is None or url.port is None:
        raise ValueError(f"{url.geturl()!r} lacks a host or port: use tcp://host:port")
    return url.hostname, url.port


def _env_address(settings: Mapping[str, str], hint: str) -> tuple[str, int]:
    host, port = settings.get("MASTER_ADDR"), _number("MASTER_PORT", settings)
    if host is None or port is None:
        missing = "MASTER_ADDR" if host is None else "MASTER_PORT"
        hint = hint or "set it (env://), or give init_method='tcp://host:port'"
        raise ValueError(f"{missing} is not set: {hint}")
    return host, port


def _host_of(store: Store) -> str | None:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return getattr(store, "host", None)


def _remote_host(host: str | None) -> str | None:
    if not host:
        return None
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except OSError:
        return host
    return None if found <= {"127.0.0.1", "::1"} else host


def _tcp_store(
    host: str, port: int, hosting: bool, timeout: float, *, multi_tenant: bool
) -> Store:
    """The store at that address; retried, since its host may still be closing an old one."""
    deadline = time.monotonic() + timeout
    patience = min(deadline, time.monotonic() + _REOPEN)
    report = WaitReport(
        lambda: f"port {port} of {host}, which is in use, to become free", first=0.0
    )
    while True:
        if not hosting:
            wait_for_listener(host, port, max(deadline - time.monotonic(), 0.0))
        left = max(deadline - time.monotonic(), 0.001)
        try:
            listener = _store_listener(host, port, multi_tenant) if hosting else None
            found = TCPStore(
                host,
                port if listener is None else listener.getsockname()[1],
                is_master=hosting,
                wait_for_workers=False,
                timeout=timedelta(seconds=left),
                master_listen_fd=None if listener is None else listener.detach(),
                multi_tenant=multi_tenant,
            )
            _limit_silence(found)
            return found
        except (OSError, RuntimeError, ValueError) as error:
            if time.monotonic() + _STEP > patience or not _is_passing(error):
                raise GradwireError(_no_store(host, port, hosting, error)) from None
            report.tick()
            time.sleep(_STEP)


def _limit_silence(store: TCPStore) -> None:
    """Have requests fail if the store does not answer, as when this machine was cut off from it.

    torch would wait without end: nothing ends the connection. The `repr` of the store names its
    socket; where that of an older torch does not, there is no limit.
    """
    found = re.search(r"client=TCPClient\(SocketImpl\(fd=(\d+)", repr(store))
    if found is not None:
        limit = struct.pack("ll", int(_SILENCE), 0)
        with socket.socket(fileno=os.dup(int(found[1]))) as connection:
            connection.setblocking(True)  # socket.setdefaulttimeout() may differ
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


def _store_listener(host: str, port: int, multi_tenant: bool) -> socket.socket | None:
    """The socket for the store, at the address asked for; None if it is not one of this machine's.

    Torch itself would listen on all of them. That is right where others reach this machine by an
    address that it does not know, or by a name which only here means loopback.

    Raises:
        OSError: the port is in use.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, _, _, _, address = found[0]
    if ipaddress.ip_address(address[0]).is_loopback and not _says_loopback(host):
        return None
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            return None
        if error.errno == errno.EADDRINUSE and multi_tenant:
            return None  # torch finds the one of this process, or nobody's
        raise
    return listener


def _says_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def make_private(path: str) -> None:
    """Make the file of a store for nobody else to read: torch's would be for all.

    Raises:
        GradwireError: it cannot be made.
    """
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            if os.fstat(file).st_uid == os.geteuid():  # else it is for its owner to say
                os.fchmod(file, 0o600)  # it may have been there
        finally:
            os.close(file)
    except OSError as error:
        raise GradwireError(f"cannot open the store at {path}: {error}") from None


def _no_store(host: str, port: int, hosting: bool, error: Exception) -> str:
    reason = str(error).partition("\n")[0]
    if not hosting:
        return f"cannot reach the store at {host}:{port}: {reason}"
    if "in use" in str(error).lower():
        reason = "another program, or another rank 0, uses this port: choose a free one"
    return f"cannot open the store at {host}:{port}: {reason}"


def _is_passing(error: Exception) -> bool:
    text = str(error).lower()
    return "in use" in text or "connection reset" in text


def check_place(rank: int | None, size: int | None) -> None:
    if size is None:
        return
    if size < 1:
        raise ValueError(f"world_size={size}: must be at least 1, or absent")
    if rank is None or not 0 <= rank < size:
        raise ValueError(
            f"rank={rank}: must be in 0..{size - 1} for world_size={size} (or RANK, "
            "with env://)"
        )
