"""Whether someone watches, or changes, what torch does in this thread.

Modes of dispatch, transforms (`vmap`) and tracers are asked for by private functions of `torch._C`:
there are no others. Should one of them go, all counts as watched: then nothing is made ahead
(`engine.py`), which costs time and nothing else.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
from torch import is_anomaly_enabled, is_inference_mode_enabled


def _found(path: str) -> Any:
    """A function of torch, or one that says yes."""
    try:
        return reduce(getattr, path.split("."), torch._C)
    except AttributeError:
        return lambda: True


_modes = _found("_len_torch_dispatch_stack")
_transform = _found("_functorch.peek_interpreter_stack")
_trace = _found("_get_tracing_state")


def is_watched() -> bool:
    """Whether tensors made now differ from others, or someone sees how they are made."""
    return bool(
        is_anomaly_enabled()
        or is_inference_mode_enabled()
        or _modes()
        or _transform()
        or _trace()
    )
