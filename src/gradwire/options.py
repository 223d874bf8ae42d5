"""All user settings in one place, and where each of them comes from.

An option given in code takes precedence over the environment variable `GRADWIRE_<NAME>`, and that
over the default.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

T = TypeVar("T")


def check_timeout(seconds: float) -> float:
    """Validate a timeout that a user gave.

    Raises:
        TypeError, ValueError: it is not a valid timeout.
    """
    kind: type[Exception] = ValueError
    try:
        if seconds >= 0:  # not NaN either
            return seconds
    except TypeError:
        kind = TypeError
    raise kind(f"timeout={seconds!r}: give seconds, or 0 for none")


def _flag(text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off"):
        return False
    raise ValueError("use 1 or 0")


def _ports(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    return int(low), int(high or low)


def _from_env(name: str, parse: Callable[[str], T], default: T) -> Any:
    """A dataclass field whose default comes from the environment."""

    def read() -> T:
        text = os.environ.get(f"GRADWIRE_{name}")
        if text is None:
            return default
        try:
            return parse(text)
        except ValueError as error:
            raise ValueError(f"GRADWIRE_{name}={text!r}: {error}") from None

    return field(default_factory=read)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Settings of one worker. Times are in seconds, sizes in bytes.

    >>> gw.Options(timeout=10).timeout
    10
    """

    timeout: float = _from_env("TIMEOUT", float, 60.0)
    """Default timeout of a call; 0 means no limit."""
    join_timeout: float = _from_env("JOIN_TIMEOUT", float, 300.0)
    """How long to wait for the other workers at start-up."""
    heartbeat: float = _from_env("HEARTBEAT", float, 10.0)
    """A TCP connection that is silent for this long counts as lost; 0 disables this."""
    host_heartbeat: float = _from_env("HOST_HEARTBEAT", float, 60.0)
    """The same for workers of this host, which are then stopped or stuck; 0 disables this."""
    threads: int = _from_env("THREADS", int, 64)
    """Calls run concurrently; those waiting for other workers do not count."""
    torch_threads: int | None = _from_env("TORCH_THREADS", int, None)
    """Torch's intra-op threads (`torch.set_num_threads`); 0 leaves them unchanged. Default: the
    host's cores divided among its workers, unless the user has set a number."""

    bind: str | None = _from_env("BIND", str, None)
    """Address to listen on. Default: loopback, or the interface that leads to the rendezvous."""
    advertise: str | None = _from_env("ADVERTISE", str, None)
    """Address to publish, if it differs from the one to listen on."""
    ports: tuple[int, int] | None = _from_env("PORTS", _ports, None)
    """First and last TCP port to try. Default: any free one."""
    unix_sockets: bool = _from_env("UNIX_SOCKETS", _flag, True)
    """Use Unix sockets between workers of one host."""
    shared_memory: bool = _from_env("SHARED_MEMORY", _flag, True)
    """Move large tensors through shared memory between workers of one host."""
    spin: float = _from_env("SPIN", float, 200e-6)
    """How long to poll for a response before sleeping; 0 disables polling."""
    switch_interval: float = _from_env("SWITCH_INTERVAL", float, 5e-4)
    """How long another Python thread may delay a call; 0 keeps Python's default (5 ms)."""

    key: bytes | None = field(
        default_factory=lambda: os.environb.get(b"GRADWIRE_KEY"), repr=False
    )
    """The world's secret. Default: this user's own on this machine."""
    key_file: str | None = _from_env("KEY_FILE", str, None)
    """A file with the secret, readable only by this user."""
    trust_store: bool = _from_env("TRUST_STORE", _flag, False)
    """Without a key: share a random one through the store, whose readers can then run any code."""
    tls: bool | None = _from_env("TLS", _flag, None)
    """TLS on every TCP connection, or on none. Default: on those that leave the machine."""
    tls_ca: str | None = _from_env("TLS_CA", str, None)
    """A file with the certificate authorities of the workers. Default: the world's own."""
    tls_cert: str | None = _from_env("TLS_CERT", str, None)
    """A file with this worker's certificate, which has the worker's name as a DNS name."""
    tls_key: str | None = _from_env("TLS_KEY", str, None)
    """A file with the private key of that certificate."""
    allow: Collection[Any] | None = None
    """If given: the only functions (or modules) that others may call, without any pickle. A dict
    maps patterns of callers' names to such lists; the first match decides."""
    open_references: bool = _from_env("OPEN_REFERENCES", _flag, False)
    """Any worker of the world may use references to this one's values, whoever they were passed to.
    """
    audit: str | None = _from_env("AUDIT", str, None)
    """A log file of joins, leaves, refusals and calls."""
    device_maps: Mapping[str, Mapping[Any, Any]] | None = None
    """For each worker, a map from devices here to devices there; results take the inverse."""
    serializer: Any = None
    """An object with `dumps(obj, tensors)` and `loads(data, tensors)` instead of pickle."""

    handshake_timeout: float = _from_env("HANDSHAKE_TIMEOUT", float, 5.0)
    """How long a connecting peer may take to prove that it knows the key."""
    max_strangers: int = _from_env("MAX_STRANGERS", int, 256)
    """Unauthenticated connections, in total."""
    max_strangers_per_address: int = _from_env("MAX_STRANGERS_PER_ADDRESS", int, 64)
    """Unauthenticated connections from one IP address."""
    max_body: int = _from_env("MAX_BODY", int, 1 << 30)
    """The largest message accepted, without its large tensors."""
    max_bulk: int = _from_env("MAX_BULK", int, 1 << 37)
    """The largest total size of a message's large tensors."""
    max_peer_connections: int = _from_env("MAX_PEER_CONNECTIONS", int, 64)
    """Connections that one other worker may have open here."""
    max_peer_requests: int = _from_env("MAX_PEER_REQUESTS", int, 1 << 16)
    """Requests of one other worker that are queued or running here; further ones get an error."""
    max_peer_memory: int | None = _from_env("MAX_PEER_MEMORY", int, None)
    """Their total bytes, for each other worker. Default: three quarters of the memory of the
    machine or container."""
    min_workers: int | None = _from_env("MIN_WORKERS", int, None)
    """If given: the world is elastic, and `init_rpc` returns once this many workers arrived."""
    world: str = _from_env("WORLD", str, "default")
    """Distinguishes worlds that share a store."""

    def __post_init__(self) -> None:
        if not isinstance(self.key, (bytes, type(None))):
            kind = type(self.key).__name__
            raise TypeError(
                f"key is a {kind}: give bytes, such as secrets.token_bytes(32)"
            )
        times = (
            "timeout join_timeout heartbeat host_heartbeat spin switch_interval "
            "handshake_timeout"
        )
        for name in times.split():
            if getattr(self, name) < 0:
                raise ValueError(
                    f"{name}={getattr(self, name)!r}: must not be negative"
                )
        sizes = (
            "threads max_body max_bulk max_strangers max_strangers_per_address "
            "max_peer_connections max_peer_requests"
        )
        for name in sizes.split():
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r}: must be at least 1")
        for name in ("min_workers", "max_peer_memory"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value!r}: must be at least 1")
        if self.torch_threads is not None and self.torch_threads < 0:
            raise ValueError(
                f"torch_threads={self.torch_threads!r}: must not be negative"
            )
        if self.max_body >= 1 << 32:
            raise ValueError(f"max_body={self.max_body}: must be below 4 GiB")
        files = (self.tls_ca, self.tls_cert, self.tls_key)
        if any(files) and not all(files):
            raise ValueError(
                f"tls_ca={self.tls_ca!r}, tls_cert={self.tls_cert!r}, tls_key={self.tls_key!r}: "
                "give all three, or none"
            )
        if self.ports and not 0 < self.ports[0] <= self.ports[1] < 65536:
            raise ValueError(f"ports={self.ports!r}: give (first, last) in 1..65535")

    @classmethod
    def names(cls) -> list[str]:
        return [f.name for f in fields(cls)]
