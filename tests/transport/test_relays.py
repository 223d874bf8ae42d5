"""Someone who hands on what two workers say, to where it was not meant to go.

By plain TCP, as it is used within one machine, who sits there could go on to speak in the caller's
name: so a handshake holds only for the one worker that the caller means.
"""

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace

import pytest
from torch.distributed import HashStore

import gradwire as gw
from gradwire._transport.base import Card
from gradwire._transport.connector import Dialer
from gradwire._transport.handshake import Verdict, challenge
from gradwire._transport.keys import derive, seal
from gradwire._transport.stores import Place
from gradwire.worker import Worker
from tests.transport.strangers import KEY
from tests.worlds import (
    LIMIT,
    close_world,
    join_world,
    open_world,
    together,
    wait_until,
)

Address = tuple[str, int]
TCP = {"key": KEY, "unix_sockets": False}


class Relay:
    """Takes connections, and hands on what comes on them to a worker, and back."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: Address = self._listener.getsockname()
        self.to: Address | None = None
        self.carried = bytearray()
        """What the callers have said."""
        self._open = ExitStack()
        self._open.enter_context(self._listener)
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(LIMIT)
        self._open.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near = self._open.enter_context(self._listener.accept()[0])
                assert self.to is not None
                far = self._open.enter_context(socket.create_connection(self.to))
                for args in (near, far, True), (far, near, False):
                    thread = threading.Thread(target=self._carry, args=args)
                    self._threads.append(thread)
                    thread.start()

    def _carry(self, source: socket.socket, to: socket.socket, on: bool) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                self.carried += data if on else b""
                to.sendall(data)
        for sock in source, to:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def relay() -> Iterator[Relay]:
    found = Relay()
    yield found
    found.close()


RAN: list[int] = []


@pytest.fixture(autouse=True)
def nothing_ran() -> Iterator[None]:
    RAN.clear()
    yield
    assert not RAN


def test_the_card_of_an_earlier_world_leads_nobody_to_this_one(relay: Relay) -> None:
    """Who writes to the store repeats a salt, so that old cards hold, and has an old address."""
    store, salt = HashStore(), b"of an earlier world"
    store.set("gradwire/default/0/salt", salt.decode())
    workers: list[Worker] = []

    def join(rank: int) -> None:
        place = Place(store, rank, 2, None)
        workers.append(join_world(f"worker{rank}", place, **TCP))

    def swap_and_join() -> None:
        key = "gradwire/default/0/card/1"
        wait_until(lambda: store.check([key]))
        card = Card.from_bytes(store.get(key)[64:])
        relay.to = card.tcp
        old = replace(card, tcp=relay.address, instance=card.instance ^ 1)
        store.set(key, seal(derive(KEY, salt), old.to_bytes()).decode())
        join(0)

    together(lambda: join(1), swap_and_join)
    (caller,) = (worker for worker in workers if worker.id == 0)
    with pytest.raises(gw.ProtocolError, match=r"worker1.*wrong_worker"):
        caller.rpc_sync("worker1", RAN.append, (1,), timeout=LIMIT)
    assert relay.carried
    close_world(workers, graceful=False)


@contextmanager
def led_astray(relay: Relay, **options: bool) -> Iterator[list[Worker]]:
    """Three workers; who looks for one of them comes to the relay."""
    workers = open_world(3, **TCP, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Dialer,
            "_connect",
            lambda self, limit: socket.create_connection(relay.address, LIMIT),
        )
        yield workers
    close_world(workers, graceful=False)


@pytest.mark.parametrize(
    ("tls", "problem"),
    [(False, "wrong_worker"), (True, "certificate is for worker2, not for 'worker1'")],
    ids=["plain", "tls"],
)
def test_what_is_for_one_worker_cannot_be_handed_to_another(
    relay: Relay, tls: bool, problem: str
) -> None:
    with led_astray(relay, tls=tls) as workers:
        relay.to = workers[2].card.tcp
        with pytest.raises(gw.ProtocolError, match=rf"worker1.*{problem}"):
            workers[0].rpc_sync("worker1", RAN.append, (1,), timeout=LIMIT)


def test_a_worker_does_not_talk_to_itself_in_anothers_name(relay: Relay) -> None:
    with led_astray(relay) as workers:
        relay.to = workers[0].card.tcp
        with pytest.raises(gw.ProtocolError, match=r"worker1.*wrong_worker"):
            workers[0].rpc_sync("worker1", RAN.append, (1,), timeout=LIMIT)


def test_who_says_that_there_is_no_tls_gets_none_the_less() -> None:
    """The one thing that is said without TLS ends the connection: it does not go on without."""
    workers = open_world(2, **TCP, tls=True)
    said: list[bytes] = []

    def deny(listener: socket.socket) -> None:
        sock, _ = listener.accept()
        with sock:
            said.append(sock.recv(65536))
            sock.sendall(challenge(bytes(32), b"", Verdict.TLS_DIFFERS))
            said.append(sock.recv(65536))

    def call() -> None:
        with pytest.raises(gw.ProtocolError, match="one end uses TLS"):
            workers[0].rpc_sync("worker1", RAN.append, (1,), timeout=LIMIT)

    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        pytest.MonkeyPatch.context() as patch,
    ):
        address = listener.getsockname()
        patch.setattr(
            Dialer,
            "_connect",
            lambda self, limit: socket.create_connection(address, LIMIT),
        )
        together(lambda: deny(listener), call)
    first, rest = said
    assert first.startswith(b"\x16\x03")
    assert b"GRADWIRE" not in first + rest
    close_world(workers, graceful=False)
