"""How workers find each other, over one of torch's own stores.

A world of fixed size: everyone puts its card under its rank and waits for all the others. An
elastic world: a newcomer draws the next id, publishes its card, and learns the cards of those
before it; those it then speaks to look up its card. Ids come from a counter that only grows.

    <world>/<round>/key        the world's secret, unless the user gave one
    <world>/<round>/card/<id>  a worker's card
    <world>/<round>/name/<n>   the id of the worker of that name (elastic worlds)
    <world>/<round>/gone/<id>  set when a worker has left or was lost (elastic worlds)

The round goes up each time a world of fixed size starts anew over the same store.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from urllib.parse import parse_qs, urlparse

from torch.distributed import (  # type: ignore[attr-defined]
    FileStore,
    PrefixStore,
    Store,
    TCPStore,
)

from ..errors import GradwireError
from ..options import Options
from .base import Card

_STEP = 0.05


@dataclass(slots=True)
class Place:
    """Where workers meet, and who this worker is there."""

    store: Store
    rank: int | None
    size: int | None
    host: str | None
    """The other machine that the store is on, if it is on another."""


def find_place(
    method: str | None,
    store: Store | None,
    rank: int | None,
    size: int | None,
    timeout: float,
) -> Place:
    """The store that `env://`, `tcp://host:port`, `file:///path` or an object stand for.

    Raises:
        ValueError: something is missing or makes no sense; says what.
        GradwireError: the store cannot be reached.
    """
    if store is not None:
        return Place(store, rank, size, _remote_host(getattr(store, "host", None)))
    url = urlparse(method or "env://")
    query = parse_qs(url.query)
    rank = rank if rank is not None else _number(query.get("rank", [None])[0])
    size = size if size is not None else _number(query.get("world_size", [None])[0])
    if url.scheme == "file":
        path = url.netloc + url.path
        if not path:
            raise ValueError(f"{method!r} names no file: use file:///path")
        return Place(FileStore(path), rank, size, None)
    if url.scheme == "env":
        rank = rank if rank is not None else _number(os.environ.get("RANK"))
        size = size if size is not None else _number(os.environ.get("WORLD_SIZE"))
        host, port = _env("MASTER_ADDR"), int(_env("MASTER_PORT"))
        hosting = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    elif url.scheme == "tcp":
        if url.hostname is None or url.port is None:
            raise ValueError(f"{method!r} lacks a host or port: use tcp://host:port")
        host, port, hosting = url.hostname, url.port, rank == 0
    else:
        raise ValueError(f"{method!r}: use env://, tcp://host:port or file:///path")
    return Place(
        _tcp_store(host, port, hosting, timeout), rank, size, _remote_host(host)
    )


def _env(name: str) -> str:
    value = os.environ.get(name)
    if value is None:
        raise ValueError(
            f"{name} is not set: set it (env://), or give init_method='tcp://host:port'"
        )
    return value


def _number(text: str | None) -> int | None:
    return None if text is None else int(text)


def _remote_host(host: str | None) -> str | None:
    if not host:
        return None
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except OSError:
        return host
    return None if found <= {"127.0.0.1", "::1"} else host


def _tcp_store(host: str, port: int, hosting: bool, timeout: float) -> Store:
    """The store at that address; retried, since its host may still be closing an old one."""
    deadline = time.monotonic() + timeout
    while True:
        left = max(deadline - time.monotonic(), 0.001)
        try:
            return TCPStore(
                host,
                port,
                is_master=hosting,
                wait_for_workers=False,
                timeout=timedelta(seconds=left),
            )
        except (RuntimeError, ValueError) as error:
            if time.monotonic() + _STEP > deadline or not _is_passing(error):
                role = "open" if hosting else "reach"
                raise GradwireError(
                    f"cannot {role} the store at {host}:{port}: {error}"
                ) from error
            time.sleep(_STEP)


def _is_passing(error: Exception) -> bool:
    text = str(error).lower()
    return "in use" in text or "connection reset" in text


def _check_place(place: Place) -> None:
    rank, size = place.rank, place.size
    if size is None:
        return
    if size < 1:
        raise ValueError(f"world_size={size}: must be at least 1, or absent")
    if rank is None or not 0 <= rank < size:
        raise ValueError(f"rank={rank}: must be in 0..{size - 1} for world_size={size}")


class Meeting:
    """One worker's part in a rendezvous."""

    def __init__(self, place: Place, options: Options) -> None:
        _check_place(place)
        self._place = place
        self._options = options
        self._deadline = time.monotonic() + options.join_timeout
        self._store = PrefixStore(self._prefix(), place.store)

    @property
    def is_elastic(self) -> bool:
        """Whether workers come and go."""
        return self._place.size is None

    def _prefix(self) -> str:
        world = f"gradwire/{self._options.world}"
        if self._place.size is None:
            return f"{world}/elastic"
        joined = self._place.store.add(f"{world}/joined", 1)
        return f"{world}/{(joined - 1) // self._place.size}"

    def key(self) -> bytes:
        """The world's secret: the user's own, or one drawn by whoever came first."""
        own = self._options.secret()
        if own is not None:
            return own
        drawn = secrets.token_hex(32)
        return bytes.fromhex(self._store.compare_set("key", "", drawn).decode())

    def number(self) -> int:
        """This worker's id."""
        if self._place.size is None:
            return int(self._store.add("ids", 1)) - 1
        assert self._place.rank is not None
        return self._place.rank

    def join(self, card: Card) -> list[Card]:
        """Publish the card and learn the others'.

        Raises:
            ValueError: the name or rank is taken.
            GradwireError: others did not come in time; says which are missing.
        """
        if self._place.size is None:
            return self._join_elastic(card)
        self._publish(card)
        cards = [self._card_of(i) for i in range(self._place.size)]
        names = [c.name for c in cards if c is not None]
        for name in names:
            if names.count(name) > 1:
                ranks = [i for i, n in enumerate(names) if n == name]
                raise ValueError(
                    f"worker name {name!r} is used by ranks {ranks}: names must differ"
                )
        return [c for c in cards if c is not None]

    def find(self, name: str) -> Card | None:
        """A worker of an elastic world by its name, if it is there."""
        if self._place.size is not None or not self._has(f"name/{name}"):
            return None
        number = int(self._store.get(f"name/{name}"))
        return None if self._is_gone(number) else self._card_of(number)

    def card(self, number: int) -> Card | None:
        """A worker of an elastic world by its id, if it is there."""
        if self._place.size is not None or not self._has(f"card/{number}"):
            return None
        return self._card_of(number)

    def leave(self, number: int) -> None:
        """Note that a worker is gone, which frees its name."""
        if self._place.size is None:
            try:
                self._store.set(f"gone/{number}", "1")
            except RuntimeError:
                pass  # the store went before us

    def _publish(self, card: Card) -> None:
        data = card.to_bytes().decode()
        found = self._store.compare_set(f"card/{card.id}", "", data).decode()
        if found != data:
            other = Card.from_bytes(found.encode())
            raise ValueError(
                f"rank {card.id} is taken by worker {other.name!r}: "
                f"give {card.name!r} another rank"
            )

    def _join_elastic(self, card: Card) -> list[Card]:
        self._claim_name(card)
        self._publish(card)
        earlier = [self._card_of(i) for i in range(card.id)]
        return [*(c for c in earlier if c is not None), card]

    def _claim_name(self, card: Card) -> None:
        key, mine = f"name/{card.name}", str(card.id)
        holder = self._store.compare_set(key, "", mine).decode()
        while holder != mine:
            if not self._is_gone(int(holder)):
                self._store.set(f"gone/{card.id}", "1")
                raise ValueError(
                    f"worker name {card.name!r} is taken by worker {holder}"
                )
            holder = self._store.compare_set(key, holder, mine).decode()

    def _card_of(self, number: int) -> Card | None:
        """A worker's card; waits for it. None if the worker is gone."""
        while not self._has(f"card/{number}") or self._is_gone(number):
            if self._is_gone(number):
                return None
            if time.monotonic() > self._deadline:
                raise GradwireError(self._missing())
            time.sleep(_STEP / 10)
        return Card.from_bytes(self._store.get(f"card/{number}"))

    def _missing(self) -> str:
        size = self._place.size
        if size is None:
            return "another worker began to join and did not finish"
        missing = [i for i in range(size) if not self._has(f"card/{i}")]
        return (
            f"of {size} workers, ranks {missing} did not come within "
            f"{self._options.join_timeout:g} s"
        )

    def _is_gone(self, number: int) -> bool:
        return self._place.size is None and self._has(f"gone/{number}")

    def _has(self, key: str) -> bool:
        return bool(self._store.check([key]))
