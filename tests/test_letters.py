"""Letters: frames by shared memory stay in order with those by the socket, and none is lost."""

import itertools
import random
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire._transport import shm_mailbox
from gradwire._transport.base import Traffic
from gradwire._transport.busy_poll import Patience, Spin
from gradwire._transport.framed_socket import Stream
from gradwire._transport.shared_memory import Recycler
from gradwire._wire.frames import Limits, Parcel
from gradwire._wire.messages import CALL, LETTERS
from gradwire.errors import ProtocolError
from sockets_world import socket_world, wait_until

LIMITS = Limits(1 << 20, 1 << 20)
TOO_LARGE = shm_mailbox.BOXES // 2

pytestmark = pytest.mark.skipif(
    not shm_mailbox.are_possible(), reason="this processor cannot have letters"
)


@contextmanager
def streams(traffic: Traffic | None = None) -> Iterator[tuple[Stream, Stream]]:
    """Two ends of a connection that have letters."""
    memory = memoryview(bytearray(shm_mailbox.BOXES))
    pair = [
        Stream(sock, LIMITS, Recycler(), nullcontext, traffic)
        for sock in socket.socketpair()
    ]
    for offered, stream in zip((True, False), pair, strict=True):
        boxes = shm_mailbox.boxes(memory, offered=offered)
        stream.reader.inbox, stream.writer.outbox = boxes
    try:
        yield pair[0], pair[1]
    finally:
        for stream in pair:
            stream.close()


def write(stream: Stream, number: int, size: int = 10) -> None:
    stream.writer.write(number, Parcel(CALL, 0, bytes(size)))


def begin(stream: Stream) -> None:
    assert stream.reader.inbox is not None
    stream.reader.inbox.begin(stream.reader.received)


def end(stream: Stream) -> None:
    assert stream.reader.inbox is not None
    letter = stream.reader.inbox.end()
    if letter is not None:
        stream.reader.open_letter(letter)


def pull_all(stream: Stream) -> None:
    try:
        while True:
            stream.reader.pull()
    except BlockingIOError:
        pass


def taken(stream: Stream) -> list[int]:
    frames = stream.reader.frames
    return [frames.popleft().call for _ in range(len(frames))]


def test_a_letter_goes_to_one_who_looks_and_not_by_the_socket() -> None:
    with streams() as (here, there):
        begin(there)
        write(here, 1)
        assert here.writer.sent == 0
        assert there.reader.look()
        assert taken(there) == [1]


@pytest.mark.parametrize("looks", [False, True])
def test_what_cannot_be_a_letter_goes_by_the_socket(looks: bool) -> None:
    with streams() as (here, there):
        if looks:
            begin(there)
        write(here, 1, TOO_LARGE if looks else 10)
        assert here.writer.sent > 0
        pull_all(there)
        assert taken(there) == [1]


def test_no_letter_overtakes_what_is_still_in_the_socket() -> None:
    with streams() as (here, there):
        write(here, 1)
        begin(there)
        write(here, 2)
        assert not there.reader.inbox.take()  # type: ignore[union-attr]
        pull_all(there)
        assert taken(there) == [1, 2]


def test_what_comes_by_the_socket_does_not_overtake_a_letter() -> None:
    with streams() as (here, there):
        begin(there)
        write(here, 1)
        write(here, 2)  # while the letter lies there
        there.reader.pull()
        assert taken(there) == [1, 2]


def test_a_letter_to_one_who_just_ceased_to_look_rings() -> None:
    with streams() as (here, there):
        begin(there)
        outbox = here.writer.outbox
        assert outbox is not None

        class Slow:
            def __enter__(self) -> None:
                there.reader.inbox._words[0] = 0  # type: ignore[union-attr]

            def __exit__(self, *error: object) -> None:
                pass

        outbox._fence = Slow()  # type: ignore[assignment]
        write(here, 1)
        assert here.writer.sent > 0
        there.read(time.monotonic() + 5)  # as one who slept and is woken
        assert taken(there) == [1]


def test_one_who_ceases_to_look_finds_what_came_in_the_last_moment() -> None:
    with streams() as (here, there):
        begin(there)
        write(here, 1)
        end(there)
        assert taken(there) == [1]


def test_one_who_looks_for_letters_sees_what_comes_by_the_socket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shm_mailbox, "_LOOKS", itertools.count())  # else for ever
    with streams() as (here, there):
        for number in range(3):
            begin(there)
            write(here, number, TOO_LARGE)
            while len(there.reader.frames) <= number:
                there.reader.look()
        write(here, 3)
        there.reader.look()
        assert taken(there) == [0, 1, 2, 3]


def test_one_who_looks_for_letters_leaves_the_socket_alone_for_a_while() -> None:
    def receive(size: int) -> bytes:
        asked.append(size)
        raise BlockingIOError

    asked: list[int] = []
    with streams() as (_, there):
        begin(there)
        there.reader._recv = receive
        for _ in range(2):
            with pytest.raises(BlockingIOError):
                there.reader.look()
        assert len(asked) == 2


def test_a_letter_is_read_before_the_end_of_the_connection_is_seen() -> None:
    with streams() as (here, there):
        begin(there)
        write(here, 1)
        here.hang_up()
        there.reader.pull()
        assert taken(there) == [1]
        with pytest.raises(EOFError):
            there.reader.pull()


@pytest.mark.parametrize("letter", [b"x", bytes(100), b"\x01" * 100])
def test_a_letter_that_is_no_frame_is_refused(letter: bytes) -> None:
    with streams() as (here, there):
        begin(there)
        assert here.writer.outbox is not None
        here.writer.outbox.put(letter, 0)
        with pytest.raises(ProtocolError):
            there.reader.look()


def test_a_letter_of_impossible_length_is_refused() -> None:
    with streams() as (_, there):
        there.reader.inbox._words[16] = 1 << 31  # type: ignore[union-attr]
        with pytest.raises(ProtocolError):
            there.reader.look()


def test_letters_are_accepted_only_where_memory_is_shared_and_once() -> None:
    with streams() as (here, there):
        here.writer.write_bytes(Parcel(LETTERS, 0, b"").header(0, 7))
        with pytest.raises(ProtocolError, match="letters offered"):
            there.reader.pull()


def test_bytes_of_letters_are_counted() -> None:
    traffic = Traffic()
    with streams(traffic) as (here, there):
        begin(there)
        write(here, 1, 1000)
        there.reader.look()
        assert traffic.sent == traffic.received > 1000


STEPS = st.lists(
    st.sampled_from(["write", "write large", "begin", "look", "end", "pull"]),
    max_size=60,
)


@given(steps=STEPS)
def test_frames_come_in_order_whichever_way_they_go(steps: list[str]) -> None:
    with streams() as (here, there):
        looking, count, came = False, 0, []
        for step in steps:
            if step.startswith("write"):
                count += 1
                unread = here.writer.sent - there.reader.received
                is_large = "large" in step and unread < 3 * TOO_LARGE  # nobody reads
                write(here, count, TOO_LARGE if is_large else 10)
                continue
            if step == "begin":
                begin(there)
            elif step == "end":
                end(there)
            else:
                try:
                    there.reader.look() if step == "look" else there.reader.pull()
                except BlockingIOError:
                    pass
                begin(there) if looking else end(there)  # as each read does
            looking = {"begin": True, "end": False}.get(step, looking)
            came += taken(there)
        end(there)
        came += taken(there)
        pull_all(there)
        came += taken(there)
        assert came == list(range(1, count + 1))


def test_none_is_lost_while_both_ends_fall_asleep_and_wake() -> None:
    """Two threads ask and answer, and look for about as long as the other one takes."""
    rounds, interval, failed = 3000, sys.getswitchinterval(), []

    def take(stream: Stream, spin: Spin) -> int:
        stream._patience = Patience()  # look each time, also if it did not pay
        while not stream.reader.frames:
            stream.expect()
            if not stream.look(spin):
                stream.read(time.monotonic() + 10)
        return stream.reader.frames.popleft().call

    def play(stream: Stream, asks: bool) -> None:
        chance, spin = random.Random(asks), Spin(20e-6)
        try:
            for number in range(rounds):
                if not asks:
                    assert take(stream, spin) == number
                until = time.perf_counter() + chance.random() * 60e-6
                while time.perf_counter() < until:
                    pass
                write(stream, number)
                if asks:
                    assert take(stream, spin) == number
        except BaseException as error:  # noqa: BLE001 told below
            failed.append(error)

    traffic = Traffic()
    with streams(traffic) as (here, there):
        threads = [
            threading.Thread(target=play, args=(here, True)),
            threading.Thread(target=play, args=(there, False)),
        ]
        sys.setswitchinterval(1e-6)
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            sys.setswitchinterval(interval)
        assert not failed
        by_socket = here.writer.sent + there.writer.sent
        assert 0 < by_socket < traffic.sent  # both ways were used


def test_calls_between_workers_go_by_letters() -> None:
    with socket_world(2, spin=0.5) as workers:

        def goes_by_letter() -> bool:
            """It does once the other end is back at its look before we call again."""
            (link,) = workers[0]._transport._out.values()  # type: ignore[attr-defined]
            sent = [lane._stream.writer.sent for lane in link._lanes]
            assert workers[0].rpc_sync("worker1", max, (1, 2)) == 2
            return [lane._stream.writer.sent for lane in link._lanes] == sent

        workers[0].rpc_sync("worker1", max, (1, 2))
        wait_until(goes_by_letter)
