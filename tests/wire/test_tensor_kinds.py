"""Tensors that are more, or less, than dense memory arrive as they were.

Sparse, quantized, nested and meta tensors go in both encodings; parameters, subclasses and
modules need pickle.
"""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gradwire._wire import safe_encoding
from gradwire._wire.codec import Manner
from gradwire.errors import ProtocolError
from tests.wire.round_trip import (
    LARGE,
    LIMITS,
    PICKLE,
    PLAIN,
    Codec,
    assert_same,
    bits,
    opened,
    packed,
    round_trip,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors is in prototype:UserWarning"
)


# Other kinds


def test_a_coo_tensor_arrives_coalesced_or_not_as_it_was(manner: Manner) -> None:
    indices = torch.tensor([[0, 2, 2], [1, 0, 0]])
    for values in (torch.randn(3), torch.randn(3, 2), torch.randn(1).expand(3)):
        shape = (3, 3, *values.shape[1:])
        loose = torch.sparse_coo_tensor(indices, values, shape, check_invariants=True)
        for sent in (loose, loose.coalesce(), loose.clone().requires_grad_()):
            arrived = round_trip(sent, manner)
            assert arrived.layout is torch.sparse_coo
            assert arrived.shape == sent.shape
            assert arrived.is_coalesced() == sent.is_coalesced()
            assert arrived.requires_grad == sent.requires_grad
            assert bits(arrived._indices()) == bits(sent._indices())
            assert bits(arrived._values()) == bits(sent._values())


def test_an_empty_coo_tensor_arrives(manner: Manner) -> None:
    sent = torch.sparse_coo_tensor(size=(2, 0, 3), check_invariants=True)
    arrived = round_trip(sent, manner)
    assert arrived.is_sparse
    assert arrived.shape == (2, 0, 3)


COMPRESSED = {
    "csr": lambda t: t.to_sparse_csr(),
    "csc": lambda t: t.to_sparse_csc(),
    "bsr": lambda t: t.to_sparse_bsr((2, 2)),
    "bsc": lambda t: t.to_sparse_bsc((2, 2)),
}


@pytest.mark.parametrize("name", COMPRESSED)
def test_a_compressed_sparse_tensor_arrives(name: str, manner: Manner) -> None:
    for dense in (torch.eye(4), torch.zeros(4, 4), torch.eye(200).double() * 3):
        sent = COMPRESSED[name](dense)
        arrived = round_trip(sent, manner)
        assert arrived.layout is sent.layout
        assert arrived.dtype is sent.dtype
        assert torch.equal(arrived.to_dense(), dense)
        assert bits(arrived.values()) == bits(sent.values())


def test_a_quantized_tensor_keeps_its_integers_and_its_scale(manner: Manner) -> None:
    number = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    for dtype in (torch.qint8, torch.quint8, torch.qint32):
        sent = torch.quantize_per_tensor(number, 0.1, 3, dtype)
        arrived = round_trip([sent, sent], manner)[1]
        assert (arrived.q_scale(), arrived.q_zero_point()) == (0.1, 3)
        assert arrived.stride() == sent.stride()
        assert_same(arrived.int_repr(), sent.int_repr())


@pytest.mark.parametrize("zero_type", [torch.int64, torch.float32])
def test_a_tensor_quantized_per_channel_arrives(
    zero_type: torch.dtype, manner: Manner
) -> None:
    scales, zeros = torch.rand(3) + 0.1, torch.tensor([1, 2, 3], dtype=zero_type)
    sent = torch.quantize_per_channel(torch.randn(2, 3), scales, zeros, 1, torch.quint8)
    arrived = round_trip([sent, sent], manner)[1]
    assert arrived.qscheme() is sent.qscheme()
    assert arrived.q_per_channel_axis() == 1
    assert_same(arrived.int_repr(), sent.int_repr())
    assert_same(arrived.q_per_channel_scales(), sent.q_per_channel_scales())
    assert_same(arrived.q_per_channel_zero_points(), sent.q_per_channel_zero_points())


def test_a_meta_tensor_arrives_without_memory(manner: Manner) -> None:
    sent = torch.empty(1 << 40, 3, device="meta", dtype=torch.bfloat16).T
    arrived = round_trip(sent.requires_grad_(), manner)
    assert arrived.is_meta
    assert arrived.requires_grad
    assert (arrived.shape, arrived.stride()) == (sent.shape, sent.stride())
    assert arrived.dtype is torch.bfloat16


@pytest.mark.parametrize("rows", [2, LARGE])
def test_a_nested_tensor_arrives(rows: int, manner: Manner) -> None:
    members = [torch.randn(rows, 2), torch.randn(1, 2)]
    sent = torch.nested.nested_tensor(members, requires_grad=True)
    for arrived in round_trip([sent, sent], manner):
        assert arrived.is_nested
        assert arrived.requires_grad
        for ours, theirs in zip(arrived.unbind(), members, strict=True):
            assert bits(ours) == bits(theirs)


def test_a_jagged_tensor_arrives() -> None:
    members = [torch.randn(2), torch.randn(3)]
    sent = torch.nested.nested_tensor(members, layout=torch.jagged)
    arrived = round_trip(sent, PICKLE)
    assert arrived.layout is torch.jagged
    assert [bits(m) for m in arrived.unbind()] == [bits(m) for m in members]


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(3, 3).to_mkldnn(),
        lambda: torch.quantize_per_channel(
            torch.ones(4, 6), torch.ones(4), torch.zeros(4), 0, torch.quint4x2
        ),
    ],
    ids=["mkldnn", "quint4x2"],
)
def test_a_kind_that_cannot_be_sent_is_refused_by_name(
    make: Any, manner: Manner
) -> None:
    with pytest.raises(TypeError, match="cannot send a tensor of"):
        packed(make(), manner)


def test_a_tensor_without_its_memory_is_refused(manner: Manner) -> None:
    tensor = torch.ones(100)
    rest = tensor[1:]
    tensor.untyped_storage().resize_(0)
    for value in (tensor, rest, [tensor]):
        with pytest.raises(TypeError, match="freed"):
            packed(value, manner)


# Subclasses


class Labelled(torch.Tensor):
    """A subclass that adds methods and attributes."""

    label: str

    def named(self) -> str:
        return f"this is {self.label}"


class Boxed(torch.Tensor):
    """A wrapper: its memory is another tensor's."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls: type["Boxed"], inner: torch.Tensor) -> "Boxed":
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        unboxed = [a.inner if isinstance(a, Boxed) else a for a in args]
        result = func(*unboxed, **(kwargs or {}))
        return Boxed(result) if isinstance(result, torch.Tensor) else result


class SelfMade(torch.Tensor):
    """A subclass that says itself how it is pickled."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return remake, (self.detach().as_subclass(torch.Tensor),)


def remake(inner: torch.Tensor) -> SelfMade:
    return (inner + 1).as_subclass(SelfMade)


@pytest.mark.parametrize("count", [3, LARGE])
def test_a_parameter_arrives_with_its_attributes(count: int) -> None:
    sent = torch.nn.Parameter(torch.randn(count))
    sent.note = "mine"  # type: ignore[attr-defined]
    frozen = torch.nn.Parameter(torch.randn(count), requires_grad=False)
    for arrived, ours in zip(
        round_trip((sent, frozen), PICKLE), (sent, frozen), strict=True
    ):
        assert type(arrived) is torch.nn.Parameter
        assert arrived.requires_grad == ours.requires_grad
        assert vars(arrived) == vars(ours)
        assert bits(arrived) == bits(ours)


def test_a_parameter_is_a_tensor_in_the_plain_encoding() -> None:
    sent = torch.nn.Parameter(torch.randn(3))
    assert_same(round_trip(sent, PLAIN), sent.detach().requires_grad_())


@pytest.mark.parametrize("grad", [False, True])
def test_a_subclass_arrives_with_its_attributes(grad: bool) -> None:
    sent = torch.randn(3).as_subclass(Labelled).requires_grad_(grad)
    sent.label = "a"
    arrived = round_trip(sent, PICKLE)
    assert type(arrived) is Labelled
    assert arrived.named() == "this is a"
    assert arrived.requires_grad is grad
    assert bits(arrived.as_subclass(torch.Tensor)) == bits(
        sent.as_subclass(torch.Tensor)
    )


def test_a_wrapper_arrives_around_its_tensor() -> None:
    inner = torch.randn(LARGE)
    parcel = packed(Boxed(inner))
    assert [piece.tensor.data_ptr() for piece in parcel.bulk] == [inner.data_ptr()]
    arrived = opened(parcel.arrive(1))
    assert type(arrived) is Boxed
    assert_same(arrived.inner, inner)


def test_a_subclass_that_pickles_itself_is_asked() -> None:
    arrived = round_trip(torch.zeros(3).as_subclass(SelfMade), PICKLE)
    assert type(arrived) is SelfMade
    assert arrived.tolist() == [1, 1, 1]


def test_a_subclass_is_refused_in_the_plain_encoding() -> None:
    with pytest.raises(TypeError, match=r"cannot send .*Labelled"):
        packed(torch.zeros(3).as_subclass(Labelled), PLAIN)


def test_a_module_arrives_with_its_parameters_out_of_band() -> None:
    sent = torch.nn.Sequential(torch.nn.Linear(100, 200), torch.nn.BatchNorm1d(200))
    parcel = packed(sent)
    assert len(parcel.bulk) == 1  # the weight; all else is small
    arrived = opened(parcel.arrive(1))
    ours, theirs = sent.state_dict(), arrived.state_dict()
    assert list(ours) == list(theirs)
    assert [bits(t) for t in ours.values()] == [bits(t) for t in theirs.values()]
    assert [type(p) for p in arrived.parameters()] == [torch.nn.Parameter] * 4


def test_tied_parameters_stay_tied() -> None:
    first, second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    second.weight = first.weight
    arrived = round_trip([first, second], PICKLE)
    assert arrived[0].weight is arrived[1].weight


# Where they arrive


@pytest.mark.parametrize(
    "sent",
    [
        torch.ones(3),
        [torch.ones(3, 4).T],
        torch.eye(3).to_sparse(),
        torch.eye(3).to_sparse_csr(),
        torch.zeros(LARGE),
        [torch.zeros(LARGE)[1:], torch.zeros(3)],
    ],
    ids=["short", "strided", "coo", "csr", "bulk", "mixed"],
)
def test_a_default_device_changes_nothing(sent: Any, manner: Manner) -> None:
    with torch.device("meta"):
        arrived = round_trip(sent, manner)
    first, ours = (v[0] if type(v) is list else v for v in (arrived, sent))
    assert first.device == torch.device("cpu")
    assert torch.equal(first.to_dense(), ours.to_dense())


@pytest.mark.filterwarnings("ignore:Accessing the data pointer:UserWarning")
@pytest.mark.parametrize("sent", [torch.ones(3), torch.ones(3, 4).T])
def test_a_mode_in_which_tensors_have_no_memory_is_named(
    sent: Any, manner: Manner
) -> None:
    parcel, receiver = packed(sent, manner), Codec(LIMITS)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, pytest.raises((ProtocolError, RuntimeError), match="Fake"):
        receiver.open(parcel.arrive(1))
    arrived = receiver.open(parcel.arrive(1)).value  # and nothing of it is remembered
    assert_same(arrived, sent)


def test_a_device_that_is_not_here_is_named() -> None:
    data = safe_encoding.dumps(("device", (("mps:7", True), 0, False)), [])
    recipe = b"R\x02\x00\x00\x00" + data[5:].replace(
        safe_encoding.dumps(0, []), b"@" + bytes(4)
    )
    with pytest.raises(ProtocolError, match="map puts a tensor on 'mps:7' here"):
        safe_encoding.loads(recipe, [torch.ones(3)])
