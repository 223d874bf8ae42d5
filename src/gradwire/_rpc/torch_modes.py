"""The caller's modes, applied where its function runs.

They are grad mode, inference mode, autocast and anomaly mode. The default is None, which costs
nothing to send or to apply.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import ExitStack, contextmanager
from types import coroutine
from typing import Any

import torch
from torch import (
    is_anomaly_enabled,
    is_autocast_enabled,
    is_grad_enabled,
    is_inference_mode_enabled,
)

from ..locks import CheckedLock

_AUTOCAST_DEVICES = ("cpu", "cuda")

Modes = tuple[Any, ...]


def capture() -> Modes | None:
    """This thread's modes; None for the defaults."""
    if (
        is_grad_enabled()
        and not is_inference_mode_enabled()
        and not is_autocast_enabled("cpu")
        and not is_autocast_enabled("cuda")
        and not is_anomaly_enabled()
    ):
        return None
    casts = tuple(
        (device, torch.get_autocast_dtype(device))
        for device in _AUTOCAST_DEVICES
        if torch.is_autocast_enabled(device)
    )
    grad = torch.is_grad_enabled()
    inference = torch.is_inference_mode_enabled()
    check_nan = torch.is_anomaly_check_nan_enabled()
    anomaly = check_nan if torch.is_anomaly_enabled() else None
    return grad, inference, torch.is_autocast_cache_enabled(), casts, anomaly


def allow_grad(modes: Modes) -> bool:
    """Whether gradients are recorded in these modes."""
    return bool(modes[0])


@contextmanager
def applied(modes: Modes) -> Iterator[None]:
    """Run with another worker's modes."""
    grad, inference, cache, casts, anomaly = modes
    with ExitStack() as stack:
        if inference:
            stack.enter_context(torch.inference_mode())
        stack.enter_context(torch.set_grad_enabled(grad))
        for device, dtype in casts:
            cast = torch.autocast(device, dtype, cache_enabled=cache)
            stack.enter_context(cast)
        if anomaly is not None:
            stack.enter_context(anomaly_mode(check_nan=anomaly))
        yield


_anomaly_lock = CheckedLock()
_anomaly_users = 0


@contextmanager
def anomaly_mode(*, check_nan: bool) -> Iterator[None]:
    """Turn on anomaly mode, which is global to the process, until its last user is done.

    If it was on already, whoever turned it on turns it off.
    """
    global _anomaly_users
    with _anomaly_lock:
        is_ours = _anomaly_users > 0 or not torch.is_anomaly_enabled()
        if is_ours:
            _anomaly_users += 1
            torch.autograd.set_detect_anomaly(True, check_nan)
    try:
        yield
    finally:
        with _anomaly_lock:
            if is_ours:
                _anomaly_users -= 1
                if not _anomaly_users:
                    torch.autograd.set_detect_anomaly(False)


@coroutine
def carried(steps: Coroutine[Any, Any, Any], modes: Modes) -> Generator[Any, Any, Any]:
    """Wrap a coroutine so that another worker's modes apply to its own steps only."""
    resume: tuple[Callable[[Any], Any], Any] = steps.send, None
    while True:
        step, argument = resume
        try:
            with applied(modes):
                awaited = step(argument)
        except StopIteration as end:
            return end.value
        try:
            resume = steps.send, (yield awaited)
        except BaseException as error:  # noqa: BLE001 the coroutine's to handle
            resume = steps.throw, error
