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
from functools import wraps
from typing import Any, TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., Any])

_WHY = "calls to other workers run outside of the graph"


def uncompiled(function: F) -> F:
    """The same function, which is run as it is, with all that it calls."""
    switch: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    marked: Any = function
    if hasattr(switch, "set_code_exec_strategy"):
        skip = switch._FrameAction.SKIP
        strategy = switch._FrameExecStrategy(skip, skip)
        switch.set_code_exec_strategy(function.__code__, strategy)
    elif hasattr(switch, "skip_code"):  # before torch 2.8
        marked = _switched_off(function, switch.set_eval_frame)
        switch.skip_code(marked.__code__)
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = _WHY  # shown from torch 2.7 on
    return cast(F, marked)


def _switched_off(function: Any, set_compiler: Callable[[Any], Any]) -> Any:
    """For a torch that can leave one function alone, but not what that calls."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        compiler = set_compiler(None)
        try:
            return function(*args, **kwargs)
        finally:
            set_compiler(compiler)

    return run
