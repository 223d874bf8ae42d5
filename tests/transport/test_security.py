"""Who does not know the world's key gets nothing run and nothing unpickled.

Strangers here are raw sockets that say what they like, to workers in this process.
"""

import hmac
import io
import logging
import os
import pickle
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest
import torch
from torch.distributed import HashStore, Store

import gradwire as gw
from gradwire._transport import key_files
from gradwire._transport.connector import Dialer
from gradwire._transport.credentials import Credentials
from gradwire._transport.handshake import (
    CHALLENGE_SIZE,
    HELLO_SIZE,
    PROOF_SIZE,
    Hello,
    Purpose,
    new_hello,
    prove,
)
from gradwire._transport.key_files import given
from gradwire._transport.keys import derive, seal
from gradwire._transport.rendezvous import Meeting
from gradwire._transport.stores import Place, find_place
from gradwire._wire.frames import HEADER, VERSION
from gradwire._wire.messages import CALL
from gradwire.options import Options
from gradwire.worker import Worker
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

KEY = b"sixteen or more bytes of secret"
WRONG_KEY = b"sixteen or more bytes of guess"
NEW_KEY = b"the-key-that-is-to-take-its-place"
PRIVATE = 0o600


@pytest.fixture
def unpickled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was unpickled, by whatever way; nothing, if all is well."""
    seen: list[str] = []

    def recorder(name: str) -> Callable[..., Any]:
        def record(*args: Any, **kwargs: Any) -> Any:
            seen.append(name)
            raise AssertionError(f"{name} was called")

        return record

    class Unpickler(pickle.Unpickler):
        def __init__(self, file: io.BytesIO, *args: Any, **kwargs: Any) -> None:
            seen.append("Unpickler")
            super().__init__(file, *args, **kwargs)

    for module in (pickle, cloudpickle):
        monkeypatch.setattr(module, "loads", recorder(f"{module.__name__}.loads"))
        monkeypatch.setattr(module, "load", recorder(f"{module.__name__}.load"))
    monkeypatch.setattr(pickle, "Unpickler", Unpickler)
    monkeypatch.setattr("gradwire._wire.pickling._Unpickler", Unpickler)
    return seen


@contextmanager
def stranger(worker: Worker) -> Iterator[socket.socket]:
    """A raw connection to a worker."""
    with socket.create_connection(worker.card.tcp, timeout=LIMIT) as sock:
        yield sock


def receive_exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = sock.recv(size - len(data))
        assert more, f"hung up after {len(data)} of {size} bytes"
        data += more
    return data


def key_of(worker: Worker) -> bytes:
    return worker._transport._endpoint.credentials.key


def shake_hands(
    sock: socket.socket, worker: Worker, purpose: Purpose, me: int = 1
) -> None:
    """Connect as worker `me` to worker 0, as one who knows the key."""
    hello = new_hello(purpose, me, 0, 12345).to_bytes()
    sock.sendall(hello)
    answer = receive_exactly(sock, CHALLENGE_SIZE)
    sock.sendall(prove(key_of(worker), hello, answer))
    assert receive_exactly(sock, 1) == b"."


def is_closed(sock: socket.socket) -> bool:
    """Whether the other side hangs up, after whatever it still says."""
    try:
        while sock.recv(65536):
            pass
    except ConnectionError:
        pass
    return True


class Journal:
    """What gradwire logged."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog

    def wait_for(self, text: str) -> None:
        wait_until(lambda: any(text in r.getMessage() for r in self._caplog.records))


@pytest.fixture
def journal(caplog: pytest.LogCaptureFixture) -> Iterator[Journal]:
    with caplog.at_level(logging.WARNING, "gradwire"):
        yield Journal(caplog)


@pytest.fixture
def workers() -> Iterator[list[Worker]]:
    with socket_world(2, key=KEY) as opened:
        yield opened


@pytest.fixture
def target(workers: list[Worker]) -> Iterator[Worker]:
    """A worker to attack; afterwards it still serves the other one."""
    yield workers[0]
    assert workers[1].rpc_sync("worker0", max, (1, 2), timeout=LIMIT) == 2
    assert workers[1].rpc_async("worker0", max, (1, 2), timeout=LIMIT).wait() == 2


# Strangers


ANNOUNCED = HEADER.pack(VERSION, CALL, 2, 100, 1, 0, 0, 0, 0, 0)

GREETINGS: dict[str, bytes] = {
    "zeros": bytes(4096),
    "text": b"hello, is there a worker? " * 100,
    "http": b"GET / HTTP/1.1\r\nHost: worker\r\nAccept: */*\r\n\r\n".ljust(200),
    "tls": bytes.fromhex("16030100fa010000f60303").ljust(300, b"\x42"),
    "a frame": ANNOUNCED + pickle.dumps(print).ljust(100),
    "a pickle": pickle.dumps({"function": print}) * 10,
    "a hello with garbage for a purpose": b"GRADWIRE" + b"\xff" * HELLO_SIZE,
}


@pytest.mark.parametrize("greeting", GREETINGS.values(), ids=GREETINGS.keys())
def test_who_is_no_worker_is_shut_out(
    target: Worker, journal: Journal, unpickled: list[str], greeting: bytes
) -> None:
    with stranger(target) as sock:
        sock.sendall(greeting)
        assert is_closed(sock)
    journal.wait_for("refused a connection: ")
    assert not unpickled


CALLED: list[str] = []


def test_a_guessed_key_gets_nothing_run_and_nothing_unpickled(
    target: Worker, journal: Journal, unpickled: list[str]
) -> None:
    body = pickle.dumps((CALLED.append, ("it ran",), {}, None))
    frame = HEADER.pack(VERSION, CALL, 2, len(body), 1, 0, 0, 0, 0, 0) + body
    for purpose in Purpose:
        with stranger(target) as sock:
            hello = new_hello(purpose, 1, 0, 12345).to_bytes()
            sock.sendall(hello)
            answer = receive_exactly(sock, CHALLENGE_SIZE)
            text = b"connector\0" + hello + answer
            sock.sendall(hmac.digest(WRONG_KEY, text, "sha256") + frame)
            assert is_closed(sock)
    journal.wait_for("refused a connection: it does not know this world's key")
    assert not unpickled
    assert not CALLED


def test_a_proof_sent_blindly_is_refused(target: Worker, journal: Journal) -> None:
    with stranger(target) as sock:
        hello = new_hello(Purpose.SHARED, 1, 0, 12345).to_bytes()
        sock.sendall(hello + bytes(PROOF_SIZE) + ANNOUNCED)
        assert is_closed(sock)
    journal.wait_for("does not know this world's key")


def test_a_recorded_handshake_cannot_be_played_again(
    target: Worker, journal: Journal
) -> None:
    with stranger(target) as sock:
        hello = new_hello(Purpose.LEASED, 1, 0, 12345).to_bytes()
        sock.sendall(hello)
        proof = prove(key_of(target), hello, receive_exactly(sock, CHALLENGE_SIZE))
        sock.sendall(proof)
        assert receive_exactly(sock, 1) == b"."
    with stranger(target) as sock:
        sock.sendall(hello + proof)
        assert is_closed(sock)
    journal.wait_for("does not know this world's key")


def test_a_hello_of_another_version_is_told_apart(
    target: Worker, journal: Journal
) -> None:
    with stranger(target) as sock:
        hello = Hello(Purpose.SHARED, 1, 0, 1, bytes(32), version=42).to_bytes()
        sock.sendall(hello)
        answer = receive_exactly(sock, CHALLENGE_SIZE)
        with pytest.raises(gw.ProtocolError, match="it speaks version"):
            prove(key_of(target), hello, answer)
        assert is_closed(sock)
    journal.wait_for("wrong_version")


def test_a_hello_for_another_worker_is_refused(
    target: Worker, journal: Journal
) -> None:
    with stranger(target) as sock:
        hello = new_hello(Purpose.SHARED, 1, 77, 1).to_bytes()
        sock.sendall(hello)
        answer = receive_exactly(sock, CHALLENGE_SIZE)
        with pytest.raises(gw.ProtocolError, match="it refuses: wrong_worker"):
            prove(key_of(target), hello, answer)
        assert is_closed(sock)
    journal.wait_for("wrong_worker")


@pytest.mark.parametrize("said", [0, 1, HELLO_SIZE - 1, HELLO_SIZE])
def test_who_falls_silent_in_the_handshake_is_shut_out(
    target: Worker, journal: Journal, monkeypatch: pytest.MonkeyPatch, said: int
) -> None:
    monkeypatch.setattr(target._transport._acceptor, "patience", 0.1)
    with stranger(target) as sock:
        sock.sendall(new_hello(Purpose.SHARED, 1, 0, 1).to_bytes()[:said])
        assert is_closed(sock)
    journal.wait_for("refused a connection: ")


def test_who_speaks_too_slowly_in_the_handshake_is_shut_out(
    target: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target._transport._acceptor, "patience", 0.3)
    with stranger(target) as sock:
        start = time.monotonic()
        sock.settimeout(0.1)
        for byte in new_hello(Purpose.SHARED, 1, 0, 1).to_bytes():
            try:
                sock.sendall(bytes([byte]))
                if not sock.recv(1):  # paces the bytes; nothing comes in between
                    break
            except TimeoutError:
                assert time.monotonic() - start < 3.0, "it may take for ever"
            except ConnectionError:
                break


def test_strangers_beyond_a_number_are_shut_out_at_once(
    target: Worker, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target._transport._acceptor, "patience", 0.5)
    crowd = [socket.create_connection(target.card.tcp, LIMIT) for _ in range(300)]
    journal.wait_for("too many connections wait to be authenticated")
    for sock in crowd:
        assert is_closed(sock)
        sock.close()


def test_strangers_who_come_and_go_leave_nothing_behind(target: Worker) -> None:
    for _ in range(50):
        with stranger(target) as sock:
            sock.sendall(b"x")


@pytest.mark.parametrize("purpose", Purpose)
def test_who_hangs_up_right_after_the_handshake_harms_nobody(
    target: Worker, purpose: Purpose
) -> None:
    at_once = struct.pack("ii", 1, 0)
    for link in range(20):
        with stranger(target) as sock:
            hello = new_hello(purpose, 99, 0, link).to_bytes()
            sock.sendall(hello)
            proof = prove(key_of(target), hello, receive_exactly(sock, CHALLENGE_SIZE))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
            sock.sendall(proof)


# Keys


def check_calls(workers: list[Worker]) -> None:
    assert workers[0].rpc_sync("worker1", max, (1, 2)) == 2
    assert workers[1].rpc_sync("worker0", max, (1, 2)) == 2


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
    journal.wait_for("whoever reads it can run any code")


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
REFUSED = "refused the card of worker 0 at .*: it was changed there"


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


def test_the_file_of_a_store_is_for_its_user_alone(tmp_path: Path) -> None:
    find_place(f"file://{tmp_path}/meet", None, 0, 1, LIMIT)
    assert (tmp_path / "meet").stat().st_mode & 0o777 == PRIVATE


# Addresses


def bound(worker: Worker) -> list[Any]:
    return [one._sock.getsockname() for one in worker._transport._listeners]


def test_by_default_it_listens_on_loopback_only() -> None:
    with socket_world(1) as (worker,):
        unix, (host, _) = bound(worker)
        assert unix.startswith(b"\0gradwire-")
        assert host == "127.0.0.1"


def test_without_unix_sockets_it_listens_on_loopback_alone() -> None:
    with socket_world(1, unix_sockets=False) as (worker,):
        ((host, _),) = bound(worker)
        assert host == "127.0.0.1"


def test_it_listens_elsewhere_when_told_to() -> None:
    with socket_world(1, bind="0.0.0.0", unix_sockets=False) as (worker,):
        ((host, _),) = bound(worker)
        assert host == "0.0.0.0"


# Members of the world that misbehave


MAX_BODY = 1 << 20
MAX_BULK = 1 << 24


@contextmanager
def member(purpose: Purpose) -> Iterator[tuple[socket.socket, list[Worker]]]:
    """A connection by one who knows the key, who speaks as worker 2, to worker 0."""
    limits = {"max_body": MAX_BODY, "max_bulk": MAX_BULK}
    workers = open_world(3, key=KEY, **limits)
    workers[2].shutdown(graceful=False)
    workers.pop()
    with stranger(workers[0]) as sock:
        shake_hands(sock, workers[0], purpose, me=2)
        yield sock, workers
    check_calls(workers)
    close_world(workers, graceful=False)


def header(**changed: int) -> bytes:
    fields = {"version": VERSION, "kind": CALL, "encoding": 2, "body": 8}
    fields |= {
        "call": 1 << 39,
        "scope": 0,
        "mark": 0,
        "bulk": 0,
        "segment": 0,
        "over": 0,
    }
    return HEADER.pack(*{**fields, **changed}.values())


@pytest.mark.parametrize("purpose", [Purpose.SHARED, Purpose.LEASED])
@pytest.mark.parametrize("announced", [{"body": 1 << 30}, {"bulk": 1 << 30}])
def test_an_announced_length_takes_memory_only_as_bytes_arrive(
    target: Worker, purpose: Purpose, announced: dict[str, int]
) -> None:
    process, traffic = psutil.Process(), target._transport.traffic
    with stranger(target) as sock:
        shake_hands(sock, target, purpose)
        before = process.memory_info().rss
        for data in (header(**announced), bytes(1000)):
            so_far = traffic.received
            sock.sendall(data)
            wanted = so_far + len(data)
            wait_until(lambda n=wanted: traffic.received >= n)  # type: ignore[misc]
        assert process.memory_info().rss - before < 100 << 20


CORRUPT: dict[str, tuple[bytes, str]] = {
    "another version": (header(version=99) + bytes(8), "frame of version 99"),
    "a body too large": (
        header(body=MAX_BODY + 1),
        f"body of {MAX_BODY + 1} bytes, the limit is {MAX_BODY}",
    ),
    "a bulk too large": (
        header(bulk=MAX_BULK + 1),
        f"bulk of {MAX_BULK + 1} bytes, the limit is {MAX_BULK}",
    ),
    "memory that is not shared": (
        header(segment=5, bulk=100) + bytes(8),
        "frame in shared memory, but none is shared",
    ),
    "noise": (b"\xde\xad\xbe\xef" * 100, "frame of version 222"),
}


@pytest.mark.parametrize("purpose", [Purpose.SHARED, Purpose.LEASED])
@pytest.mark.parametrize(("data", "reason"), CORRUPT.values(), ids=CORRUPT.keys())
def test_a_corrupt_frame_closes_the_connection_with_a_reason(
    journal: Journal, purpose: Purpose, data: bytes, reason: str
) -> None:
    with member(purpose) as (sock, _):
        sock.sendall(data)
        assert is_closed(sock)
        journal.wait_for(reason)


@pytest.mark.parametrize("purpose", [Purpose.SHARED, Purpose.LEASED])
def test_a_frame_cut_short_ends_the_connection(purpose: Purpose) -> None:
    for cut in (1, HEADER.size - 1, HEADER.size, HEADER.size + 7):
        with member(purpose) as (sock, _):
            sock.sendall((header() + bytes(8))[:cut])


@pytest.mark.parametrize("purpose", [Purpose.SHARED, Purpose.LEASED])
@pytest.mark.parametrize("encoding", [0, 1, 2, 3, 4, 5, 6, 65535])
def test_a_body_that_makes_no_sense_is_answered_with_a_failure(
    purpose: Purpose, encoding: int
) -> None:
    with member(purpose) as (sock, _):
        sock.sendall(header(encoding=encoding) + b"\xffnonsense"[:8])
        _, kind, *_ = HEADER.unpack(receive_exactly(sock, HEADER.size))
        assert kind == 3


def test_a_message_of_unknown_kind_is_answered_with_a_failure() -> None:
    with member(Purpose.LEASED) as (sock, _):
        sock.sendall(header(kind=200) + pickle.dumps(())[:8].ljust(8, b"."))
        _, kind, *_ = HEADER.unpack(receive_exactly(sock, HEADER.size))
        assert kind == 3


def test_a_second_shared_connection_is_refused(journal: Journal) -> None:
    with member(Purpose.SHARED) as (_, workers), stranger(workers[0]) as second:
        hello = new_hello(Purpose.SHARED, 2, 0, 12345).to_bytes()
        second.sendall(hello)
        answer = receive_exactly(second, CHALLENGE_SIZE)
        second.sendall(prove(key_of(workers[0]), hello, answer))
        assert is_closed(second)
        journal.wait_for("second shared connection")


def test_one_who_knows_the_key_but_is_not_in_the_world_is_not_served(
    workers: list[Worker],
) -> None:
    with stranger(workers[0]) as sock:
        shake_hands(sock, workers[0], Purpose.LEASED, me=99)
        body = pickle.dumps((CALLED.append, ("it ran",), {}, None))
        sock.sendall(header(body=len(body)) + body)
        assert is_closed(sock)
    assert not CALLED


# Allow-lists


def test_a_worker_with_an_allow_list_runs_only_that() -> None:
    apart = {1: {"allow": [torch.add, max]}}
    with socket_world(2, apart=apart) as (caller, _):
        assert caller.rpc_sync("worker1", max, (1, 2)) == 2
        assert caller.rpc_sync("worker1", torch.add, (torch.ones(2), 1)).sum() == 4
        with pytest.raises(gw.NotAllowedError, match="not on this worker's allow-list"):
            caller.rpc_sync("worker1", min, (1, 2))
        with pytest.raises(gw.NotAllowedError):
            caller.rpc_async("worker1", min, (1, 2)).wait()


def test_a_worker_with_an_allow_list_unpickles_nothing(unpickled: list[str]) -> None:
    body = pickle.dumps((CALLED.append, ("it ran",), {}, None))
    for encoding in (1, 2, 5):
        workers = open_world(2, key=KEY, allow=[max])
        with stranger(workers[0]) as sock:
            shake_hands(sock, workers[0], Purpose.LEASED)
            sock.sendall(header(encoding=encoding, body=len(body)) + body)
            fields = HEADER.unpack(receive_exactly(sock, HEADER.size))
            answer = receive_exactly(sock, fields[3])
            assert fields[1] == 3
            assert b"NotAllowedError" in answer
            assert b"accepts no pickles" in answer
        check_calls(workers)
        close_world(workers)
    assert not unpickled
    assert not CALLED


def test_arguments_that_need_a_pickle_are_refused_before_they_are_sent() -> None:
    with socket_world(2, apart={1: {"allow": [max]}}) as (caller, _):
        with pytest.raises((TypeError, gw.NotAllowedError)):
            caller.rpc_sync("worker1", max, (object(), 1))
        with pytest.raises(gw.NotAllowedError, match="accepts no functions by value"):
            caller.rpc_sync("worker1", lambda: 1)
        assert caller.rpc_sync("worker1", max, (1, 2)) == 2


def test_expanded_tensors_are_bounded_by_what_they_would_take() -> None:
    limits = {"max_body": MAX_BODY, "max_bulk": MAX_BULK}
    with socket_world(2, **limits) as workers:
        size = (MAX_BODY + MAX_BULK) // 4
        just, other = (torch.ones(1).expand(size) for _ in range(2))
        assert workers[0].rpc_sync("worker1", torch.numel, (just,)) == size
        for refused in (torch.ones(1).expand(1 << 40), [just, other]):
            problem = "expanded tensors of .* bytes, the limit is"
            with pytest.raises(gw.ProtocolError, match=problem):
                workers[0].rpc_sync("worker1", len, (refused,))
        check_calls(workers)
