"""Raw sockets that say what they like, and what the attacked worker logs."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gradwire._transport.handshake import (
    CHALLENGE_SIZE,
    Purpose,
    new_hello,
    prove,
)
from gradwire.worker import Worker
from tests.worlds import (
    LIMIT,
    wait_until,
)

KEY = b"sixteen or more bytes of secret"
WRONG_KEY = b"sixteen or more bytes of guess"
NEW_KEY = b"the-key-that-is-to-take-its-place"
PRIVATE = 0o600


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


def send_proof(
    sock: socket.socket,
    worker: Worker,
    purpose: Purpose,
    me: int = 1,
    link: int = 12345,
) -> None:
    """Connect as worker `me` to this worker, as one who knows the key."""
    hello = new_hello(purpose, me, worker.card.instance, link).to_bytes()
    sock.sendall(hello)
    answer = receive_exactly(sock, CHALLENGE_SIZE)
    sock.sendall(prove(key_of(worker), hello, answer))


def shake_hands(
    sock: socket.socket,
    worker: Worker,
    purpose: Purpose,
    me: int = 1,
    link: int = 12345,
) -> None:
    """Do so, and be let in."""
    send_proof(sock, worker, purpose, me, link)
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


def check_calls(workers: list[Worker]) -> None:
    assert workers[0].rpc_sync("worker1", max, (1, 2)) == 2
    assert workers[1].rpc_sync("worker0", max, (1, 2)) == 2
