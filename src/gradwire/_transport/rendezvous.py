"""How workers find each other, over one of torch's own stores.

A world of fixed size: everyone puts its card under its rank and waits for all the others. An
elastic world: a newcomer draws the next id, publishes its card, and then reads the cards of all
who are there; those it greets look up its card. Of two who come at the same time at least one
reads after the other has published. Ids come from a counter that only grows.

    <world>/joined             how often someone began to join a world of fixed size
    <world>/<round>/size       how many workers the round is for (fixed size)
    <world>/<round>/key        the world's secret, unless the user gave one
    <world>/<round>/digest     of the secret, to find one that differs (fixed size)
    <world>/<round>/card/<id>  a worker's card
    <world>/<round>/failed     why this round came to nothing (fixed size)
    <world>/<round>/ids        how many ids were drawn (elastic worlds)
    <world>/<round>/name/<n>   the id of the worker of that name (elastic worlds)
    <world>/<round>/gone/<id>  set when a worker has left or was lost (elastic worlds)

The round goes up each time a world of fixed size starts anew over the same store: so many begin to
join in each as the world is large, and none in one that has failed. Elastic worlds have one round.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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

from ..errors import AuthenticationError, ClosedError, GradwireError
from ..options import Options
from .base import Card
from .cluster_environments import cluster_place
from .connector import is_alive
from .wait_report import WaitReport, wait_for_listener

_STEP = 0.05
_REOPEN = 10.0  # seconds for an old store at the same port to go away
_PROBE = 2.0  # seconds to find out whether someone answers
_LONGEST_PAUSE = 1.0


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
    _check_place(rank, size)
    if url.scheme == "file":
        path = url.netloc + url.path
        if not path:
            raise ValueError(f"{method!r} names no file: use file:///path")
        return Place(FileStore(path), rank, size, None, f"file://{path}")
    host, port = _env_address(settings, cluster.hint) if is_env else _tcp_address(url)
    # torchrun's agent hosts the store that it tells its workers about.
    hosting = rank == 0 and settings.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    found = _tcp_store(host, port, hosting, timeout)
    elsewhere = cluster.neighbor or _remote_host(host)
    return Place(found, rank, size, elsewhere, f"tcp://{host}:{port}")


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


def _tcp_store(host: str, port: int, hosting: bool, timeout: float) -> Store:
    """The store at that address; retried, since its host may still be closing an old one."""
    deadline = time.monotonic() + timeout
    patience = min(deadline, time.monotonic() + _REOPEN)
    report = WaitReport(lambda: f"port {port} of {host}, which is in use, to be free")
    while True:
        if not hosting:
            wait_for_listener(host, port, max(deadline - time.monotonic(), 0.0))
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
            if time.monotonic() + _STEP > patience or not _is_passing(error):
                raise GradwireError(_no_store(host, port, hosting, error)) from None
            report.tick()
            time.sleep(_STEP)


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


def _check_place(rank: int | None, size: int | None) -> None:
    if size is None:
        return
    if size < 1:
        raise ValueError(f"world_size={size}: must be at least 1, or absent")
    if rank is None or not 0 <= rank < size:
        raise ValueError(
            f"rank={rank}: must be in 0..{size - 1} for world_size={size} (or RANK, "
            "with env://)"
        )


@contextmanager
def _store_errors() -> Iterator[None]:
    """What a store raises, as ours."""
    try:
        yield
    except GradwireError:
        raise
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise GradwireError(f"the store failed: {reason}") from error


class Meeting:
    """One worker's part in a rendezvous."""

    def __init__(self, place: Place, options: Options) -> None:
        _check_place(place.rank, place.size)
        self._rank, self._size = place.rank, place.size
        self._where = place.where
        self._own_key = options.secret()
        self._patience = options.join_timeout
        self._deadline = time.monotonic() + options.join_timeout
        self._world: Store | None = PrefixStore(
            f"gradwire/{options.world}", place.store
        )
        self._round: Store | None = None
        self._mine: int | None = None

    @property
    def is_elastic(self) -> bool:
        """Whether workers come and go."""
        return self._size is None

    def key(self) -> bytes:
        """The world's secret: the user's own, or one drawn by whoever came first."""
        with _store_errors():
            key = self._own_key
            if key is None:
                drawn = secrets.token_hex(32)
                found = self._store().compare_set("key", "", drawn)
                key = bytes.fromhex(found.decode())
            if self._size is not None:
                self._compare_key(key)
        return key

    def _compare_key(self, key: bytes) -> None:
        """Name a key that differs from the others' now: later it would be a failed handshake."""
        digest = hmac.digest(key, b"gradwire rendezvous", "sha256").hex()
        found = self._store().compare_set("digest", "", digest).decode()
        if not hmac.compare_digest(found, digest):
            error = (
                f"rank {self._rank} has another key than those that came before: give "
                "all workers the same GRADWIRE_KEY or GRADWIRE_KEY_FILE, or none"
            )
            self._store().compare_set("failed", "", error)
            raise AuthenticationError(error)

    def number(self) -> int:
        """This worker's id."""
        if self._size is None:
            with _store_errors():
                return int(self._store().add("ids", 1)) - 1
        assert self._rank is not None
        return self._rank

    def join(self, card: Card) -> list[Card]:
        """Publish the card and learn the others'.

        Raises:
            ValueError: the name or rank is taken.
            GradwireError: others did not come in time; says which are missing.
        """
        self._mine = card.id
        with _store_errors():
            if self._size is None:
                return self._join_elastic(card)
            try:
                return self._join_fixed(card, self._size)
            except (ValueError, GradwireError) as error:
                self._store().compare_set("failed", "", f"{card.name}: {error}")
                raise

    def find(self, name: str) -> Card | None:
        """A worker of an elastic world by its name, if it is there."""
        with self._while_it_lasts() as store:
            if store is not None and store.check([f"name/{name}"]):
                return self._living(int(store.get(f"name/{name}")))
        return None

    def card(self, number: int) -> Card | None:
        """A worker of an elastic world by its id, if it is there."""
        with self._while_it_lasts() as store:
            return None if store is None else self._living(number)
        return None

    def leave(self, number: int) -> None:
        """Note that a worker is gone, which frees its name; with this one goes the store."""
        with self._while_it_lasts() as store:
            if store is not None:
                store.set(f"gone/{number}", "1")
        if number == self._mine:
            self._let_go()

    def _join_fixed(self, card: Card, size: int) -> list[Card]:
        self._publish(card)
        cards = [self._wait_for(number) for number in range(size)]
        names = [other.name for other in cards]
        for name in names:
            if names.count(name) > 1:
                ranks = [i for i, n in enumerate(names) if n == name]
                raise ValueError(
                    f"worker name {name!r} is used by ranks {ranks}: names must differ"
                )
        return cards

    def _join_elastic(self, card: Card) -> list[Card]:
        self._claim_name(card)
        self._publish(card)
        drawn = int(self._store().add("ids", 0))
        cards = [self._living(number) for number in range(drawn)]
        return [other for other in cards if other is not None]

    def _publish(self, card: Card) -> None:
        data = card.to_bytes().decode()
        found = self._store().compare_set(f"card/{card.id}", "", data).decode()
        if found != data:
            other = Card.from_bytes(found.encode())
            raise ValueError(
                f"rank {card.id} is taken by worker {other.name!r}: "
                f"give {card.name!r} another rank"
            )

    def _claim_name(self, card: Card) -> None:
        key, mine = f"name/{card.name}", str(card.id)
        holder = self._store().compare_set(key, "", mine).decode()
        while holder != mine:
            problem = self._wait_until_gone(card.id, int(holder))
            if problem:
                self._store().set(f"gone/{card.id}", "1")
                raise ValueError(f"worker name {card.name!r} is taken by {problem}")
            holder = self._store().compare_set(key, holder, mine).decode()

    def _wait_until_gone(self, me: int, holder: int) -> str:
        """Why a name stays its holder's; nothing, when that worker is gone.

        One that has just died may not be known to have: its machine may be out of reach, or the
        system may not be done with it. So only one that answers keeps its name at once.
        """
        pause = _STEP
        while not self._is_gone(holder):
            card = self._published(holder)
            patience = max(0.1, min(_PROBE, self._deadline - time.monotonic()))
            answers = card and is_alive(me, self.key(), card, patience)
            if answers is False:
                break
            if answers:
                return f"worker {holder}"
            if time.monotonic() > self._deadline:
                return f"worker {holder}, which does not answer, nor count as lost"
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        return ""

    def _wait_for(self, number: int) -> Card:
        """The card of a worker in a world of fixed size."""
        report = WaitReport(self._awaited)
        while (card := self._published(number)) is None:
            report.tick()
            if self._has("failed"):
                raise GradwireError(
                    f"the world was given up: {self._store().get('failed').decode()}"
                )
            if time.monotonic() > self._deadline:
                raise GradwireError(
                    f"of {self._size} workers, ranks {self._missing()} did not come within "
                    f"{self._patience:g} s (join_timeout) to {self._where}: start them with "
                    "the same address and world_size"
                )
            time.sleep(_STEP / 10)
        return card

    def _missing(self) -> list[int]:
        return [i for i in range(self._size or 0) if not self._has(f"card/{i}")]

    def _awaited(self) -> str:
        return f"ranks {self._missing()} of {self._size} at {self._where}"

    def _published(self, number: int) -> Card | None:
        if not self._has(f"card/{number}"):
            return None
        return Card.from_bytes(self._store().get(f"card/{number}"))

    def _living(self, number: int) -> Card | None:
        return None if self._is_gone(number) else self._published(number)

    def _is_gone(self, number: int) -> bool:
        return self._has(f"gone/{number}")

    def _has(self, key: str) -> bool:
        return bool(self._store().check([key]))

    def _store(self) -> Store:
        """The part of the store for this round."""
        if self._world is None:
            raise ClosedError("the store is gone")
        if self._round is None:
            self._round = self._enter_round(self._world)
        return self._round

    def _enter_round(self, world: Store) -> Store:
        if self._size is None:
            return PrefixStore("elastic", world)
        while True:
            begun = int(world.add("joined", 1))
            found = PrefixStore(str((begun - 1) // self._size), world)
            if self._is_ours(found) and not found.check(["failed"]):
                return found

    def _is_ours(self, store: Store) -> bool:
        """Whether a round is one of worlds of our size; if of others, whether it is complete.

        Raises:
            ValueError: it has begun with another size.
        """
        size = int(store.compare_set("size", "", str(self._size)))
        if size == self._size:
            return True
        if not store.check([f"card/{rank}" for rank in range(size)]):
            error = (
                f"rank {self._rank} has world_size={self._size}, but those that came before "
                f"have world_size={size}: give all the same"
            )
            store.compare_set("failed", "", error)
            raise ValueError(error)
        return False

    @contextmanager
    def _while_it_lasts(self) -> Iterator[Store | None]:
        """The store of an elastic world; it may go before its workers do."""
        try:
            elastic = self._size is None and self._world is not None
            yield self._store() if elastic else None
        except RuntimeError:
            self._let_go()

    def _let_go(self) -> None:
        """Free the store, so that its host can open another at the same port."""
        self._world = self._round = None
