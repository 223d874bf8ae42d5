"""Mutated frames: 100,000 of them do no harm to who reads them (`make test`: a fifth of that).

Valid streams of frames are changed, cut and spliced, and read in chunks of any size. Whatever
comes out is a message or an error that blames the other side; nothing is unpickled, and nothing
takes more memory than the limits allow. Pickles themselves cannot be fuzzed: they may do anything.
"""

import pickle
import random
import resource
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch

from gradwire._autograd import messages as passes
from gradwire._rpc import messages as calls
from gradwire._rref import messages as rref
from gradwire._transport.framed_socket import FrameReader
from gradwire._transport.quota import Quota
from gradwire._transport.shared_memory import Recycler
from gradwire._wire import dense_tensors, safe_encoding
from gradwire._wire.codec import COMPILED, SAFE, SAFE_COMPILED, Manner
from gradwire._wire.frames import HEADER, Frame, Limits, Parcel
from gradwire._wire.messages import CALL, GOODBYE, PING, RESULT, Call, Result
from gradwire._wire.pickling import PickleSerializer
from gradwire._wire.signature_decoder import Decoder
from gradwire.errors import NotAllowedError, ProtocolError
from gradwire.options import Options
from tests.wire.round_trip import Codec

STREAMS = 5000  # per seed; 20 seeds make the 100,000
TABLES = 2000
PLAIN_DATA = 5000
LIMITS = Limits(300_000, 300_000)
MOST_BYTES = 100_000
FEW = Options(max_peer_requests=5, max_peer_memory=MOST_BYTES)
MOST_GROWTH = 64 << 20  # of the process; limits that do not hold would take gigabytes

WIDTH = 5
PLAIN, PICKLE = Manner(plain=True), Manner()

pytestmark = pytest.mark.filterwarnings(
    # Of torch, about kinds of tensors that mutants turn into:
    "ignore:ComplexHalf support is experimental:UserWarning",
    "ignore:The PyTorch API of nested tensors is in prototype:UserWarning",
)


# Valid streams


@dataclass(frozen=True, slots=True)
class Note:
    """A message of an upper layer."""

    title: str
    content: Any


class Numbered:
    """An object that travels as numbers, and its maker at either end of a message."""

    freight: tuple[()] = ()
    waits: tuple[()] = ()

    def __call__(self, *numbers: Any) -> Any:
        return self if len(numbers) == WIDTH else (1,) * WIDTH

    def take_back(self) -> None:
        pass


UPPER = [
    Note("t", [1, {"a": b"b"}]),
    rref.Create("module:function", (1, torch.ones(2)), {}, None, (1 << 40 | 1,)),
    rref.CreateNow("method", (), {"x": 1}, None, (1 << 40 | 2, 1 << 40 | 1, 0)),
    rref.Invoke("method", (None,), {}, None, (1 << 40 | 1, 1 << 40 | 1)),
    rref.Fetch(1 << 40 | 1, 1 << 40 | 1, "value"),
    rref.Adopt(1 << 40 | 1, 2 << 40 | 1),
    rref.Notes([(1, 2), (3, 4)], [5, 6], [(7, "why")]),
    rref.Recall(1, 2 << 40 | 1, 3),
    passes.PassRequest([1 << 48 | 1, 2, 0, 0, 2, 1, 0, 0, 5, 1], [torch.ones(2)]),
    passes.Abort(1 << 48 | 1, 2, (1, "ValueError", "why", "trace", None, ())),
    passes.Release((1 << 48 | 1, 1 << 48 | 2)),
    passes.Claim((1 << 48 | 1,)),
    calls.Greeting(),
    calls.Gather("user/1", [1, "x"]),
    calls.Devices(("cuda:0", "cpu")),
]
"""One of each kind that there is."""


def new_codec(*, plain_only: bool) -> Codec:
    codec = Codec(LIMITS, plain_only=plain_only)
    made = Numbered()
    codec.replace((Numbered,), WIDTH, lambda to, is_reply: made, lambda sender: made)
    for kind, message in enumerate(UPPER, 64):
        codec.register(kind, type(message))
    return codec


def values() -> Iterator[Any]:
    table = torch.arange(30000.0).reshape(100, 300)
    small = torch.arange(12.0).reshape(3, 4)
    quantized = torch.quantize_per_tensor(small, 0.1, 3, torch.qint8)
    yield from (None, 5, "text", 1.5, b"bytes", (1, "x"), [1, {"a": (2, None)}])
    yield {"nested": [[[[{1: frozenset([2j])}]]]], "slice": slice(1, None)}
    yield (torch.float32, torch.device("cpu"), torch.Size((2, 3)))
    yield from (small, small[0].clone().requires_grad_(), torch.tensor(True))
    yield (small, None, table, "x", torch.zeros(20000, dtype=torch.int8))
    yield [small.T, small[1:], small[:2], small[:, 1], table.T[:200]]
    yield [table[:50], table[40:], torch.ones(1).expand(5, 5), torch.empty(0, 3)]
    yield [small.to_sparse(), small.to_sparse_csr(), small.to_sparse_csc()]
    yield [quantized, torch.empty(3, device="meta"), torch.ones(4, 4).to_sparse_bsr(2)]
    yield torch.nested.nested_tensor([small, small[:1]])
    yield ["long text" * 1000] * 12


def parcels() -> Iterator[Parcel]:
    codec = new_codec(plain_only=False)
    for value in values():
        for manner in (PLAIN, PICKLE):
            yield codec.result(value, manner)
            yield codec.call(Call(torch.add, (value, 1), {"out": value}, None), manner)
            yield codec.message(Note("t", value), manner)
    for args in ((Numbered(),), (1, torch.ones(2), Numbered(), "x")):
        yield codec.call(Call(torch.add, args, {"out": Numbered()}, None), PICKLE)
    yield codec.result(Numbered(), PICKLE)
    for manner in (PLAIN, PICKLE):
        for message in UPPER:
            pack = codec.call if isinstance(message, Call) else codec.message
            yield pack(message, manner)
        yield codec.failure(ValueError("why"), manner)
    yield from (Parcel(PING, 0, b""), Parcel(GOODBYE, 0, b""))


def stream_of(parcel: Parcel) -> bytes:
    frame = parcel.arrive(7)
    return parcel.header(7) + bytes(frame.body) + bytes(frame.area or b"")


@cache
def streams() -> list[bytes]:
    alone = [stream_of(parcel) for parcel in parcels()]
    rows = [alone[i : i + 4] for i in range(0, len(alone), 9)]
    return alone + [b"".join(row) for row in rows]


@cache
def frames() -> list[Frame]:
    return [parcel.arrive(7) for parcel in parcels()]


@cache
def bodies() -> list[bytes]:
    return [bytes(frame.body) for frame in frames()]


@cache
def plain_frames() -> list[Frame]:
    return [f for f in frames() if f.encoding in (SAFE_COMPILED, SAFE)]


# Mutants

NUMBERS = [0, 1, 2, 63, 64, 255, 256, 32768, 32769, 65535, 1 << 16, 1 << 31]
NUMBERS += [(1 << 32) - 1, 1 << 32, 1 << 40, 1 << 62, (1 << 63) - 1, 1 << 63]
NUMBERS += [(1 << 64) - 1, (1 << 64) - 8]
WIDTHS = {1: "<B", 2: "<H", 4: "<I", 8: "<Q"}


class Mutator:
    """Changes bytes, the same way for the same seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def stream(self) -> bytearray:
        """Half of them anything, half of them frames whose header fits a changed body."""
        if self.random.random() < 0.5:
            return self.mutant(streams())
        frame = self.random.choice(plain_frames())
        body, bulk = bytes(self.mutant(bodies(), frame.body)), bytes(frame.area or b"")
        parcel = Parcel(frame.kind, frame.encoding, body).with_bulk((), len(bulk))
        return bytearray(parcel.header(7) + body + bulk)

    def mutant(
        self, originals: list[bytes], chosen: bytes | memoryview | None = None
    ) -> bytearray:
        data = bytearray(chosen or self.random.choice(originals))
        for _ in range(self.random.randint(1, 4)):
            self.random.choice(self.CHANGES)(self, data, originals)
        return data

    def place(self, data: bytearray) -> int:
        """Mostly near the start, where lengths and tables are."""
        near = min(len(data), self.random.choice((HEADER.size, 100, 300, len(data))))
        return self.random.randrange(near) if near else 0

    def flip(self, data: bytearray, originals: list[bytes]) -> None:
        if data:
            data[self.place(data)] ^= 1 << self.random.randrange(8)

    def put_number(self, data: bytearray, originals: list[bytes]) -> None:
        width = self.random.choice((1, 2, 4, 8))
        if len(data) >= width:
            at = min(self.place(data), len(data) - width)
            number = self.random.choice(NUMBERS) % (1 << 8 * width)
            struct.pack_into(WIDTHS[width], data, at, number)

    def cut(self, data: bytearray, originals: list[bytes]) -> None:
        del data[self.place(data) :]

    def drop(self, data: bytearray, originals: list[bytes]) -> None:
        at = self.place(data)
        del data[at : at + self.random.randint(1, 16)]

    def double(self, data: bytearray, originals: list[bytes]) -> None:
        at = self.place(data)
        data[at:at] = data[at : at + self.random.randint(1, 64)]

    def extend(self, data: bytearray, originals: list[bytes]) -> None:
        data += self.random.randbytes(self.random.randint(1, 64))

    def splice(self, data: bytearray, originals: list[bytes]) -> None:
        other = self.random.choice(originals)
        at = self.place(data)
        data[at:] = other[at : at + 1000]

    CHANGES = (flip, flip, flip, put_number, put_number, cut, drop, double, splice)
    CHANGES += (extend,)


# Reading them


class FakeSocket:
    """Gives these bytes in chunks of any size, with pauses."""

    def __init__(self, data: bytearray, chance: random.Random) -> None:
        self._data = memoryview(data)
        self._random = chance
        self._most = chance.choice(
            (20, 1000, 100_000) if len(data) < 2000 else (1 << 17,)
        )

    def recv(self, size: int) -> bytes:
        if self._random.random() < 0.1:
            raise BlockingIOError
        size = min(size, self._random.randint(1, self._most))
        data, self._data = self._data[:size], self._data[size:]
        return bytes(data)

    def recv_into(self, buffer: memoryview) -> int:
        data = self.recv(len(buffer))
        buffer[: len(data)] = data
        return len(data)


class MeasuringRecycler(Recycler):
    """Notes the largest area it was asked for."""

    largest = 0

    def area(self, length: int) -> Any:
        self.largest = max(self.largest, length)
        return super().area(length)


def read(
    data: bytearray,
    chance: random.Random,
    recycler: Recycler,
    quota: Quota | None = None,
) -> list[Frame]:
    reader = FrameReader(FakeSocket(data, chance), LIMITS, recycler)  # type: ignore[arg-type]
    reader.quota = quota
    while True:
        try:
            reader.pull()
        except BlockingIOError:
            continue
        except (EOFError, ProtocolError):
            return list(reader.frames)


def touch(value: Any) -> None:
    """Look at the far end of every tensor: it must be there."""
    if isinstance(value, torch.Tensor):
        is_dense = value.layout is torch.strided and not value.is_nested
        if is_dense and value.is_cpu and value.numel() and not value.is_quantized:
            value.detach()[(-1,) * value.dim()].item()
    elif isinstance(value, dict):
        touch(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value[:100]:
            touch(item)


@pytest.fixture
def no_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(*args: object) -> None:
        pytest.fail("something was unpickled")

    monkeypatch.setattr(pickle, "loads", explode)
    monkeypatch.setattr(PickleSerializer, "loads", explode)


@pytest.fixture
def bounded_memory() -> Iterator[None]:
    unit = 1 if sys.platform == "darwin" else 1024
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert (after - before) * unit < MOST_GROWTH


@pytest.mark.usefixtures("no_pickle", "bounded_memory")
def test_mutated_frames_are_read_or_refused(fuzz_seed: int) -> None:
    mutator, recycler = Mutator(fuzz_seed), MeasuringRecycler()
    codec = new_codec(plain_only=True)
    for _ in range(STREAMS):
        quota = mutator.random.choice((None, Quota(FEW)))  # as who calls, or is called
        for frame in read(mutator.stream(), mutator.random, recycler, quota):
            assert bool(frame.charge) is bool(quota)
            assert quota is None or quota.bytes <= MOST_BYTES
            assert not frame.refused or not (frame.body or frame.area)
            assert len(frame.body) <= LIMITS.body
            if frame.refused:
                continue
            try:
                message = codec.open(frame)
            except (ProtocolError, NotAllowedError):
                continue
            touch([getattr(message, name) for name in message.__slots__])
    assert recycler.largest <= LIMITS.bulk


@pytest.mark.usefixtures("bounded_memory")
def test_mutated_tables_and_signatures_are_understood_or_refused(
    fuzz_seed: int,
) -> None:
    mutator = Mutator(fuzz_seed)
    types = {CALL: Call, RESULT: Result}
    decoder = Decoder(lambda data: [None] * 3, types, LIMITS)
    decoder.restore(WIDTH, lambda sender: Numbered())
    for _ in range(TABLES):
        body = memoryview(bytes(mutator.mutant(bodies())))
        area = mutator.random.choice(frames()).area
        try:
            arrived, used = dense_tensors.unpack(body, area)
        except ProtocolError:
            pass
        else:
            assert used <= len(body)
            touch(arrived)
        try:
            frame = Frame(CALL, COMPILED, 1, body)
            frame.area = area
            decoded, *_ = decoder.decode(frame)
            touch([getattr(decoded, name) for name in decoded.__slots__])
        except ProtocolError:
            pass


@pytest.mark.usefixtures("no_pickle", "bounded_memory")
def test_mutated_plain_data_are_read_or_refused(fuzz_seed: int) -> None:
    mutator = Mutator(fuzz_seed)
    small = [torch.ones(2, 3), torch.zeros(3, dtype=torch.int8)]
    originals = [safe_encoding.dumps(value, []) for value in values()]
    for _ in range(PLAIN_DATA):
        data = bytes(mutator.mutant(originals))
        try:
            touch(safe_encoding.loads(data, small))
        except ProtocolError:
            pass


@pytest.mark.usefixtures("no_pickle")
def test_what_is_not_mutated_is_read() -> None:
    codec, chance = new_codec(plain_only=True), random.Random(0)
    for sent, stream in zip(frames(), streams(), strict=False):
        for frame in read(bytearray(stream), chance, Recycler()):
            assert frame.body == sent.body
            if frame.encoding in (SAFE_COMPILED, SAFE):
                codec.open(frame)
            else:
                with pytest.raises(NotAllowedError):
                    codec.open(frame)
