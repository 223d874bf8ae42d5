"""Which stream waits for which, with streams that only note what they are told."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import gradwire as gw
from gradwire import streams
from gradwire._rpc.interceptors import InterceptedCodec
from gradwire._transport.send_queue import SendQueue
from gradwire._wire.frames import Copied, Parcel, Piece
from gradwire.testing import World
from tests.devices.pretended import Elsewhere
from tests.worlds import LIMIT

FIRST = torch.device("lazy:1")


class Stream:
    """A stream of that device."""

    device = FIRST

    def __init__(self, stream_id: int, log: list[str]) -> None:
        self.stream_id = stream_id
        self._log = log

    def __str__(self) -> str:
        return f"stream {self.stream_id}"

    def wait_stream(self, other: "Stream") -> None:
        self._log.append(f"{self} waits for {other}")


class Streams:
    """Those of the one device there is; 0 is the default one."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.default = Stream(0, self.log)
        self._here = threading.local()

    def current(self, _: Any = None) -> Stream:
        found: Stream = getattr(self._here, "stream", self.default)
        return found

    def set(self, stream: Stream) -> None:
        self._here.stream = stream

    @contextmanager
    def entered(self, stream: Stream) -> Iterator[None]:
        before = self.current()
        self.set(stream)
        try:
            yield
        finally:
            self.set(before)

    def new(self, stream_id: int) -> Any:
        """A context with another stream."""
        return self.entered(Stream(stream_id, self.log))

    def record(self, stream: Stream) -> None:
        self.log.append(f"memory is kept for {stream}")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Streams:
    made = Streams()
    for name, value in {
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_stream": made.current,
        "default_stream": lambda _: made.default,
        "set_stream": made.set,
        "stream": made.entered,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.accelerator, "current_stream", made.current)
    monkeypatch.setattr(Elsewhere, "record_stream", made.record)
    monkeypatch.setattr(Elsewhere, "is_cuda", True)
    monkeypatch.setattr(streams, "in_use", True)
    return made


@dataclass
class Pair:
    first: Any
    second: Any


def there() -> Tensor:
    return torch.ones(2).to(FIRST)


def test_on_default_streams_nobody_waits(fake: Streams) -> None:
    streams.publish()
    streams.take(there())
    streams.reset()
    with streams.default():
        assert fake.current() is fake.default
    assert fake.log == []


def test_others_wait_for_what_is_published_and_one_for_what_it_takes(
    fake: Streams,
) -> None:
    with fake.new(7):
        streams.publish()
        streams.take(there())
    assert fake.log == [
        "stream 0 waits for stream 7",
        "stream 7 waits for stream 0",
        "memory is kept for stream 7",
    ]


def test_what_is_done_on_default_streams_is_between_the_others_work(
    fake: Streams,
) -> None:
    with fake.new(7):
        with streams.default():
            assert fake.current() is fake.default
            assert fake.log == ["stream 0 waits for stream 7"]
        assert fake.current().stream_id == 7
        assert fake.log[1:] == ["stream 7 waits for stream 0"]


def test_a_stream_that_a_function_left_current_is_so_no_more(fake: Streams) -> None:
    with fake.new(7):
        streams.reset()
        assert fake.current() is fake.default
    assert fake.log == ["stream 0 waits for stream 7"]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: [[[[[[x]]]]]],
        lambda x: Pair({"a": (x,)}, None),
        lambda x: frozenset([x]),
    ],
)
def test_tensors_are_found_in_containers_and_dataclasses(
    fake: Streams, wrap: Any
) -> None:
    value = wrap(there())
    with fake.new(7):
        streams.take([value, value])
    assert fake.log.count("memory is kept for stream 7") == 1


def test_a_value_that_has_itself_in_it_is_taken(fake: Streams) -> None:
    value: list[Any] = [there()]
    value.append(value)
    with fake.new(7):
        streams.take(value)
    assert fake.log.count("memory is kept for stream 7") == 1


def test_memory_is_kept_for_the_stream_that_uses_it(fake: Streams) -> None:
    streams.keep(torch.ones(2))
    assert fake.log == []
    with fake.new(7):
        streams.keep(there())
    assert fake.log == ["memory is kept for stream 7"]


# Where they are used


def test_results_and_references_are_taken(fake: Streams) -> None:
    with World(2) as world, world.as_worker(0):
        rref = gw.remote("worker1", there)
        future = gw.rpc_async("worker1", there)
        for get in (
            lambda: gw.rpc_sync("worker1", there),
            future.wait,
            rref.to_here,
        ):
            fake.log.clear()
            with fake.new(7):
                get()
            assert "memory is kept for stream 7" in fake.log


def test_copies_for_a_receiver_in_this_process_are_kept(fake: Streams) -> None:
    with fake.new(7):
        copied = Copied([Piece(0, there())])
    target = torch.empty(2).to(FIRST)
    copied.copy_to([Piece(0, target)])  # on the default one
    assert fake.log == ["stream 0 waits for stream 7", "memory is kept for stream 0"]
    assert target.cpu().tolist() == [1, 1]


class Plain(torch.futures.Future[Any]):
    """A future of torch's own, which tells when somebody waits for it."""

    last: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.is_awaited = threading.Event()

    def add_done_callback(self, callback: Any) -> None:
        super().add_done_callback(callback)
        self.is_awaited.set()


@gw.rpc.functions.async_execution
def last_plain() -> Any:
    return Plain.last


def test_a_plain_future_is_answered_on_the_default_streams(
    fake: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    result, found = InterceptedCodec.result, list[Stream]()

    def note(*args: Any, **kwargs: Any) -> Parcel:
        found.append(fake.current())
        return result(*args, **kwargs)

    monkeypatch.setattr(InterceptedCodec, "result", note)
    monkeypatch.setattr(Plain, "last", made := Plain())
    with World(2) as world, world.as_worker(0):
        future = gw.rpc_async("worker1", last_plain)
        assert made.is_awaited.wait(LIMIT)
        with fake.new(7):
            made.set_result(3)
        assert future.wait(LIMIT) == 3
    assert fake.default in found
    assert all(stream is fake.default for stream in found)


def test_responses_of_other_threads_leave_on_the_default_streams(
    fake: Streams,
) -> None:
    found: list[Stream] = []

    class Framed:
        def write(self, call: int, parcel: Parcel) -> None:
            found.append(fake.current())

    class Charge:
        def now_takes(self, size: int) -> None: ...

        def give_back(self) -> None: ...

    queue = SendQueue(Framed(), lambda: fake.entered(fake.current()))  # type: ignore[arg-type]
    parcel = Parcel(2, 1, b"").with_bulk([Piece(0, there())], 64)
    respond = partial(queue.respond, 1, parcel, Charge())  # type: ignore[arg-type]
    with queue.lock:  # so that it is left to this thread
        other = threading.Thread(target=respond)
        other.start()
        other.join()
    with fake.new(7):
        queue.write(2, Parcel(1, 1, b""))
    assert [stream.stream_id for stream in found] == [0, 7]
