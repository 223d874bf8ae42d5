"""Handwritten digits: 1,797 pictures of 8×8 pixels.

`digits.gz` has 65 bytes for each: the digit, and the pixels from 0 to 16. They are the test set of
"Optical Recognition of Handwritten Digits" by E. Alpaydin and C. Kaynak (UCI Machine Learning
Repository, CC BY 4.0), which scikit-learn ships as `load_digits`.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from importlib.resources import files
from typing import NamedTuple

import torch
from torch import Tensor

_RECORD = 65
_SIDE = 8
_WHITE = 16
_KEPT_BACK = 300  # for the test


class Samples(NamedTuple):
    """Pictures and the digits on them."""

    pictures: Tensor
    digits: Tensor


def load() -> tuple[Samples, Samples]:
    """The samples to train with, and those to test with; in an order that is always the same."""
    packed = files(__package__).joinpath("digits.gz").read_bytes()
    records = torch.frombuffer(bytearray(gzip.decompress(packed)), dtype=torch.uint8)
    records = records.view(-1, _RECORD)
    records = records[torch.randperm(len(records), generator=_chance(0))]
    pictures = records[:, 1:].double().div(_WHITE).view(-1, 1, _SIDE, _SIDE)
    digits = records[:, 0].long()
    return (
        Samples(pictures[_KEPT_BACK:], digits[_KEPT_BACK:]),
        Samples(pictures[:_KEPT_BACK], digits[:_KEPT_BACK]),
    )


def batches(samples: Samples, size: int, epoch: int) -> Iterator[Samples]:
    """All samples in batches, in the order of that epoch."""
    order = torch.randperm(len(samples.digits), generator=_chance(epoch))
    for part in order.split(size):
        yield Samples(samples.pictures[part], samples.digits[part])


def _chance(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
