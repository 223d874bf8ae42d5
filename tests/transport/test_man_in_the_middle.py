"""Someone on the way between two workers, who alters, drops, repeats and makes up what they say.

All is on this machine, where TLS is not needed; `tls=True` has it used all the same.
"""

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import pytest

import gradwire as gw
from gradwire._transport.connector import Dialer
from gradwire._transport.credentials import Credentials
from gradwire._transport.handshake import HELLO_SIZE
from gradwire._wire.frames import HEADER
from gradwire.options import Options
from gradwire.worker import Worker
from tests.conftest import FUZZ
from tests.transport.strangers import KEY
from tests.worlds import LIMIT, close_world, open_world, together, wait_until

TLS = {"tls": True, "unix_sockets": False}
SHORT = 0.5
"""Seconds for a call that gets no response because of an attack."""
CHANGE_CIPHER_SPEC = 20
"""The kind of a record that TLS 1.3 sends for old middleboxes, and ignores (RFC 8446, 5)."""
PING_SIZE = 22 + HEADER.size
"""Of the record with a frame that nobody waits for."""


@dataclass
class Attack:
    """What happens to one record of a connection: the n-th of one direction."""

    action: str
    to_acceptor: bool
    number: int
    done: bool = False
    is_on_nothing: bool = False
    is_on_ping: bool = False
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
        self.is_on_nothing = record[0] == CHANGE_CIPHER_SPEC
        self.is_on_ping = len(record) == PING_SIZE
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


CALLS = 5
"""Of which the last one is not attacked: with it both ends have read what came before."""
FIRST_CALL = {True: 15, False: 19}
"""The record of the first call, and of its result. Those before are the handshakes of the shared
connection and of one for calls."""
RECORDS = [(to, n) for to in (True, False) for n in range(FIRST_CALL[to] + CALLS - 1)]
Case = tuple[str, bool, int]


def cases_of(actions: str) -> list[Case]:
    """Every attack on every record with `make fuzz`, a sample of them otherwise."""
    every = [(action, *record) for record in RECORDS for action in actions.split()]
    return every[:: max(1, round(1 / FUZZ))]


def attacked_calls(caller: Worker, patience: float) -> tuple[list[int], str]:
    """What calls return, up to the one that fails, and why that does."""
    results: list[int] = []
    for number in range(CALLS):
        try:
            found = caller.rpc_sync("worker1", run, (number,), timeout=patience)
        except gw.GradwireError as error:
            return results, str(error)
        results.append(found)
    return results, ""


def check_runs(attack: Attack, results: list[int]) -> None:
    """Nothing ran twice, or in another order; nor a call that did not arrive as it was sent."""
    assert list(range(len(RAN))) == RAN
    assert results == RAN[: len(results)]
    attacked = attack.number - FIRST_CALL[attack.to_acceptor]
    if attacked >= 0 and not attack.is_on_ping:
        arrived = attack.action.startswith("replay") + (not attack.to_acceptor)
        assert len(RAN) <= attacked + arrived


@pytest.mark.fuzz
@pytest.mark.parametrize(
    ("action", "to_acceptor", "number"),
    cases_of("alter replay replay_the_first inject inject_plain"),
)
def test_who_is_in_between_gets_nothing_run(
    action: str,
    to_acceptor: bool,
    number: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    attack = Attack(action, to_acceptor, number)
    with between(attack, monkeypatch) as caller:
        results, reason = attacked_calls(caller, LIMIT / 2)
        assert attack.done
        check_runs(attack, results)
        if attack.is_on_nothing and action == "replay":
            assert len(results) == CALLS
            return
        told = "modified in transit"
        if number < FIRST_CALL[to_acceptor]:  # it can be in a handshake
            told += "|TLS failed: |one end uses TLS"
        wait_until(lambda: re.search(told, caplog.text + reason))


@pytest.mark.fuzz
@pytest.mark.parametrize(
    ("action", "to_acceptor", "number"), cases_of("cut drop reorder")
)
def test_who_holds_things_up_gets_nothing_run(
    action: str,
    to_acceptor: bool,
    number: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for patience in SHORT, 10 * SHORT, LIMIT / 2:
        attack = Attack(action, to_acceptor, number)
        with between(attack, monkeypatch) as caller:
            results, _ = attacked_calls(caller, patience)
        check_runs(attack, results)
        if attack.done:  # else a busy machine was late before anything was wrong
            break
    assert attack.done
    assert len(results) < CALLS or attack.is_on_nothing or attack.is_on_ping


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
