"""Where a world's key comes from and lies, what a store is trusted with, who reaches a worker."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.distributed import HashStore, Store

import gradwire as gw
from gradwire._transport import addresses, key_files, stores
from gradwire._transport.connector import Dialer
from gradwire._transport.credentials import Credentials
from gradwire._transport.key_files import given
from gradwire._transport.keys import derive, seal
from gradwire._transport.rendezvous import Meeting
from gradwire._transport.stores import Place, find_place
from gradwire.options import Options
from gradwire.worker import Worker
from tests.transport.slow_network import Proxy
from tests.transport.strangers import (
    KEY,
    NEW_KEY,
    PRIVATE,
    WRONG_KEY,
    Journal,
    check_calls,
    key_of,
)
from tests.worlds import (
    LIMIT,
    close_world,
    free_port,
    join_world,
    open_world,
    socket_world,
    together,
    wait_until,
)

# Keys


def written_in(store: Store) -> dict[str, bytes]:
    """All that a store has, by what it is."""
    names = [name for name in SAID if store.check([f"gradwire/default/0/{name}"])]
    return {name: store.get(f"gradwire/default/0/{name}") for name in names}


SAID = "size salt secret digest key failed card/0 card/1".split()


def test_without_a_key_it_is_this_users_and_differs_by_world(tmp_path: Path) -> None:
    store = HashStore()
    with socket_world(2, store=store) as workers:
        check_calls(workers)
        key = key_of(workers[0])
        assert key == key_of(workers[1])
        assert len(key) == 32
    with socket_world(1) as (other,):
        assert key_of(other) != key


@pytest.mark.parametrize("options", [{}, {"key": KEY}], ids=["no key", "a key"])
def test_no_secret_enters_the_store(options: dict[str, Any]) -> None:
    store = HashStore()
    with socket_world(2, store=store, **options) as workers:
        check_calls(workers)
        key, written = key_of(workers[0]), written_in(store)
        assert sorted(written) == ["card/0", "card/1", "digest", "salt", "size"]
        for secret in (key, KEY, key_files.own()):
            for form in (secret, secret.hex().encode()):
                assert not any(form in value for value in written.values())
        hidden = [derive(value, written["salt"]) for value in written.values()]
        assert key not in hidden


def test_a_store_that_is_trusted_shares_a_random_secret(journal: Journal) -> None:
    store = HashStore()
    with socket_world(2, store=store, trust_store=True) as workers:
        check_calls(workers)
        written = written_in(store)
        assert key_of(workers[0]) == derive(written["secret"], written["salt"])
    journal.wait_for("secret is shared through the store (trust_store): anyone who can")


def test_the_key_can_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    key_files.create(file)
    store = HashStore()
    with socket_world(2, key_file=str(file), store=store) as workers:
        check_calls(workers)
        secret, salt = file.read_bytes().strip(), written_in(store)["salt"]
        assert key_of(workers[0]) == derive(secret, salt)


@pytest.mark.parametrize("variable", ["GRADWIRE_KEY", "GRADWIRE_KEY_FILE"])
def test_the_key_can_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str
) -> None:
    file = tmp_path / "key"
    file.touch(PRIVATE)
    file.write_bytes(KEY)
    value = KEY.decode() if variable == "GRADWIRE_KEY" else str(file)
    monkeypatch.setenv(variable, value)
    store = HashStore()
    with socket_world(2, store=store) as workers:
        check_calls(workers)
        assert key_of(workers[0]) == derive(KEY, written_in(store)["salt"])


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o660])
def test_a_key_file_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "key"
    key_files.create(file)
    assert file.stat().st_mode & 0o777 == PRIVATE
    file.chmod(mode)
    with pytest.raises(ValueError, match=f"can be read by others .mode {mode:04o}"):
        open_world(1, key_file=str(file))


def test_a_new_key_does_not_take_the_place_of_another(tmp_path: Path) -> None:
    file = tmp_path / "key"
    key_files.create(file)
    with pytest.raises(FileExistsError):
        key_files.create(file)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this user's own key lies; as on a machine that has none yet."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path / f"gradwire-{os.geteuid()}"


def test_a_users_own_key_is_made_once_and_for_nobody_else(machine: Path) -> None:
    found = together(*(key_files.own for _ in range(8)))
    assert len(set(found)) == 1
    assert machine.stat().st_mode & 0o777 == 0o700
    (file,) = machine.iterdir()
    assert file.stat().st_mode & 0o777 == PRIVATE


def test_a_folder_of_keys_that_others_can_enter_is_refused(machine: Path) -> None:
    machine.mkdir()
    machine.chmod(0o755)
    with pytest.raises(gw.GradwireError, match="others may enter it"):
        open_world(1)


def test_a_folder_of_keys_that_leads_elsewhere_is_refused(
    machine: Path, tmp_path: Path
) -> None:
    (tmp_path / "others").mkdir(mode=0o700)
    machine.symlink_to(tmp_path / "others")
    with pytest.raises(gw.GradwireError, match="remove it"):
        open_world(1)


def test_workers_of_two_machines_are_told_what_to_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machines = iter([b"the one machine's", b"the other machine's"])
    monkeypatch.setattr(key_files, "own", lambda: next(machines))
    with pytest.raises(gw.GradwireError, match=r"several machines.*GRADWIRE_KEY_FILE"):
        open_world(2, join_timeout=LIMIT)


def test_the_key_comes_from_the_option_before_the_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.touch(PRIVATE)
    file.write_bytes(b"from-the-file,-16+-bytes\n")
    assert given(Options()) == ()
    assert given(Options(key_file=str(file))) == (b"from-the-file,-16+-bytes",)
    assert given(Options(key=b"k" * 16, key_file=str(file))) == (b"k" * 16,)


def test_a_key_that_protects_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="the key has 15 bytes"):
        given(Options(key=b"k" * 15))


def test_a_short_key_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.touch(PRIVATE)
    file.write_bytes(b"secret\n")
    for options in ({"key": b"secret"}, {"key_file": str(file)}):
        with pytest.raises(ValueError, match="the key has 6 bytes: use at least 16"):
            open_world(1, **options)


def test_a_key_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no_such_key"):
        open_world(1, key_file=str(tmp_path / "no_such_key"))


def test_the_key_is_not_shown() -> None:
    assert "secret" not in repr(Options(key=KEY))
    with socket_world(1, key=KEY) as (worker,):
        shown = f"{worker!r} {worker.options!r} {worker._transport!r} {worker.card!r}"
        assert KEY.decode() not in shown
        assert KEY not in worker.card.to_bytes()


@pytest.mark.parametrize("unix_sockets", [True, False])
def test_another_key_fails_the_call_and_names_the_worker(
    unix_sockets: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The store tells, too, as far as it can be trusted; and so do cards.
    monkeypatch.setattr(Meeting, "_compare_keys", lambda self: None)
    monkeypatch.setattr(
        "gradwire._transport.keys.unseal", lambda keys, sealed: sealed[64:]
    )
    apart = {0: {"key": KEY}, 1: {"key": WRONG_KEY}}
    workers = open_world(2, apart=apart, unix_sockets=unix_sockets)
    problem = "worker 'worker1': it does not know this world's key"
    with pytest.raises(gw.AuthenticationError, match=problem):
        workers[0].rpc_sync("worker1", max, (1, 2))
    with pytest.raises(gw.AuthenticationError, match=problem):
        workers[0].rpc_async("worker1", max, (1, 2)).wait()
    assert workers[0].rpc_sync("worker0", max, (1, 2)) == 2
    assert workers[0]._agent.caller.in_flight == 0
    close_world(workers, graceful=False)


def write_keys(file: Path, *keys: bytes) -> None:
    file.touch(PRIVATE)
    file.write_bytes(b"\n".join(keys) + b"\n")


@pytest.mark.parametrize(
    "options",
    [{}, {"tls": True, "unix_sockets": False}],
    ids=["unix", "tls"],
)
def test_a_key_takes_anothers_place_while_workers_run(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    store, place = HashStore(), Place(HashStore(), None, None, None)
    place = Place(store, None, None, None)
    files = [tmp_path / "first", tmp_path / "second"]
    for file in files:
        write_keys(file, KEY)

    def join(name: str, file: Path) -> Worker:
        return join_world(name, place, key_file=str(file), **options)

    def talk(*workers: Worker) -> None:
        for worker in workers:
            for other in workers:
                assert worker.rpc_sync(other.name, max, (1, 2), timeout=LIMIT) == 2

    with join("first", files[0]) as first:
        for keys in ([KEY, NEW_KEY], [NEW_KEY, KEY]):
            for file in files:  # one machine after the other
                write_keys(file, *keys)
                with join("second", files[1]) as second:
                    talk(first, second)
        with join("second", files[1]) as second:
            talk(first, second)
            for file in files:
                write_keys(file, NEW_KEY)
            talk(first, second)
            assert len(second.get_worker_infos()) == 2
        stale = Dialer(
            Credentials(Options(**options), 1, "second", lambda: (old,)),
            first.card,
            unix=not options,
        )
        old = derive(KEY, first._meeting._salt)
        with pytest.raises(gw.AuthenticationError):
            stale.open_first(None)


# Stores


def move(card: bytes) -> bytes:
    """Lead to another address."""
    return card[:64] + card[64:].replace(b"127.0.0.1", b"127.0.0.2")


def forge(card: bytes) -> bytes:
    """Seal it anew, without the key."""
    moved = move(card)[64:]
    return seal(derive(WRONG_KEY, b""), moved)


CHANGES = pytest.mark.parametrize(
    "change",
    [move, forge, lambda card: card[64:], lambda _: b"?"],
    ids=["moved", "forged", "without a seal", "nonsense"],
)
REFUSED = "refused the card of worker 0 at .*: it was modified there"


def rewrite(store: Store, name: str, change: Callable[[bytes], bytes]) -> None:
    """What someone does who can write to the store."""
    key = f"gradwire/default/{name}"
    wait_until(lambda: store.check([key]))
    store.set(key, change(store.get(key)).decode())


@CHANGES
def test_a_card_that_was_changed_in_the_store_is_refused(
    change: Callable[[bytes], bytes],
) -> None:
    store = HashStore()

    def first() -> None:
        try:
            join_world("first", Place(store, 0, 2, None), key=KEY).close()
        except gw.GradwireError:
            pass  # the second one has given the world up before it was complete

    def second() -> None:
        rewrite(store, "0/card/0", change)
        with pytest.raises(gw.AuthenticationError, match=REFUSED):
            join_world("second", Place(store, 1, 2, None), key=KEY)

    together(first, second)


@CHANGES
def test_a_newcomer_refuses_a_card_that_was_changed(
    change: Callable[[bytes], bytes],
) -> None:
    store = HashStore()
    place = Place(store, None, None, None)
    with join_world("first", place, key=KEY):
        rewrite(store, "elastic/card/0", change)
        with pytest.raises(gw.AuthenticationError, match=REFUSED):
            join_world("second", place, key=KEY)


def test_the_card_of_another_worker_is_refused() -> None:
    store = HashStore()
    place = Place(store, None, None, None)
    with join_world("first", place, key=KEY), join_world("second", place, key=KEY):
        other = store.get("gradwire/default/elastic/card/1")
        rewrite(store, "elastic/card/0", lambda card: other)
        with pytest.raises(gw.AuthenticationError, match="it is the card of worker 1"):
            join_world("third", place, key=KEY)


def listening(port: int) -> list[str]:
    """The addresses at which this process listens on a port."""
    connections = psutil.Process().net_connections("tcp")
    return [
        c.laddr.ip for c in connections if c.laddr.port == port and c.status == "LISTEN"
    ]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_store_listens_on_the_address_asked_for(host: str) -> None:
    port = free_port()
    place = find_place(f"tcp://{host}:{port}", None, 0, 1, LIMIT)
    assert place.store.check(["nothing"]) is False
    assert listening(port) in (["127.0.0.1"], ["::1"])


def test_a_store_that_falls_silent_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its machine was cut off: no connection ends."""
    monkeypatch.setattr(stores, "_SILENCE", 3.0)
    with Proxy() as proxy:
        held = find_place(f"tcp://127.0.0.1:{proxy.port}", None, 0, 2, LIMIT).store
        held.set("key", "value")
        asked = find_place(f"tcp://127.0.0.2:{proxy.port}", None, 1, 2, LIMIT).store
        assert asked.check(["key"])
        proxy.frozen.set()
        with pytest.raises(RuntimeError):
            asked.check(["key"])


@pytest.mark.parametrize("mode", [None, 0o644, 0o666])
def test_the_file_of_a_store_is_for_its_user_alone(
    tmp_path: Path, mode: int | None
) -> None:
    file = tmp_path / "meet"
    if mode is not None:  # it is there before
        file.touch()
        file.chmod(mode)
    find_place(f"file://{file}", None, 0, 1, LIMIT)
    assert file.stat().st_mode & 0o777 == PRIVATE


# Addresses


def bound(worker: Worker) -> list[Any]:
    return [one._sock.getsockname() for one in worker._transport._listeners]


def test_by_default_it_listens_on_loopback_only() -> None:
    with socket_world(1) as (worker,):
        unix, (host, _) = bound(worker)
        assert unix.startswith(b"\0gradwire-")
        assert host == "127.0.0.1"


@pytest.mark.skipif(
    sys.platform != "linux", reason="other systems have one loopback address"
)
def test_it_listens_on_the_way_to_a_rendezvous_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On one machine, an address of loopback stands for that of another interface."""
    ways = {"elsewhere": "127.0.0.2"}
    monkeypatch.setattr(addresses, "way_to", ways.__getitem__)
    with join_world("worker", Place(HashStore(), 0, 1, "elsewhere")) as worker:
        _, (host, _) = bound(worker)
        assert host == worker.card.tcp[0] == "127.0.0.2"


def test_without_unix_sockets_it_listens_on_loopback_alone() -> None:
    with socket_world(1, unix_sockets=False) as (worker,):
        ((host, _),) = bound(worker)
        assert host == "127.0.0.1"


def test_it_listens_elsewhere_when_told_to() -> None:
    with socket_world(1, bind="0.0.0.0", unix_sockets=False) as (worker,):
        ((host, _),) = bound(worker)
        assert host == "0.0.0.0"
