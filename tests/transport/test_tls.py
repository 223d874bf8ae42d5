"""TLS between workers, and someone on the way who reads, alters and makes up what they say.

All is on this machine, where TLS is not needed; `tls=True` has it used all the same.
"""

import re
import socket
import ssl
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from torch.distributed import HashStore

import gradwire as gw
from gradwire._transport import peer_user
from gradwire._transport.connector import Dialer
from gradwire._transport.credentials import Credentials, leaves_machine
from gradwire._transport.handshake import CHALLENGE_SIZE, HELLO_SIZE
from gradwire._transport.stores import Place
from gradwire.options import Options
from gradwire.worker import Worker
from tests.worlds import (
    LIMIT,
    close_world,
    join_world,
    open_world,
    socket_world,
    together,
    wait_until,
)

TLS = {"tls": True, "unix_sockets": False}
KEY = b"sixteen or more bytes of secret"
SHORT = 0.5
"""Seconds for a call that gets no answer because of an attack."""


def check_calls(workers: list[Worker]) -> None:
    for caller, to in (workers[0], "worker1"), (workers[1], "worker0"):
        assert caller.rpc_sync(to, max, (1, 2)) == 2
        assert caller.rpc_async(to, max, (1, 2)).wait() == 2


def way(worker: Worker) -> str:
    (found,) = worker.statistics()["links"].values()
    return found


# With nobody in between


def test_calls_travel_over_tls() -> None:
    with socket_world(2, **TLS) as workers:
        check_calls(workers)
        assert way(workers[0]) == way(workers[1]) == "TCP, TLS"


@pytest.mark.parametrize("name", ["trainer:0", "a.b-c_d", "n" * 128])
def test_a_certificate_can_have_any_name_of_a_worker(name: str) -> None:
    store = HashStore()

    def join(rank: int, name: str) -> Worker:
        return join_world(name, Place(store, rank, 2, None), **TLS)

    workers = together(lambda: join(0, name), lambda: join(1, "other"))
    assert workers[0].rpc_sync("other", max, (1, 2)) == 2
    assert workers[1].rpc_sync(name, max, (1, 2)) == 2
    close_world(workers)


def test_what_does_not_leave_the_machine_has_no_tls() -> None:
    with socket_world(2, unix_sockets=False) as workers:
        check_calls(workers)
        assert way(workers[0]) == "TCP"


@pytest.mark.parametrize("size", [1, 10_000, 100_000, 5_000_000, 50_000_001])
def test_tensors_arrive_as_they_left(size: int) -> None:
    with socket_world(2, **TLS) as workers:
        x = torch.arange(size).to(torch.uint8)
        for _ in range(3):
            assert torch.equal(workers[0].rpc_sync("worker1", torch.neg, (x,)), -x)


def test_many_threads_share_a_connection() -> None:
    x = torch.arange(
        30_000.0
    )  # the writer has to wait for room, and the reader for more
    with socket_world(2, **TLS) as workers:

        def call() -> None:
            waiting = [
                workers[0].rpc_async("worker1", torch.add, (x, i)) for i in range(100)
            ]
            for i, future in enumerate(waiting):
                assert torch.equal(future.wait(), x + i)

        together(call, call, call, call)


# Who the other end is


def test_another_worlds_authority_is_refused() -> None:
    with socket_world(2, **TLS) as workers:
        other = Credentials(
            Options(tls=True), 0, "worker0", lambda: (b"another world's",)
        )
        dialer = Dialer(other, workers[1].card, unix=False)
        with pytest.raises(gw.AuthenticationError, match=r"worker1.*TLS failed"):
            dialer.open_first(None)
        check_calls(workers)


def a_certificate(folder: Path, authority: Ed25519PrivateKey, name: str) -> Options:
    """Options for a worker of that name, with a certificate of an authority of the user's."""
    own, now = Ed25519PrivateKey.generate(), datetime.now(timezone.utc)
    issuer = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "users")])

    def builder(key: Ed25519PrivateKey, subject: x509.Name) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(hours=1))
            .not_valid_after(now + timedelta(hours=1))
        )

    basic = x509.BasicConstraints(ca=True, path_length=0)
    root = builder(authority, issuer).add_extension(basic, critical=True)
    names = x509.SubjectAlternativeName([x509.DNSName(name)])
    leaf = builder(own, x509.Name([])).add_extension(names, critical=True)
    private = own.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    folder.mkdir(exist_ok=True)
    for file, data in {
        "ca": root.sign(authority, None).public_bytes(Encoding.PEM),
        "cert": leaf.sign(authority, None).public_bytes(Encoding.PEM),
        "key": private,
    }.items():
        (folder / file).write_bytes(data)
    return {f"tls_{file}": str(folder / file) for file in ("ca", "cert", "key")}  # type: ignore[return-value]


@pytest.fixture
def authority() -> Ed25519PrivateKey:
    return Ed25519PrivateKey.generate()


def certified(
    folder: Path, authority: Ed25519PrivateKey, *names: str
) -> dict[int, dict[str, Any]]:
    """What sets workers apart: certificates with these names."""
    named: dict[int, Any] = {}
    for rank, name in enumerate(names):
        named[rank] = a_certificate(folder / f"{rank}", authority, name)
    return named


def test_certificates_can_be_the_users(
    tmp_path: Path, authority: Ed25519PrivateKey
) -> None:
    apart = certified(tmp_path, authority, "worker0", "worker1")
    with socket_world(2, apart=apart, **TLS) as workers:
        check_calls(workers)


@pytest.mark.parametrize("caller", [0, 1])
def test_a_certificate_for_another_name_is_refused(
    tmp_path: Path, authority: Ed25519PrivateKey, caller: int
) -> None:
    apart = certified(tmp_path, authority, "worker0", "worker7")
    workers = open_world(2, apart=apart, **TLS)
    with pytest.raises(gw.GradwireError):
        workers[caller].rpc_sync(f"worker{1 - caller}", max, (1, 2), timeout=SHORT)
    close_world(workers, graceful=False)


def test_the_name_in_a_certificate_is_told(
    tmp_path: Path, authority: Ed25519PrivateKey, caplog: pytest.LogCaptureFixture
) -> None:
    apart = certified(tmp_path, authority, "worker0", "worker7")
    workers = open_world(2, apart=apart, **TLS)
    problem = "worker 'worker1': its certificate is for worker7, not for 'worker1'"
    with pytest.raises(gw.AuthenticationError, match=problem):
        workers[0].rpc_sync("worker1", max, (1, 2))
    with pytest.raises(gw.GradwireError):
        workers[1].rpc_sync("worker0", max, (1, 2), timeout=SHORT)
    wait_until(lambda: "connection of worker 1: its certificate is for" in caplog.text)
    close_world(workers, graceful=False)


def test_certificates_can_be_replaced_under_way(
    tmp_path: Path, authority: Ed25519PrivateKey
) -> None:
    apart = certified(tmp_path, authority, "worker0", "worker1")
    with socket_world(2, apart=apart, **TLS) as workers:
        assert workers[0].rpc_sync("worker1", max, (1, 2)) == 2
        certified(tmp_path, Ed25519PrivateKey.generate(), "worker0", "worker1")
        assert workers[1].rpc_sync("worker0", max, (1, 2)) == 2  # a new connection


def test_some_files_only_are_not_enough() -> None:
    with pytest.raises(ValueError, match="give all three, or none"):
        Options(tls_ca="ca.pem")


@pytest.mark.parametrize("caller", [0, 1])
def test_workers_of_which_some_have_tls_are_told(caller: int) -> None:
    apart = {0: {"tls": True}, 1: {"tls": False}}
    workers = open_world(2, apart=apart, unix_sockets=False)
    with pytest.raises(gw.ProtocolError, match=r"set tls .GRADWIRE_TLS. alike"):
        workers[caller].rpc_sync(f"worker{1 - caller}", max, (1, 2), timeout=LIMIT)
    close_world(workers, graceful=False)


def test_without_cryptography_the_error_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(
        sys.modules, "gradwire._transport.world_authority", raising=False
    )
    monkeypatch.setitem(sys.modules, "cryptography", None)
    workers = open_world(2, **TLS)
    with pytest.raises(gw.GradwireError, match=r"install 'gradwire\[tls\]'.*tls=False"):
        workers[0].rpc_sync("worker1", max, (1, 2))
    close_world(workers, graceful=False)


def test_that_tls_is_off_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with socket_world(1, tls=False, bind="0.0.0.0"):
        pass
    with socket_world(1, tls=False):
        pass  # on loopback
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("TLS is off (tls=False): anyone who can read or modify")


class Ends:
    """A connection, as far as its addresses go."""

    def __init__(self, ours: str, theirs: str) -> None:
        self._ours, self._theirs = ours, theirs

    def getsockname(self) -> tuple[str, int]:
        return self._ours, 1

    def getpeername(self) -> tuple[str, int]:
        return self._theirs, 2


@pytest.mark.parametrize(
    ("ours", "theirs", "leaves"),
    [
        ("127.0.0.1", "127.0.0.1", False),
        ("127.0.0.2", "127.0.0.1", False),
        ("::1", "::1", False),
        ("10.0.0.1", "10.0.0.1", False),
        ("::ffff:10.0.0.1", "10.0.0.1", False),
        ("10.0.0.1", "10.0.0.2", True),
        ("fe80::1%eth0", "fe80::2%eth0", True),
        ("2001:db8::1", "2001:db8::2", True),
    ],
)
def test_which_connections_leave_the_machine(
    ours: str, theirs: str, leaves: bool
) -> None:
    assert leaves_machine(Ends(ours, theirs)) is leaves  # type: ignore[arg-type]


# Unix sockets


def test_a_process_of_another_user_is_not_spoken_to_by_unix_sockets(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket_world(2) as workers:
        with socket.socket(socket.AF_UNIX) as sock, monkeypatch.context() as patch:
            patch.setattr(peer_user.os, "geteuid", lambda: 12345)
            sock.connect("\0" + workers[0].card.unix[1:])
            sock.settimeout(LIMIT)
            assert sock.recv(1) == b""
            wait_until(lambda: "a process of another user (uid" in caplog.text)
            # Who connects looks, too, and then takes TCP.
            assert workers[0].rpc_sync("worker1", max, (1, 2)) == 2
            assert way(workers[0]) == "TCP"
        check_calls(workers)


# Someone in between


@dataclass
class Attack:
    """What happens to one record of a connection: the n-th of one direction."""

    action: str
    to_acceptor: bool
    number: int
    done: bool = False
    held: bytes = b""
    seen: list[bytes] = field(default_factory=list)

    def on(self, record: bytes, to_acceptor: bool) -> Iterator[bytes]:
        """What arrives when this was sent."""
        if to_acceptor is not self.to_acceptor:
            yield record
            return
        self.seen.append(record)
        if self.held:
            yield from (record, self.held)
            self.held = b""
            return
        if len(self.seen) - 1 != self.number:
            yield record
            return
        self.done = True
        yield from getattr(self, self.action)(record)

    def alter(self, record: bytes) -> Iterator[bytes]:
        yield record[:-1] + bytes([record[-1] ^ 1])

    def cut(self, record: bytes) -> Iterator[bytes]:
        yield record[: len(record) // 2]

    def drop(self, record: bytes) -> Iterator[bytes]:
        return iter(())

    def replay(self, record: bytes) -> Iterator[bytes]:
        yield from (record, record)

    def replay_the_first(self, record: bytes) -> Iterator[bytes]:
        yield from (record, self.seen[0])

    def reorder(self, record: bytes) -> Iterator[bytes]:
        self.held = record
        return iter(())

    def inject(self, record: bytes) -> Iterator[bytes]:
        """A record as of those who talk, and plain bytes as if there were no TLS."""
        yield b"\x17\x03\x03\x00\x40" + bytes(64)
        yield record

    def inject_plain(self, record: bytes) -> Iterator[bytes]:
        yield b"GRADWIRE" + bytes(HELLO_SIZE - 8)
        yield record


class Between:
    """Takes connections for worker1, and hands them on record by record."""

    def __init__(self, target: tuple[str, int], attack: Attack) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        self._target = target
        self._attack = attack
        self._socks: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        for sock in self._socks:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for sock in [self._listener, *self._socks]:
            sock.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self._socks.append(near)
                far = socket.create_connection(self._target)
                self._socks.append(far)
                for args in (near, far, True), (far, near, False):
                    thread = threading.Thread(target=self._carry, args=args)
                    self._threads.append(thread)
                    thread.start()

    def _carry(self, source: socket.socket, to: socket.socket, on: bool) -> None:
        with suppress(OSError), source.makefile("rb") as stream:
            while header := stream.read(5):
                record = header + stream.read(int.from_bytes(header[3:], "big"))
                for part in self._attack.on(record, on):
                    to.sendall(part)
        with suppress(OSError):
            to.shutdown(socket.SHUT_WR)


RAN: list[int] = []


def run(number: int) -> int:
    RAN.append(number)
    return number


@contextmanager
def between(attack: Attack, monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    """A worker whose connections to worker1 are attacked."""
    RAN.clear()
    workers = open_world(2, key=KEY, **TLS)
    proxy = Between(workers[1].card.tcp, attack)  # type: ignore[arg-type]
    with monkeypatch.context() as patch:
        patch.setattr(
            Dialer,
            "_connect",
            lambda self, limit: socket.create_connection(proxy.address, LIMIT),
        )
        try:
            yield workers[0]
        finally:
            close_world(workers, graceful=False)
            proxy.close()


def attacked_calls(caller: Worker, patience: float) -> tuple[list[int], str]:
    """What four calls return, up to the one that fails, and why that does."""
    results: list[int] = []
    for number in range(4):
        try:
            found = caller.rpc_sync("worker1", run, (number,), timeout=patience)
        except gw.GradwireError as error:
            return results, str(error)
        results.append(found)
    return results, ""


ACTIONS = "alter cut drop replay replay_the_first reorder inject inject_plain".split()


@pytest.mark.parametrize("number", range(9))
@pytest.mark.parametrize("to_acceptor", [True, False], ids=["there", "back"])
@pytest.mark.parametrize("action", ACTIONS)
def test_who_is_in_between_gets_nothing_run(
    action: str,
    to_acceptor: bool,
    number: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for patience in SHORT, 10 * SHORT, LIMIT / 2:
        attack = Attack(action, to_acceptor, number)
        with between(attack, monkeypatch) as caller:
            results, reason = attacked_calls(caller, patience)
        assert list(range(len(RAN))) == RAN  # nothing twice, nothing else, in order
        assert results == RAN[: len(results)]
        if attack.done:  # else a busy machine was late before anything was wrong
            break
    assert attack.done
    if len(results) < 4:  # else it was at the end, and changed nothing
        ends = "altered on the way|TLS failed|uses TLS|timed out|closed"
        assert re.search(ends, caplog.text + reason)


def test_a_forged_authority_in_between_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who ends TLS at both sides needs certificates of the world's."""
    forger = Credentials(Options(tls=True), 1, "worker1", lambda: (b"guessed",))
    workers = open_world(2, key=KEY, **TLS)
    RAN.clear()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        monkeypatch.setattr(
            Dialer,
            "_connect",
            lambda self, limit: socket.create_connection(address, LIMIT),
        )

        def answer() -> None:
            sock, _ = listener.accept()
            with sock, pytest.raises(gw.AuthenticationError):
                forger.with_tls(sock, accepts=True).handshake()

        def call() -> None:
            with pytest.raises(gw.AuthenticationError, match="TLS failed"):
                workers[0].rpc_sync("worker1", run, (1,))

        together(answer, call)
    close_world(workers, graceful=False)
    assert not RAN


def test_older_versions_of_tls_are_refused() -> None:
    with socket_world(1, key=KEY, **TLS) as (worker,):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        assert worker.card.tcp is not None
        with (
            socket.create_connection(worker.card.tcp, LIMIT) as sock,
            pytest.raises((ssl.SSLError, ConnectionError)),
        ):
            context.wrap_socket(sock)


def test_without_a_certificate_nobody_gets_in(caplog: pytest.LogCaptureFixture) -> None:
    with socket_world(1, key=KEY, **TLS) as (worker,):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        assert worker.card.tcp is not None
        with (
            socket.create_connection(worker.card.tcp, LIMIT) as sock,
            pytest.raises((ssl.SSLError, ConnectionError)),
            context.wrap_socket(sock) as stream,
        ):
            stream.recv(CHALLENGE_SIZE)
        wait_until(lambda: "refused a connection: TLS failed: " in caplog.text)
