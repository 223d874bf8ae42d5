"""TLS between workers. Who is in between: `test_man_in_the_middle.py`.

All is on this machine, where TLS is not needed; `tls=True` has it used all the same.
"""

import itertools
import socket
import ssl
import sys
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
from gradwire._transport.handshake import CHALLENGE_SIZE
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
        check_calls(workers)  # both have connected, and accepted, with the first ones
        certified(tmp_path, Ed25519PrivateKey.generate(), "worker0", "worker1")
        check_new_connections(workers)
        # One who still has what was replaced is refused by either end.
        a_certificate(tmp_path / "1", authority, "worker1")
        with pytest.raises(gw.AuthenticationError, match="TLS failed"):
            check_new_connections(workers)


def check_new_connections(workers: list[Worker]) -> None:
    for caller, to in itertools.permutations(workers):
        credentials = caller._transport._endpoint.credentials  # type: ignore[attr-defined]
        dialer = Dialer(credentials, to.card, unix=False)
        dialer.open_first(None).close()


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


# Who is let in


def test_older_versions_of_tls_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    with socket_world(1, key=KEY, **TLS) as (worker,):
        member = worker._transport._endpoint.credentials  # type: ignore[attr-defined]
        context = member._new_context(False)  # all is right but the version
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        assert worker.card.tcp is not None
        with (
            socket.create_connection(worker.card.tcp, LIMIT) as sock,
            pytest.raises((ssl.SSLError, ConnectionError)),
        ):
            context.wrap_socket(sock)
        wait_until(lambda: "TLS failed: unsupported protocol" in caplog.text)


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
