"""How workers find each other, over one of torch's own stores.

A world of fixed size: everyone puts its card under its rank and waits for all the others. An
elastic world: a newcomer draws the next id, publishes its card, and then reads the cards of all
who are there; those it greets look up its card. Of two who come at the same time at least one
reads after the other has published. Ids come from a counter that only grows.

    <world>/joined             how often someone began to join a world of fixed size
    <world>/<round>/size       how many workers the round is for (fixed size)
    <world>/<round>/salt       tells the keys of worlds apart (`keys.py`)
    <world>/<round>/secret     only with `Options.trust_store`
    <world>/<round>/digest     of the key, to find one that differs (fixed size)
    <world>/<round>/card/<id>  a worker's card, sealed
    <world>/<round>/failed     why this round failed (fixed size)
    <world>/<round>/told       how many workers have read that (fixed size)
    <world>/<round>/ids        how many ids were drawn (elastic worlds)
    <world>/<round>/name/<n>   the id of the worker of that name
    <world>/<round>/gone/<id>  set when a worker has left or was lost (elastic worlds)
    <world>/<round>/part/<n>   what the worker of that name does: see `Part` (elastic worlds)

The round goes up each time a world of fixed size starts anew over the same store: so many begin to
join in each as the world is large, and none in one that has failed. Elastic worlds have one round.

Who can write to the store can keep a world from meeting and make workers count as gone, and can do
no more: cards are sealed.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from ..errors import AuthenticationError, ClosedError, GradwireError, ProtocolError
from ..options import Options
from . import key_files, keys
from .base import Card
from .connector import is_alive
from .credentials import Credentials
from .stores import Place, check_place
from .wait_report import WaitReport

log = logging.getLogger("gradwire")

_ELASTIC = "elastic"
_STEP = 0.05
_LOOKS = 3000  # lookups in the store per second, of all waiting workers together
_FEW = 16  # ranks listed in a message
_PROBE = 2.0  # seconds to find out whether a worker answers
_LONGEST_PAUSE = 1.0
_FAREWELL = (
    2.0  # seconds that the host of the store gives others to read why all failed
)


_SAME = (
    "workers on several machines, or of several users, need GRADWIRE_KEY_FILE or GRADWIRE_KEY with "
    "the same key: `gradwire key FILE` makes one; GRADWIRE_TRUST_STORE=1 shares one through the "
    "store, on a network where nobody else reads that"
)


def _random() -> bytes:
    return secrets.token_hex(32).encode()


class Part(str, Enum):
    """The role of a worker of an elastic world. A lost one may come back and continue."""

    WORKS = "works"
    SERVES = "serves"
    FINISHED = "finished"


def _few(ranks: list[int]) -> str:
    """The first of them, for messages to people."""
    more = len(ranks) - _FEW
    return str(ranks) if more <= 0 else f"{ranks[:_FEW]} and {more} more"


def note_finished(store: Store, world: str, name: str) -> None:
    """Record, as its launcher, that a worker of an elastic world will not come back."""
    with _store_errors():
        store.set(f"gradwire/{world}/{_ELASTIC}/part/{name}", Part.FINISHED.value)


@contextmanager
def _store_errors() -> Iterator[None]:
    """Convert a store's errors to ours."""
    try:
        yield
    except GradwireError:
        raise
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise GradwireError(
            f"the store failed; a tcp:// store ends with rank 0, which hosts it ({reason})"
        ) from error


def _same_name(name: str, *ranks: int) -> ValueError:
    return ValueError(
        f"worker name {name!r} is used by ranks {sorted(ranks)}: names must differ"
    )


class Meeting:
    """One worker's part in a rendezvous."""

    def __init__(self, place: Place, options: Options) -> None:
        check_place(place.rank, place.size)
        self._rank, self._size = place.rank, place.size
        self._where, self._is_host = place.where, place.is_host
        self._options = options
        self._secrets = key_files.given(options)
        self._trusts_store = options.trust_store
        self._salt = b""
        self._least = options.min_workers or 1
        self._patience = options.join_timeout
        self._deadline = time.monotonic() + options.join_timeout
        self._whole: Store | None = (
            place.store
        )  # a store written in Python needs this reference
        self._world: Store | None = PrefixStore(
            f"gradwire/{options.world}", place.store
        )
        self._round: Store | None = None
        self._mine: int | None = None
        self._came: dict[int, str] = {}
        """The names of all who ever came to an elastic world, as far as they were looked up."""

    @property
    def is_elastic(self) -> bool:
        """Whether workers come and go."""
        return self._size is None

    def keys(self) -> tuple[bytes, ...]:
        """The world's current keys, the one to use first. A key file is read again."""
        if not self._salt:
            with _store_errors():
                self._begin()
        try:
            self._secrets = key_files.given(self._options) or self._secrets
        except (OSError, ValueError) as error:
            log.warning("the keys read before stay in effect: %s", error)
        return self._derived()

    def _begin(self) -> None:
        self._secrets = self._secrets or (self._common_secret(),)
        self._salt = self._first("salt", _random())
        if self._size is not None:
            self._compare_keys()

    def _derived(self) -> tuple[bytes, ...]:
        return tuple(keys.derive(secret, self._salt) for secret in self._secrets)

    def _common_secret(self) -> bytes:
        """The secret that workers share without a key from the user."""
        if not self._trusts_store:
            return key_files.own()
        log.warning(
            "the world's secret is shared through %s (trust_store): anyone who can read it "
            "there can run any code on all workers",
            self._where,
        )
        return self._first("secret", _random())

    def _first(self, name: str, value: bytes) -> bytes:
        """The value that the first worker put there."""
        found: bytes = self._store().compare_set(name, "", value.decode())
        return found

    def _compare_keys(self) -> None:
        """Report a different key now: later it would be a failed handshake."""
        digests = [keys.digest(key) for key in self._derived()]
        if self._first("digest", digests[0]) not in digests:
            raise AuthenticationError(
                f"rank {self._rank} has a different key from the ranks that arrived earlier: "
                f"{_SAME}"
            )

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
                if self._round is not None:  # else it found a round of another size
                    self._fail(self._round, f"{card.name}: {error}")
                raise

    def find(self, name: str) -> Card | None:
        """A worker of an elastic world by its name, if it is there."""
        with self._while_it_lasts() as store:
            if store is not None and store.check([f"name/{name}"]):
                card = self._living(int(store.get(f"name/{name}")))
                return card if card is not None and card.name == name else None
        return None

    def card(self, number: int) -> Card | None:
        """A worker of an elastic world by its id, if it is there."""
        with self._while_it_lasts() as store:
            return None if store is None else self._living(number)
        return None

    def was_here(self, name: str) -> bool:
        """Whether a worker of this name was ever in an elastic world."""
        with self._while_it_lasts() as store:
            return store is not None and bool(store.check([f"name/{name}"]))
        return False

    def note(self, name: str, part: Part) -> None:
        """Record the role of a worker of an elastic world from now on."""
        with self._while_it_lasts() as store:
            if store is not None:
                store.set(f"part/{name}", part.value)

    def is_over(self) -> bool:
        """Whether all work in an elastic world is finished: only servers are left, if anyone."""
        with self._while_it_lasts() as store:
            if store is None:
                return True
            parts = {self._part_of(name) for name in self._names()}
            return Part.FINISHED in parts and Part.WORKS not in parts
        return True  # the store is gone, and nobody can join any more

    def leave(self, number: int) -> None:
        """Record that a worker is gone, which frees its name; if it is this one, free the store."""
        with self._while_it_lasts() as store:
            if store is not None:
                store.set(f"gone/{number}", "1")
        if number == self._mine:
            self._let_go()

    def _join_fixed(self, card: Card, size: int) -> list[Card]:
        self._publish(card)
        holder = int(self._first(f"name/{card.name}", str(card.id).encode()))
        if holder != card.id:
            raise _same_name(card.name, holder, card.id)
        cards = self._wait_for_all(size)
        ranks: dict[str, int] = {}
        for rank, other in enumerate(
            cards
        ):  # both may have published before one failed
            if ranks.setdefault(other.name, rank) != rank:
                raise _same_name(other.name, ranks[other.name], rank)
        return cards

    def _join_elastic(self, card: Card) -> list[Card]:
        self._claim_name(card)
        self._store().set(f"part/{card.name}", Part.WORKS.value)
        self._publish(card)
        self._wait_for_others()
        drawn = int(self._store().add("ids", 0))
        cards = [self._living(number) for number in range(drawn)]
        return [other for other in cards if other is not None]

    def _publish(self, card: Card) -> None:
        data = keys.seal(self.keys()[0], card.to_bytes())
        found = self._first(f"card/{card.id}", data)
        if found != data:
            other = self._open(card.id, found, self.keys())
            raise ValueError(
                f"rank {card.id} is taken by worker {other.name!r}: "
                f"give {card.name!r} another rank"
            )

    def _claim_name(self, card: Card) -> None:
        key, mine = f"name/{card.name}", str(card.id)
        holder = self._store().compare_set(key, "", mine).decode()
        while holder != mine:
            problem = self._wait_until_gone(card, int(holder))
            if problem:
                self._store().set(f"gone/{card.id}", "1")
                raise ValueError(f"worker name {card.name!r} is taken by {problem}")
            holder = self._store().compare_set(key, holder, mine).decode()

    def _wait_until_gone(self, me: Card, holder: int) -> str:
        """Why a name stays its holder's; nothing, when that worker is gone.

        One that has just died may not be known to have: its machine may be out of reach, or the
        system may not be done with it. So only one that answers keeps its name at once.
        """
        credentials = Credentials(self._options, me.id, me.name, self.keys)
        pause = _STEP
        while not self._is_gone(holder):
            card = self._published(holder)
            patience = max(0.1, min(_PROBE, self._deadline - time.monotonic()))
            answers = card and is_alive(credentials, card, patience)
            if answers is False:
                break
            if answers:
                return f"worker {holder}"
            if time.monotonic() > self._deadline:
                return f"worker {holder}, which does not answer, nor count as lost"
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        return ""

    def _wait_for_others(self) -> None:
        """Until enough have come; those that are gone again count, they may be coming back."""
        report = WaitReport(
            lambda: (
                f"{self._least} workers (min_workers) at {self._where}, where "
                f"{', '.join(sorted(self._names()))} have been"
            )
        )
        while len(found := self._names()) < self._least:
            report.tick()
            if time.monotonic() > self._deadline:
                raise GradwireError(
                    f"only {len(found)} of {self._least} workers (min_workers) arrived at "
                    f"{self._where} within {self._patience:g} s (join_timeout): "
                    f"{', '.join(sorted(found))}"
                )
            time.sleep(_STEP)

    def _names(self) -> set[str]:
        """The names of all workers that ever joined an elastic world."""
        for number in range(int(self._store().add("ids", 0))):
            if number not in self._came and (card := self._published(number)):
                self._came[number] = card.name
        return {*self._came.values()}

    def _part_of(self, name: str) -> Part:
        return Part(self._store().get(f"part/{name}").decode())

    def _wait_for_all(self, size: int) -> list[Card]:
        """The cards of a world of fixed size, once all have arrived."""
        names = [f"card/{number}" for number in range(size)]
        pause = min(_STEP, size / _LOOKS)
        report = WaitReport(self._awaited)
        while not self._store().check(names):
            report.tick()
            if self._has("failed"):
                raise GradwireError(
                    f"the world did not start: {self._store().get('failed').decode()}"
                )
            if time.monotonic() > self._deadline:
                raise GradwireError(
                    f"ranks {_few(self._missing())} of {self._size} did not arrive at "
                    f"{self._where} within {self._patience:g} s (join_timeout): start them "
                    "with the same address and world_size"
                )
            time.sleep(pause)
        found, known = self._store().multi_get(names), self.keys()
        return [self._open(number, card, known) for number, card in enumerate(found)]

    def _missing(self) -> list[int]:
        return [i for i in range(self._size or 0) if not self._has(f"card/{i}")]

    def _awaited(self) -> str:
        return f"ranks {_few(self._missing())} of {self._size} at {self._where}"

    def _published(self, number: int) -> Card | None:
        if not self._has(f"card/{number}"):
            return None
        return self._open(number, self._store().get(f"card/{number}"), self.keys())

    def _open(self, number: int, sealed: bytes, known: tuple[bytes, ...]) -> Card:
        """The card of a worker, if it was authenticated with the key.

        Raises:
            AuthenticationError: it was not.
        """
        try:
            card = Card.from_bytes(keys.unseal(known, sealed))
            if card.id != number:
                raise ProtocolError(f"it is the card of worker {card.id}")
        except ProtocolError as error:
            raise AuthenticationError(
                f"refused the card of worker {number} at {self._where} ({error}): it was "
                f"modified there, or that worker has a different key; {_SAME}"
            ) from None
        return card

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
            return PrefixStore(_ELASTIC, world)
        while True:
            begun = int(world.add("joined", 1))
            found = PrefixStore(str((begun - 1) // self._size), world)
            if self._is_ours(found) and not found.check(["failed"]):
                return found

    def _is_ours(self, store: Store) -> bool:
        """Whether a round is one of worlds of our size; for other sizes, whether it is complete.

        Raises:
            ValueError: it has begun with another size.
        """
        size = int(store.compare_set("size", "", str(self._size)))
        if size == self._size:
            return True
        if not store.check([f"card/{rank}" for rank in range(size)]):
            error = (
                f"rank {self._rank} has world_size={self._size}, but the ranks that arrived "
                f"earlier have world_size={size}: give all the same"
            )
            self._fail(store, error)
            raise ValueError(error)
        return False

    def _fail(self, store: Store, error: str) -> None:
        """Tell all who have come to a round why it failed.

        The store ends with its host, so the host stays until the others have read the reason: they
        would see a broken connection instead, and torch would print a stack.
        """
        store.compare_set("failed", "", error)
        told = int(store.add("told", 1))
        deadline = time.monotonic() + _FAREWELL
        while self._is_host and told < self._arrived() and time.monotonic() < deadline:
            time.sleep(_STEP)
            told = int(store.add("told", 0))

    def _arrived(self) -> int:
        """How many have begun to join this round."""
        assert self._world is not None
        assert self._size is not None
        begun = int(self._world.add("joined", 0))
        return (begun - 1) % self._size + 1

    @contextmanager
    def _while_it_lasts(self) -> Iterator[Store | None]:
        """The store of an elastic world, which may end before its workers do."""
        try:
            elastic = self._size is None and self._world is not None
            yield self._store() if elastic else None
        except GradwireError:
            raise
        except RuntimeError:
            self._let_go()

    def _let_go(self) -> None:
        """Free the store, so that its host can open another at the same port."""
        self._whole = self._world = self._round = None
