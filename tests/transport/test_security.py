"""Who does not know the world's key gets nothing run and nothing unpickled.

Strangers here are raw sockets that say what they like, to workers in this process.
"""

import hmac
import pickle
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest
import torch

import gradwire as gw
from gradwire._transport.handshake import (
    CHALLENGE_SIZE,
    HELLO_SIZE,
    PROOF_SIZE,
    Hello,
    Purpose,
    new_hello,
    prove,
)
from gradwire._wire.frames import HEADER, VERSION
from gradwire._wire.messages import CALL
from gradwire.worker import Worker
from tests.transport.strangers import (
    KEY,
    WRONG_KEY,
    Journal,
    check_calls,
    is_closed,
    key_of,
    receive_exactly,
    send_proof,
    shake_hands,
    stranger,
)
from tests.worlds import (
    LIMIT,
    close_world,
    open_world,
    socket_world,
    wait_until,
)

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
            hello = new_hello(purpose, 1, target.card.instance, 12345).to_bytes()
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
        hello = new_hello(Purpose.SHARED, 1, target.card.instance, 12345).to_bytes()
        sock.sendall(hello + bytes(PROOF_SIZE) + ANNOUNCED)
        assert is_closed(sock)
    journal.wait_for("does not know this world's key")


def test_a_recorded_handshake_cannot_be_played_again(
    target: Worker, journal: Journal
) -> None:
    with stranger(target) as sock:
        hello = new_hello(Purpose.LEASED, 1, target.card.instance, 12345).to_bytes()
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
        hello = new_hello(Purpose.SHARED, 1, target.card.instance ^ 1, 1).to_bytes()
        sock.sendall(hello)
        answer = receive_exactly(sock, CHALLENGE_SIZE)
        with pytest.raises(
            gw.ProtocolError, match="it refused the connection: wrong_worker"
        ):
            prove(key_of(target), hello, answer)
        assert is_closed(sock)
    journal.wait_for("wrong_worker")


@pytest.mark.parametrize("said", [0, 1, HELLO_SIZE - 1, HELLO_SIZE])
def test_who_falls_silent_in_the_handshake_is_shut_out(
    target: Worker, journal: Journal, monkeypatch: pytest.MonkeyPatch, said: int
) -> None:
    monkeypatch.setattr(target._transport._acceptor, "patience", 0.1)
    with stranger(target) as sock:
        sock.sendall(
            new_hello(Purpose.SHARED, 1, target.card.instance, 1).to_bytes()[:said]
        )
        assert is_closed(sock)
    journal.wait_for("refused a connection: ")


def test_who_speaks_too_slowly_in_the_handshake_is_shut_out(
    target: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target._transport._acceptor, "patience", 0.3)
    with stranger(target) as sock:
        sock.settimeout(0.1)
        for byte in new_hello(Purpose.SHARED, 1, target.card.instance, 1).to_bytes():
            try:
                sock.sendall(bytes([byte]))
                if not sock.recv(1):  # paces the bytes; nothing comes in between
                    break
            except TimeoutError:
                pass
            except ConnectionError:
                break
        else:
            pytest.fail("it may take without limit")


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
            hello = new_hello(purpose, 99, target.card.instance, link).to_bytes()
            sock.sendall(hello)
            proof = prove(key_of(target), hello, receive_exactly(sock, CHALLENGE_SIZE))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
            sock.sendall(proof)


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
        hello = new_hello(Purpose.SHARED, 2, workers[0].card.instance, 12345).to_bytes()
        second.sendall(hello)
        answer = receive_exactly(second, CHALLENGE_SIZE)
        second.sendall(prove(key_of(workers[0]), hello, answer))
        assert is_closed(second)
        journal.wait_for("second shared connection")


def test_one_who_knows_the_key_but_is_not_in_the_world_is_not_served(
    workers: list[Worker], journal: Journal
) -> None:
    body = pickle.dumps((CALLED.append, ("it ran",), {}, None))
    with stranger(workers[0]) as sock:
        send_proof(sock, workers[0], Purpose.LEASED, me=99)
        sock.sendall(header(body=len(body)) + body)
        assert is_closed(sock)
    journal.wait_for("connection of worker 99: there is no such worker in this world")
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
