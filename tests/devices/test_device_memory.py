"""Tensors from device to device, by memory that two workers share: the logic, without a GPU."""

import logging
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from gradwire._transport import device_memory
from gradwire._transport.base import Traffic
from gradwire._transport.cuda_driver import CudaDriver
from gradwire._transport.device_memory import DeviceMap, DevicePool
from gradwire._transport.shared_memory import SegmentMap, SegmentPool, is_available
from gradwire._wire.frames import Parcel, Piece
from gradwire.errors import GradwireError, ProtocolError
from tests.devices.pretended_driver import Memory, PretendedDriver

pytestmark = pytest.mark.skipif(not is_available(), reason="there is no memfd here")


class Pair:
    """A sender and a receiver, each with a driver and streams of its own."""

    def __init__(self) -> None:
        self.memory = Memory()
        self.here = PretendedDriver(self.memory, is_lazy=True)
        self.there = PretendedDriver(self.memory, is_lazy=True)
        self.sides = socket.socketpair(socket.AF_UNIX)
        self.traffic = Traffic()
        segments = SegmentPool(self.sides[0])
        here, there = self.here, self.there
        self.segments = SegmentMap(self.sides[1])
        self.pool = DevicePool(segments, 1, self.traffic, lambda: here)
        self.map = DeviceMap(self.segments, lambda: there)

    def send(self, *tensors: Tensor) -> tuple[Parcel, int]:
        """A parcel with these on a device, and the word for its frame."""
        parcel = Parcel(1, 1, b"")
        at = 128
        pieces = [Piece(0, torch.zeros(32))]  # of the CPU
        for tensor in tensors:
            pieces.append(Piece(at, tensor))
            at += -(-tensor.nbytes // 64) * 64
        parcel.with_bulk(pieces, at).device_at = 128
        return parcel, self.pool.place(parcel)

    def offer(self) -> None:
        """Send something by the host, so that the receiver opens an arena."""
        _, word = self.send(torch.zeros(1))
        assert not self.map.arrival(word).begin()

    def take(self, word: int, *targets: Piece) -> None:
        arrival = self.map.arrival(word)
        assert arrival.begin()
        arrival.copy_to(targets)

    def run(self) -> bool:
        """Have the streams of both go on; whether they are done."""
        done = False
        for _ in range(3):
            done = self.here.run() & self.there.run()
        return done

    def slots(self) -> list[tuple[int, int, int]]:
        """The words of those that were used."""
        found = []
        for arena in self.pool._arenas.values():
            if arena is not None:
                words = [(s.sent, s.filled, s.emptied) for s in arena.slots]
                found += [one for one in words if any(one)]
        return found


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.run()
    made.map.close()
    made.pool.close(is_lost=True)  # some take nothing
    assert not made.memory.buffers
    assert not any(made.memory.opened.values())
    assert not made.here.mapped | made.there.mapped
    for side in made.sides:
        side.close()
    vars(made).clear()  # pytest keeps it for a while


def test_the_first_goes_by_the_host_and_the_next_ones_directly(pair: Pair) -> None:
    parcel, word = pair.send(torch.ones(4))
    assert word
    assert len(parcel.bulk) == 2
    assert parcel.bulk_length == 192
    arrival = pair.map.arrival(word)
    assert not arrival.begin()
    for count in range(3):
        x, y = torch.rand(4), torch.rand(5)
        parcel, word = pair.send(x, y)
        assert [piece.offset for piece in parcel.bulk] == [0]
        assert (parcel.bulk_length, parcel.was_emptied) == (128, True)
        got = [torch.empty(4), torch.empty(5)]
        pair.take(word, Piece(0, got[0]), Piece(64, got[1]))
        assert pair.run()
        assert torch.equal(got[0], x)
        assert torch.equal(got[1], y)
        assert pair.slots() == [(count + 1,) * 3]
    assert (pair.traffic.by_host, pair.traffic.direct) == (64, 3 * 128)


def test_the_receivers_stream_waits_for_the_senders_and_no_host_does(
    pair: Pair,
) -> None:
    pair.offer()
    x, got = torch.zeros(4), torch.empty(4)
    pair.here.do(lambda: x.fill_(3))  # under way when it is sent
    _, word = pair.send(x)
    pair.here.do(lambda: x.fill_(9))  # begun after it was sent
    pair.take(word, Piece(0, got))
    seen: list[float] = []
    pair.there.do(lambda: seen.append(got[0].item()))
    assert not pair.there.run()
    assert seen == []
    assert pair.run()
    assert seen == [3]


def test_a_slot_is_used_again_when_both_streams_are_done_with_it(pair: Pair) -> None:
    pair.offer()
    got = [torch.empty(1) for _ in range(3)]
    words = [pair.send(torch.full((1,), float(i)))[1] for i in range(3)]
    assert len(set(words)) == 3
    for word, target in zip(words, got, strict=True):
        pair.take(word, Piece(0, target))
    assert pair.run()
    assert [target.item() for target in got] == [0, 1, 2]
    assert pair.send(torch.zeros(1))[1] == words[0]


def test_what_finds_no_slot_goes_by_the_host(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    pair.offer()
    words = [pair.send(torch.zeros(1))[1] for _ in range(64)]
    before = pair.traffic.by_host
    parcel, word = pair.send(torch.zeros(1))
    assert (word, len(parcel.bulk)) == (0, 2)
    assert pair.traffic.by_host == before + 64
    pair.send(torch.zeros(1))
    (message,) = caplog.messages  # the host has waited, and should not have to
    assert message.endswith("no slot was free in time")
    assert pair.pool.describe().startswith(", memory of GPUs; some tensors of GPUs by")
    arrivals = [pair.map.arrival(word) for word in words]
    assert all(arrival.begin() for arrival in arrivals)
    del arrivals  # nobody wants them
    pair.here.run()
    assert pair.send(torch.zeros(1))[1]


def test_a_frame_that_was_not_sent_gives_its_slot_back(pair: Pair) -> None:
    pair.offer()
    _, word = pair.send(torch.zeros(1))
    pair.pool.take_back(word)
    assert pair.run()
    assert pair.send(torch.zeros(1))[1] == word


def test_an_arena_that_is_not_opened_yet_is_offered_again(pair: Pair) -> None:
    _, first = pair.send(torch.zeros(1))
    parcel, second = pair.send(torch.zeros(1))
    assert first == second
    assert len(parcel.bulk) == 2
    for word in (first, second):
        assert not pair.map.arrival(word).begin()
    assert list(pair.memory.opened.values()) == [1]


def test_larger_tensors_have_slots_of_their_size(pair: Pair) -> None:
    for count in (1 << 10, 1 << 17, 5 << 20):
        for i in range(2):
            x, got = torch.full((count,), float(i)), torch.empty(count)
            _, word = pair.send(x)
            if not i:
                assert not pair.map.arrival(word).begin()
                continue
            pair.take(word, Piece(0, got))
            assert pair.run()
            assert torch.equal(got, x)


@pytest.mark.parametrize("stream", [0, 5])
def test_memory_is_kept_until_it_is_copied(pair: Pair, stream: int) -> None:
    # On the default stream, too: the tensor may have been made on another one, which would
    # use its memory again before the copy has run.
    pair.offer()
    x = torch.zeros(1)
    pair.here.current = stream
    pair.send(x)
    assert [one.data_ptr() for one in pair.here.kept] == [x.data_ptr()]


# What can be in the way


def test_a_receiver_that_does_not_see_the_device(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    pair.there.uuids = "xyz"
    pair.offer()
    for _ in range(2):
        parcel, word = pair.send(torch.ones(1))
        assert (word, len(parcel.bulk)) == (0, 2)
    (message,) = caplog.messages
    assert "worker 1 by way of the CPU, which takes several times as long" in message
    assert message.endswith("does not see that GPU (CUDA_VISIBLE_DEVICES)")
    assert "CUDA_VISIBLE_DEVICES" in pair.pool.describe()


def test_devices_are_told_by_their_identity_not_their_number(pair: Pair) -> None:
    pair.there.uuids = "ba"
    pair.offer()
    _, word = pair.send(torch.ones(1))
    assert pair.map.arrival(word).device == torch.device("lazy", 1)


def test_a_copy_that_fails_goes_by_the_host(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    pair.offer()
    pair.here.refuses = "copy"
    parcel, word = pair.send(torch.ones(1))
    assert (word, len(parcel.bulk), parcel.bulk_length) == (0, 2, 192)
    assert caplog.messages[0].endswith("copy: not today")
    assert pair.slots() == [(1, 1, 1)]


@pytest.mark.parametrize("what", ["open", "export", "allocate"])
def test_a_driver_that_refuses(
    pair: Pair, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    (pair.there if what == "open" else pair.here).refuses = what
    _, word = pair.send(torch.ones(1))
    assert bool(word) == (what == "open")
    if word:
        assert not pair.map.arrival(word).begin()
    for _ in range(2):
        parcel, word = pair.send(torch.ones(1))
        assert (word, len(parcel.bulk)) == (0, 2)
    (message,) = caplog.messages
    assert message.endswith(f"{what}: not today")


def test_a_receiver_without_a_driver(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    pair.map._get_driver = lambda: None
    pair.offer()
    assert pair.send(torch.ones(1))[1] == 0
    assert caplog.messages[0].endswith("there is no CUDA driver there")


def test_devices_of_another_kind_and_several_devices(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    assert pair.send(torch.ones(1, device="meta"))[1] == 0
    assert caplog.messages[0].endswith("only those of CUDA can go from GPU to GPU")
    caplog.clear()
    pair.here.index = lambda tensor: tensor.numel()  # type: ignore[method-assign]
    assert pair.send(torch.ones(1), torch.ones(2))[1] == 0
    assert caplog.messages[0].endswith("one message has tensors of several devices")


def test_what_stood_in_the_way_once_does_not_do_so_for_ever(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    pair.here.index = lambda tensor: tensor.numel() // 2  # type: ignore[method-assign]
    for _ in range(2):
        assert pair.send(torch.ones(1), torch.ones(2))[1] == 0
    several = "one message has tensors of several devices"
    assert pair.pool.describe() == f"; tensors of GPUs by way of the CPU ({several})"
    pair.offer()
    assert pair.send(torch.ones(1))[1]
    assert pair.pool.describe().startswith(", memory of GPUs; some tensors of GPUs by")
    pair.here.refuses = "copy"
    pair.send(torch.ones(1))
    pair.send(torch.ones(1))
    assert pair.pool.describe().endswith(f" ({several}; copy: not today)")
    assert len(caplog.messages) == 2


def test_a_driver_library_that_lacks_something(
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver = CudaDriver(SimpleNamespace())  # type: ignore[arg-type]
    driver.index = lambda tensor: 0  # type: ignore[method-assign]
    side = socket.socket(socket.AF_UNIX)
    pool = DevicePool(SegmentPool(side), 1, Traffic(), lambda: driver)
    parcel = Parcel(1, 1, b"").with_bulk([Piece(0, torch.ones(1))], 64)
    parcel.device_at = 0
    assert pool.place(parcel) == 0
    assert caplog.messages[0].endswith("this driver has no cuDeviceGet")
    side.close()


def test_a_receiver_whose_driver_fails_says_so_and_frees_the_slot(pair: Pair) -> None:
    pair.offer()
    _, word = pair.send(torch.ones(1))
    arrival = pair.map.arrival(word)
    pair.there.refuses = "copy"
    with pytest.raises(GradwireError, match="could not be taken: copy: not today"):
        arrival.copy_to([Piece(0, torch.empty(1))])
    assert pair.run()
    assert pair.slots() == [(1, 1, 1)]


def test_a_device_without_much_memory(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    pair.here.free = 1 << 20
    assert pair.send(torch.ones(1))[1] == 0
    assert pair.send(torch.ones(1))[1] == 0
    assert caplog.messages[0].endswith("little memory is left on the GPU")
    assert len(caplog.messages) == 1


# The end of one of them


def test_who_waits_for_a_dead_sender_goes_on(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    pair.offer()
    _, word = pair.send(torch.ones(1))
    pair.take(word, Piece(0, torch.empty(1)))
    assert not pair.there.run()
    with caplog.at_level(logging.WARNING):
        pair.map.release()
    assert pair.there.run()
    assert "were lost with the worker that sent them" in caplog.text


def test_what_has_come_is_there_after_the_sender_has_gone(pair: Pair) -> None:
    pair.offer()
    _, word = pair.send(torch.ones(1))
    got = torch.empty(1)
    pair.here.run()
    pair.pool.drain()
    pair.map.release()
    pair.take(word, Piece(0, got))
    assert pair.run()
    assert got.item() == 1


def test_memory_is_freed_when_the_receiver_has_closed_it(pair: Pair) -> None:
    pair.offer()
    freed = threading.Thread(target=pair.pool.close, kwargs={"is_lost": False})
    release, is_open_at = pair.here.release, list[int]()

    def note(memory: int) -> None:
        is_open_at.append(pair.memory.opened[memory])
        release(memory)

    pair.here.release = note  # type: ignore[method-assign]
    freed.start()
    pair.map.close()
    freed.join()
    assert is_open_at == [0]


def test_memory_that_the_receiver_keeps_open_is_left(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_memory, "_LONG", 0.0)
    pair.offer()
    (arena,) = pair.pool._arenas.values()
    pair.pool.close(is_lost=False)
    assert pair.memory.buffers
    assert arena in device_memory._left
    assert arena is not None
    device_memory._left.remove(arena)  # and clean up
    pair.here.release(arena.memory)
    pair.here.unmap_host(arena.start)


def test_memory_of_a_dead_receiver_is_freed(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_memory, "_LONG", 0.0)
    pair.offer()
    pair.pool.close(is_lost=True)
    assert not pair.memory.buffers


# Words that make no sense


def test_a_page_that_changes_after_it_was_opened(pair: Pair) -> None:
    pair.offer()
    x, got = torch.rand(4), torch.empty(4)
    pair.send(torch.zeros(1))
    _, word = pair.send(x)  # in the second slot
    (arena,) = pair.map._arenas.values()
    arena.page.size, arena.page.count = 1 << 40, 200
    assert pair.map.arrival(word).room == 64 << 10
    with pytest.raises(ProtocolError, match="slot 100 of an arena"):
        pair.map.arrival((word & ~0xFF) | 100)
    pair.take(word, Piece(0, got))
    assert pair.run()
    assert torch.equal(got, x)


def test_words_of_a_liar(pair: Pair) -> None:
    pair.offer()
    _, word = pair.send(torch.ones(1))
    with pytest.raises(ProtocolError, match="slot 200 of an arena"):
        pair.map.arrival(word | 200)
    _, offered = pair.send(torch.ones(1 << 16))
    with pytest.raises(ProtocolError, match="was never opened"):
        pair.map.arrival(offered ^ 1 << 31)
