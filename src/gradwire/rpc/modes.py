"""The caller's modes, carried to where its function runs: grad mode, inference mode, autocast.

The usual modes are None, which costs nothing to send or to apply.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

_AUTOCAST_DEVICES = ("cpu", "cuda")

Modes = tuple[Any, ...]


def capture() -> Modes | None:
    """This thread's modes; None for the usual ones."""
    usual = (
        torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not torch.is_autocast_enabled("cuda")
    )
    if usual:
        return None
    casts = tuple(
        (device, str(torch.get_autocast_dtype(device)).removeprefix("torch."))
        for device in _AUTOCAST_DEVICES
        if torch.is_autocast_enabled(device)
    )
    grad = torch.is_grad_enabled()
    inference = torch.is_inference_mode_enabled()
    return grad, inference, torch.is_autocast_cache_enabled(), casts


@contextmanager
def applied(modes: Modes) -> Iterator[None]:
    """Run with another worker's modes."""
    grad, inference, cache, casts = modes
    with ExitStack() as stack:
        if inference:
            stack.enter_context(torch.inference_mode())
        stack.enter_context(torch.set_grad_enabled(grad))
        for device, dtype in casts:
            cast = torch.autocast(device, getattr(torch, dtype), cache_enabled=cache)
            stack.enter_context(cast)
        yield
