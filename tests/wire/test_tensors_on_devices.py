"""Tables of tensors that came from device to device, from someone who lies about them."""

from collections.abc import Sequence

import pytest
import torch

from gradwire._wire.dense_tensors import pack, unpack
from gradwire._wire.frames import Piece
from gradwire.errors import ProtocolError


class Slot:
    """Memory of a device with so much room. An `OnDevice`."""

    device = torch.device("meta")

    def __init__(self, room: int) -> None:
        self.room = room
        self.asked_for = 0

    def begin(self) -> bool:
        return True

    def copy_to(self, targets: Sequence[Piece]) -> None:
        self.asked_for = sum(target.nbytes for _, target in targets)


def table(*tensors: torch.Tensor) -> memoryview:
    return memoryview(b"".join(pack(tensors).head))


def test_tensors_may_be_as_long_as_what_came() -> None:
    slot = Slot(64 + 12)
    body = table(torch.empty(5, device="meta"), torch.empty(3, device="meta"))
    found, _ = unpack(body, None, on_device=slot)
    assert [tensor.shape for tensor in found] == [(5,), (3,)]
    assert slot.asked_for == 32


@pytest.mark.parametrize("sizes", [(1 << 40,), (5, 4)])
def test_no_memory_is_taken_for_longer_ones(
    sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    body = table(*(torch.empty(size, device="meta") for size in sizes))
    monkeypatch.delattr(torch, "empty_strided")
    with pytest.raises(ProtocolError, match="of a device in 76 bytes are longer"):
        unpack(body, None, on_device=Slot(64 + 12))
