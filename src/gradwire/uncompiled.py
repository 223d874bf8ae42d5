"""Functions that `torch.compile` leaves alone.

A compiled function that makes a call ends one graph there and begins another after it: what a call
does, on two workers, is nothing that a graph can hold. The compiler is told so by marks on our own
functions, which cost nothing when they are called and do not load it.

Private torch names, and what breaks without them: the compiler's switch for code objects, which
`torch.compiler.disable` uses, too, but loads the compiler for. Without it, programs that compile
functions with calls in them would have our code compiled as well: slow, with warnings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])

_WHY = "calls to other workers run outside of the graph"


def uncompiled(function: F) -> F:
    """The same function, which is run as it is, with all that it calls."""
    marked: Any = function
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = _WHY
    _skip(marked.__code__)
    return function


def _skip(code: Any) -> None:
    switch: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    if hasattr(switch, "set_code_exec_strategy"):
        skip = switch._FrameAction.SKIP
        switch.set_code_exec_strategy(code, switch._FrameExecStrategy(skip, skip))
    elif hasattr(switch, "skip_code"):  # before torch 2.8: this code only
        switch.skip_code(code)
