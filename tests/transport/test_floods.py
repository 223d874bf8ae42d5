"""Crowds of strangers, and a member that asks for too much: the calls of others go on.

`GRADWIRE_FUZZ` multiplies the crowds: 10,000 strangers with `make fuzz`, a fifth of them otherwise.
How much longer calls take meanwhile is measured by `gradwire bench --floods`, not here.
"""

import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import pytest

from gradwire._transport.handshake import (
    CHALLENGE_SIZE,
    HELLO_SIZE,
    Purpose,
    new_hello,
)
from gradwire.worker import Worker
from tests.conftest import cases
from tests.transport.strangers import is_closed, receive_exactly, stranger
from tests.worlds import (
    LIMIT,
    SOON,
    close_world,
    meanwhile,
    open_world,
    socket_world,
    wait_until,
)

CALLS = 200


@pytest.fixture(params=[False, True], ids=["plain", "tls"])
def workers(request: pytest.FixtureRequest) -> Iterator[list[Worker]]:
    opened = open_world(
        3,
        unix_sockets=False,
        tls=request.param,
        handshake_timeout=1.0,
        max_strangers=60,
        max_strangers_per_address=30,
    )
    yield opened
    close_world(opened)


def call_on(workers: list[Worker], calls: int = CALLS) -> None:
    """Members call each other, by connections that they have and by new ones."""
    for number in range(calls):
        began = time.monotonic()
        assert (
            workers[1].rpc_sync("worker0", max, (number, -1), timeout=LIMIT) == number
        )
        assert time.monotonic() - began < SOON
    assert workers[2].rpc_sync("worker0", max, (1, 2), timeout=LIMIT) == 2


SAID = {"nothing": b"", "http": b"GET / HTTP/1.1\r\n\r\n", "zeros": bytes(HELLO_SIZE)}


@pytest.mark.fuzz
@pytest.mark.parametrize("said", SAID.values(), ids=SAID)
def test_a_flood_of_strangers_keeps_no_member_out(
    workers: list[Worker], said: bytes
) -> None:
    address, over = workers[0].card.tcp, threading.Event()
    assert address is not None

    def flood() -> None:
        for _ in range(cases(10_000)):
            with socket.create_connection(address, LIMIT) as sock, suppress(OSError):
                sock.sendall(said)
        over.set()

    with meanwhile(flood):
        while not over.is_set():
            call_on(workers, 10)
    call_on(workers, 10)


def test_strangers_that_speak_slowly_keep_no_member_out(workers: list[Worker]) -> None:
    address, over = workers[0].card.tcp, threading.Event()
    assert address is not None
    hello = new_hello(Purpose.SHARED, 1, workers[0].card.instance, 1).to_bytes()

    def dribble() -> None:
        with ExitStack() as stack:
            crowd = [
                stack.enter_context(socket.create_connection(address, LIMIT))
                for _ in range(100)
            ]
            for at in range(len(hello)):
                for sock in crowd:
                    with suppress(OSError):
                        sock.send(hello[at : at + 1])
                if over.wait(0.001):
                    break

    with meanwhile(dribble):
        try:
            call_on(workers)
        finally:
            over.set()


def test_who_has_been_silent_for_the_longest_time_makes_place() -> None:
    options = {"unix_sockets": False, "max_strangers": 3, "handshake_timeout": LIMIT}
    with socket_world(2, **options) as workers, ExitStack() as stack:
        crowd = [stack.enter_context(stranger(workers[0])) for _ in range(3)]
        strangers = workers[0]._transport._acceptor._strangers  # type: ignore[attr-defined]
        wait_until(lambda: len(strangers) == 3)
        hello = new_hello(Purpose.SHARED, 1, workers[0].card.instance, 1)
        crowd[0].sendall(hello.to_bytes())
        receive_exactly(crowd[0], CHALLENGE_SIZE)
        stack.enter_context(stranger(workers[0]))
        assert is_closed(crowd[1])
        for other in crowd[0], crowd[2]:
            other.settimeout(0.01)
            with pytest.raises(TimeoutError):  # it still has its place
                other.recv(1)


@pytest.mark.skipif(
    sys.platform != "linux", reason="other systems have one loopback address"
)
def test_one_address_does_not_take_the_places_of_others(workers: list[Worker]) -> None:
    address, acceptor = workers[0].card.tcp, workers[0]._transport._acceptor
    assert address is not None
    acceptor.patience = LIMIT  # nobody goes because the time is up
    with ExitStack() as stack:

        def connect(source: str) -> socket.socket:
            sock = socket.create_connection(address, LIMIT, (source, 0))
            return stack.enter_context(sock)

        first = connect("127.0.0.3")
        wait_until(lambda: len(acceptor._strangers) == 1)
        crowd = [connect("127.0.0.2") for _ in range(50)]
        wait_until(lambda: len(acceptor._strangers) == 31)
        first.settimeout(0.01)
        with pytest.raises(TimeoutError):  # it still has its place
            first.recv(1)
        assert crowd[0].recv(1) == b""  # the oldest of the crowd has not


def busy(number: int) -> int:
    return number


def test_a_member_that_floods_does_not_keep_others_waiting(
    workers: list[Worker],
) -> None:
    over = threading.Event()

    def flood() -> None:
        waiting: list[Callable[[], object]] = []
        while not over.is_set() and len(waiting) < cases(50_000):
            waiting.append(workers[2].rpc_async("worker0", busy, (1,), timeout=0).wait)
        for wait in waiting:
            wait()

    with meanwhile(flood):
        try:
            for number in range(CALLS):
                began = time.monotonic()
                assert workers[1].rpc_sync("worker0", busy, (number,)) == number
                assert time.monotonic() - began < SOON
        finally:
            over.set()
