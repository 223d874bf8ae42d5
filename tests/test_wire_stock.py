"""Small tensors of messages are made ahead, and are what they would be if made on arrival."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from carrying import LIMITS, PICKLE
from gradwire._wire import safe_encoding
from gradwire._wire.cargo import NoRecorder
from gradwire._wire.codec import PACKET, Codec
from gradwire._wire.frames import Frame
from gradwire._wire.messages import RESULT
from gradwire._wire.packets import Packet
from gradwire._wire.signature_encoder import LENGTH
from gradwire.errors import ProtocolError

A = torch.arange(6.0).reshape(2, 3)
B = A.clone()
G = A.clone().requires_grad_()
LARGE = torch.ones(100_000, requires_grad=True)


class Histories(NoRecorder):
    """A recorder that notes what it is told."""

    def __init__(self) -> None:
        self.prepared: list[Sequence[Tensor]] = []
        self.arrivals: list[tuple[Any, Sequence[Tensor]]] = []

    def prepare(self, tensors: Sequence[Tensor]) -> Any:
        self.prepared.append(tensors)
        return tensors

    def arrived(self, frame: Frame, sender: int, tensors: Any) -> None:
        self.arrivals.append((frame.history, tensors))


@pytest.fixture
def recorder() -> Histories:
    return Histories()


@pytest.fixture
def codec(recorder: Histories) -> Codec:
    codec = Codec(LIMITS)
    codec.record_with(recorder)
    return codec


def opened(codec: Codec, value: Any, *, mark: int = 0) -> list[Tensor]:
    """The tensors of a result that came."""
    frame = codec.result(value, PICKLE).arrive(1)
    frame.scope = frame.mark = mark
    got = codec.open(frame).value
    if isinstance(got, Packet):
        got = got.tensors
    values = got if isinstance(got, (tuple, list)) else [got]
    return [each for each in values if isinstance(each, Tensor)]


def send_something(codec: Codec) -> None:
    codec.result(None, PICKLE).was_sent()


def made_ahead(codec: Codec, value: Any, *, mark: int = 0) -> list[list[Tensor]]:
    """What there is after such results came, and something was sent."""
    for _ in range(2):
        opened(codec, value, mark=mark)
    send_something(codec)
    return [blanks.tensors for blanks in codec._stock._ready.values()]


@pytest.mark.parametrize(
    "value",
    [A, (A, B), (A, 5, B, None), (LARGE.detach(), A), Packet((1, 2), [A]), A[:0]],
    ids=["one", "two", "mixed", "beside a large one", "packet", "empty"],
)
def test_what_is_made_ahead_is_used_once_and_filled(codec: Codec, value: Any) -> None:
    (ready,) = made_ahead(codec, value)
    small = opened(codec, value)[-len(ready) :]
    assert all(got is ours for got, ours in zip(small, ready, strict=True))
    again = opened(codec, value)[-len(ready) :]
    for got in small + again:
        assert torch.equal(got, A[: len(got)])
        assert got.is_leaf
        assert not got.requires_grad
        got.fill_(9)  # each has memory of its own
    assert len({id(got) for got in small + again}) == 2 * len(ready)


def test_nothing_is_made_ahead_for_what_came_once(codec: Codec) -> None:
    opened(codec, A)
    send_something(codec)
    assert not codec._stock._ready
    assert not codec._stock.wanted


def test_little_is_kept(codec: Codec) -> None:
    assert not made_ahead(codec, torch.ones(5000))  # many bytes
    assert not made_ahead(codec, tuple(A.clone() for _ in range(9)))
    for length in range(200):
        made_ahead(codec, torch.ones(length))
        assert len(codec._stock._ready) <= 64


def test_a_history_is_given_ahead(codec: Codec, recorder: Histories) -> None:
    made_ahead(codec, (A, G), mark=5)
    ((prepared,),) = recorder.prepared
    recorder.arrivals.clear()
    _, got = opened(codec, (A, G), mark=6)
    assert got is prepared
    ((history, (traced,)),) = recorder.arrivals
    assert history == [got]
    assert traced is got


@pytest.mark.parametrize("mark", [0, 7])
def test_only_messages_that_are_recorded_get_tensors_with_a_history(
    codec: Codec, recorder: Histories, mark: int
) -> None:
    (ready,) = made_ahead(codec, G, mark=1)
    recorder.arrivals.clear()
    frame = codec.result(G, PICKLE).arrive(1)
    frame.mark = mark  # without a scope it means nothing
    got = codec.open(frame).value
    assert got is not ready[0]
    assert got.is_leaf
    assert got.requires_grad
    assert not recorder.arrivals


def test_a_history_that_large_tensors_share_is_given_on_arrival(
    codec: Codec, recorder: Histories
) -> None:
    assert not made_ahead(codec, (G, LARGE), mark=1)
    assert not recorder.prepared
    history, traced = recorder.arrivals[-1]
    assert history is None
    assert len(traced) == 2


def test_in_inference_mode_tensors_are_of_that_mode(codec: Codec) -> None:
    made_ahead(codec, A)
    with torch.inference_mode():
        assert opened(codec, A)[0].is_inference()
        send_something(codec)
        assert opened(codec, A)[0].is_inference()
        send_something(codec)
    assert not opened(codec, A)[0].is_inference()


def test_in_anomaly_mode_histories_are_made_on_arrival(
    codec: Codec, recorder: Histories
) -> None:
    made_ahead(codec, G, mark=1)
    with torch.autograd.set_detect_anomaly(True):
        opened(codec, G, mark=1)
        send_something(codec)
        opened(codec, G, mark=1)
    assert [history for history, _ in recorder.arrivals] == [None] * 4


class Twist(torch.overrides.TorchFunctionMode):
    """A mode in which other tensors are made."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is Tensor.new_empty:
            return made.as_subclass(torch.nn.Buffer)
        return made


class Refuse(TorchDispatchMode):
    def __torch_dispatch__(self, *call: Any) -> None:
        raise AssertionError("no tensors here")


def traced(function: Any) -> None:
    torch.jit.trace(lambda x: (function(), x)[1], (A,), check_trace=False)


def in_mode(mode: Any) -> Callable[[Any], None]:
    def run(function: Any) -> None:
        with mode():
            function()

    return run


@pytest.mark.parametrize(
    "run",
    [
        in_mode(Refuse),
        in_mode(FakeTensorMode),
        in_mode(Twist),
        lambda function: torch.vmap(lambda x: (function(), x)[1])(A),
        traced,
    ],
    ids=["dispatch", "fake", "function", "vmap", "trace"],
)
def test_who_sends_something_where_tensors_are_watched_is_not_disturbed(
    codec: Codec, recorder: Histories, run: Any
) -> None:
    for _ in range(2):
        opened(codec, G, mark=1)
    run(lambda: send_something(codec))
    assert not codec._stock._ready
    assert not recorder.prepared
    assert type(opened(codec, G, mark=1)[0]) is Tensor
    send_something(codec)
    assert len(recorder.prepared) == 1


@pytest.mark.parametrize("error", [RuntimeError, AssertionError])
def test_what_cannot_be_made_ahead_is_no_error(
    codec: Codec, recorder: Histories, error: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(tensors: Any) -> None:
        raise error("no history here")

    for _ in range(2):
        opened(codec, G, mark=1)
    monkeypatch.setattr(recorder, "prepare", refuse)
    send_something(codec)
    assert not codec._stock._ready


def test_what_is_wanted_is_bounded_where_nothing_is_made(codec: Codec) -> None:
    with torch.inference_mode():
        for length in range(200):
            made_ahead(codec, torch.ones(length))
    assert len(codec._stock.wanted) <= 64


def test_gradients_in_packets_have_no_history(codec: Codec) -> None:
    signature = safe_encoding.dumps((0, ((6, (1,), True, -1),)), [])
    body = LENGTH.pack(len(signature)) + signature + bytes(4)
    with pytest.raises(ProtocolError, match="requires grad"):
        codec.open(Frame(RESULT, PACKET, 1, body))
