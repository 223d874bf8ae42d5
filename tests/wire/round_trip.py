"""Messages to parcels and back, without a network: what is sent, and what would arrive."""

from typing import Any

import torch

from gradwire._wire import codec
from gradwire._wire.codec import Manner
from gradwire._wire.dense_tensors import INLINE
from gradwire._wire.frames import Frame, Limits, Parcel
from gradwire._wire.messages import Call

LIMITS = Limits(1 << 28, 1 << 34)
PICKLE, PLAIN = Manner(), Manner(plain=True)
LARGE = INLINE * 2  # bytes: such a tensor goes to the bulk area


class Codec(codec.Codec):
    """One that gives messages alone, without what was found in them."""

    def call(self, *args: Any, **options: Any) -> Any:
        return super().call(*args, **options)[0]

    def result(self, *args: Any, **options: Any) -> Any:
        return super().result(*args, **options)[0]

    def message(self, *args: Any, **options: Any) -> Any:
        return super().message(*args, **options)[0]

    def open(self, *args: Any, **options: Any) -> Any:
        message, traced, _ = super().open(*args, **options)
        for tensor in traced:
            tensor.requires_grad_()
        return message


def received(parcel: Parcel, manner: Manner = PICKLE) -> Any:
    """The message that arrives."""
    return Codec(LIMITS, plain_only=manner.plain).open(parcel.arrive(1))


def called(call: Call, manner: Manner = PICKLE) -> Call:
    """The call that arrives."""
    arrived = received(Codec(LIMITS).call(call, manner), manner)
    assert type(arrived) is Call
    return arrived


def call_of(function: Any, *args: Any, **kwargs: Any) -> Call:
    return Call(function, args, kwargs, None)


def packed(value: Any, manner: Manner = PICKLE) -> Parcel:
    return Codec(LIMITS).result(value, manner)


def opened(frame: Frame, manner: Manner = PICKLE) -> Any:
    return Codec(LIMITS, plain_only=manner.plain).open(frame).value


def round_trip(value: Any, manner: Manner) -> Any:
    """What arrives when `value` is sent."""
    return opened(packed(value, manner).arrive(1), manner)


def bits(tensor: torch.Tensor) -> bytes:
    """The elements in order, as bytes: unlike numbers, NaNs compare too."""
    dense = torch.empty(tensor.numel(), dtype=tensor.dtype)
    dense.copy_(tensor.detach().reshape(-1))  # also resolves conjugates and negatives
    return dense.view(torch.uint8).numpy().tobytes()


def random_tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Random bits, NaNs with payloads among them; always the same."""
    count = torch.Size(shape).numel() * dtype.itemsize
    high = 2 if dtype is torch.bool else 256
    seed = torch.Generator().manual_seed(0)
    flat = torch.randint(high, (count,), dtype=torch.uint8, generator=seed)
    return flat.view(dtype).reshape(shape)


def assert_same(arrived: torch.Tensor, sent: torch.Tensor) -> None:
    assert type(arrived) is torch.Tensor
    assert arrived.dtype is sent.dtype
    assert arrived.shape == sent.shape
    assert arrived.requires_grad == sent.requires_grad
    assert arrived.is_leaf
    assert bits(arrived) == bits(sent)


def same_memory(first: torch.Tensor, second: torch.Tensor) -> bool:
    pointers = {t.untyped_storage().data_ptr() for t in (first, second)}
    return len(pointers) == 1
