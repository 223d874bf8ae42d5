"""Messages of numbers and tensors come out as they went in, each tensor with its own memory."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gradwire._wire import raw_bytes, safe_encoding
from gradwire._wire.codec import COMPILED, PICKLED, SAFE, SAFE_COMPILED, Manner
from gradwire._wire.frames import Frame, Limits
from gradwire._wire.messages import CALL, RESULT, TensorMessage
from gradwire._wire.signature_encoder import TENSOR_MESSAGE
from gradwire.errors import ProtocolError
from tests.wire.round_trip import LIMITS, PICKLE, PLAIN, Codec, assert_same

KIND = 20


class Word(TensorMessage):
    """A message of an upper layer."""

    __slots__ = ()


def codec(limits: Limits = LIMITS) -> Codec:
    made = Codec(limits)
    made.register(KIND, Word)
    return made


HERE, THERE = codec(), codec()
"""They get to know many messages, so that such are sent that look like others."""


def carried(
    numbers: Any, tensors: Any, manner: Manner = PICKLE
) -> tuple[TensorMessage, int]:
    """What arrives, and its encoding."""
    parcel = HERE.message(Word(numbers, tensors), manner)
    arrived = THERE.open(parcel.arrive(1))
    assert type(arrived) is Word
    return arrived, parcel.encoding


LARGE = torch.arange(10_000, dtype=torch.float64)
TABLE = torch.arange(12.0).reshape(3, 4)
COMPLEX = torch.complex(TABLE, -TABLE)

TENSORS = {
    "plain": TABLE,
    "scalar": torch.tensor(3.0),
    "empty": torch.empty(0, 3),
    "whole numbers": torch.arange(5),
    "truth": torch.tensor([True, False]),
    "half": TABLE.bfloat16(),
    "expanded": torch.tensor(2.0).expand(3, 4),
    "expanded, at an offset": TABLE[2, 3].expand(5),
    "half expanded": TABLE[:, :1].expand(3, 4),
    "transposed": TABLE.t(),
    "a row": TABLE[1],
    "every other": TABLE[:, ::2],
    "complex": COMPLEX,
    "conjugate": COMPLEX.conj(),
    "negative": COMPLEX.conj().imag,
    "one negative": COMPLEX.conj().imag[1, 1],
    "with history": (TABLE * 1).requires_grad_(),
    "large": LARGE,
    "half of a large one": LARGE[5000:],
    "large and conjugate": torch.complex(LARGE, LARGE).conj(),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_arrives_by_itself(name: str) -> None:
    tensor = TENSORS[name]
    for _ in range(2):  # as one that is not known yet, and as one that is
        arrived, encoding = carried((1, -2), (tensor,))
        assert encoding in (COMPILED, SAFE_COMPILED)
        assert tuple(arrived.numbers) == (1, -2)
        (found,) = arrived.tensors
        assert found is not None
        assert not found.requires_grad
        assert found.is_contiguous()
        assert_same(found, tensor.detach().resolve_conj().resolve_neg())
        if tensor.numel():
            assert raw_bytes.place(found) != raw_bytes.place(tensor)


@given(
    st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=9),
    st.lists(st.sampled_from([None, *TENSORS.values()]), max_size=5),
    st.sampled_from([PICKLE, PLAIN]),
)
def test_messages_come_out_as_they_went_in(
    numbers: list[int], tensors: list[Tensor | None], manner: Manner
) -> None:
    arrived, encoding = carried(numbers, tensors, manner)
    assert encoding in (COMPILED, SAFE_COMPILED)
    assert list(arrived.numbers) == numbers
    assert [t is None for t in arrived.tensors] == [t is None for t in tensors]
    for found, tensor in zip(arrived.tensors, tensors, strict=True):
        if found is not None and tensor is not None:
            assert_same(found, tensor.detach().resolve_conj().resolve_neg())
    assert_apart(arrived)


def assert_apart(message: TensorMessage) -> None:
    found = [t for t in message.tensors if t is not None]
    assert len({raw_bytes.place(tensor) for tensor in found}) == len(found)
    for tensor, other in itertools.combinations(found, 2):
        before = other.clone()
        if tensor.is_floating_point():
            tensor += 1
        assert_same(other, before)


@pytest.mark.parametrize("manner", [PICKLE, PLAIN], ids=["pickle", "plain"])
@pytest.mark.parametrize(
    "tensor",
    [TABLE.to_sparse(), LARGE.reshape(100, 100).t(), torch.nn.Parameter(TABLE, False)],
    ids=["sparse", "large, transposed", "of another type"],
)
def test_others_go_the_general_way(tensor: Tensor, manner: Manner) -> None:
    arrived, encoding = carried((1, 2), (tensor, None, tensor), manner)
    assert encoding in (PICKLED, SAFE)
    first, none, second = arrived.tensors
    assert none is None
    assert first is not None
    assert second is not None
    assert not first.requires_grad
    for found in (first, second):
        assert_same(found.to_dense(), tensor.detach().to_dense())
    if tensor.layout is torch.strided:
        assert_apart(arrived)


def test_two_that_are_one_travel_once_if_they_are_large() -> None:
    parcel = codec().message(Word((), (LARGE, TABLE, LARGE)), PICKLE)
    assert parcel.bulk_length < LARGE.nbytes * 1.1
    other = codec().message(Word((), (LARGE, TABLE, LARGE.clone())), PICKLE)
    assert other.bulk_length >= LARGE.nbytes * 2
    for sent in (parcel, other):
        arrived = codec().open(sent.arrive(1))
        assert_apart(arrived)


def test_the_ones_that_look_alike_are_told_apart() -> None:
    sender = codec()
    for tensor in (COMPLEX, COMPLEX.conj(), COMPLEX, COMPLEX.conj()):
        parcel = sender.message(Word((), (tensor,)), PICKLE)
        (found,) = sender.open(parcel.arrive(1)).tensors
        assert_same(found, tensor.resolve_conj())


def test_results_may_be_such_messages() -> None:
    for tensor in (TABLE, TABLE.to_sparse()):
        parcel = codec().result(TensorMessage((7,), (tensor,)), PICKLE)
        result = codec().open(parcel.arrive(1))
        assert tuple(result.value.numbers) == (7,)
        (found,) = result.value.tensors
        assert_same(found.to_dense(), TABLE)


def test_too_large_messages_are_refused() -> None:
    for tensor, limits in ((TABLE, Limits(8, 8)), (LARGE, Limits(1 << 20, 1 << 10))):
        with pytest.raises(ValueError, match="larger than"):
            codec(limits).message(Word((), (tensor,)), PICKLE)


def test_a_tensor_without_memory_is_refused() -> None:
    sending = codec()
    for _ in range(2):  # also where one that looks like it went before
        freed = torch.ones(3)
        freed.untyped_storage().resize_(0)
        with pytest.raises(TypeError, match="freed"):
            sending.message(Word((), (freed,)), PICKLE)
        sending.message(Word((), (torch.ones(3),)), PICKLE)


# What others may send


def frame(specs: Any, rest: bytes = b"", kind: int = KIND) -> Frame:
    data = safe_encoding.dumps((TENSOR_MESSAGE, (), None, specs), [])
    body = len(data).to_bytes(4, "little") + data + rest
    return Frame(kind, SAFE_COMPILED, 1, body)


NUMBERS = ("i", 0)


@pytest.mark.parametrize(
    "sent",
    [
        Frame(KIND, SAFE_COMPILED, 1, b""),
        Frame(KIND, SAFE_COMPILED, 1, b"\xff\0\0\0"),
        Frame(KIND, SAFE_COMPILED, 1, b"\1\0\0\0?"),
        frame(7),
        frame(()),
        frame((None,)),
        frame(("i",)),
        frame((("i",),)),
        frame((("i", -1),)),
        frame((("i", 1 << 40),)),
        frame((("i", "1"),)),
        frame((("i", True),)),
        frame([NUMBERS]),
        frame((NUMBERS, 7)),
        frame((NUMBERS, "d"), safe_encoding.dumps([1], [])),
        frame((NUMBERS, "i"), bytes(8)),
        frame((NUMBERS, ("[", ()))),
        frame((NUMBERS, (0, (2,), False))),
        frame((NUMBERS, (200, (2,), False, -1)), bytes(8)),
        frame((NUMBERS, (0, (-2,), False, -1)), bytes(8)),
        frame((NUMBERS, (0, (2,), False, -1)), bytes(7)),
        frame((NUMBERS, (0, (2,), True, -1)), bytes(8)),
        frame((NUMBERS, (0, (20_000,), False, 0))),
        frame((NUMBERS, 0, (0, (2,), False, -1)), bytes(8)),
        frame((NUMBERS, (0, (2,), False, -1), -1), bytes(8)),
        frame((("i", 2),), bytes(15)),
        frame((NUMBERS,), kind=RESULT + 200),
        frame((NUMBERS,), kind=CALL),
    ],
)
def test_what_makes_no_sense_is_refused(sent: Frame) -> None:
    with pytest.raises(ProtocolError):
        codec().open(sent)


@pytest.mark.parametrize(
    "fields", [((1,), (), 3), ((1.5,), ()), ((1,), (2,)), (7, ()), ((), 7)]
)
def test_fields_that_are_none_of_such_a_message_are_refused(fields: Any) -> None:
    body = bytes(8) + safe_encoding.dumps(fields, [])
    with pytest.raises(ProtocolError):
        codec().open(Frame(KIND, SAFE, 1, body))


def test_copies_of_what_came_once_are_bounded() -> None:
    limits = Limits(1 << 20, LARGE.nbytes)
    alone = codec(limits).message(Word((), (LARGE,)), PLAIN)
    assert codec(limits).open(alone.arrive(1)).tensors[0] is not None
    large = (1, (len(LARGE),), False, 0)
    for copies in (1, 2):
        sent = frame((NUMBERS, large, *[0] * copies))
        sent.area = alone.arrive(1).area
        if copies == 1:
            assert_apart(codec(limits).open(sent))
        else:
            with pytest.raises(ProtocolError, match="tensors of 240000 bytes"):
                codec(limits).open(sent)
    with pytest.raises(ValueError, match="larger than"):
        codec(limits).message(Word((), (LARGE,) * 3), PICKLE)
