"""Which of torch's implementations of an optimizer is fastest, where the user leaves it open.

On the CPU torch by default runs one operation for each parameter and term. With small parameters
that costs far more than the arithmetic, and holds the GIL all the while. Its fused kernels take one
pass, and less memory; where there is none, `foreach` computes a term for all parameters at once, at
the price of as much memory again. The numbers agree up to rounding in the last bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, optim

_FUSED = (optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad)
_FOREACH = (
    optim.NAdam,
    optim.RAdam,
    optim.Adamax,
    optim.Adadelta,
    optim.RMSprop,
    optim.Rprop,
)
# Not ASGD: its `foreach` computes with other numbers.
_SMALL = 1 << 20  # numbers, that may be held twice


def quickest_way(kind: type, grads: Sequence[Tensor | None]) -> str | None:
    """The setting that applies these gradients fastest; None: leave the choice to torch."""
    if kind not in _FUSED and kind not in _FOREACH:
        return None  # also the user's own
    given = [grad for grad in grads if grad is not None]
    for grad in given:
        if (
            grad.device.type != "cpu"
            or grad.layout is not torch.strided
            or not grad.is_floating_point()
        ):
            return None
    if kind in _FUSED:
        return "fused"
    return "foreach" if sum(grad.numel() for grad in given) <= _SMALL else None


def is_free(group: Mapping[str, Any]) -> bool:
    """Whether the settings of a group leave it open."""
    return (
        group.get("foreach") is None
        and group.get("fused") is None
        and not group.get("differentiable")
        and not any(isinstance(value, Tensor) for value in group.values())
    )
