"""From what an operator gives to a value that a script can use."""

from __future__ import annotations

from typing import Any

import torch

from . import compiler
from .takers import taker
from .types import annotation, is_reference_type

_finishers: dict[str, Any] = {}
_typers: dict[str, Any] = {}


def finisher(kind: Any) -> Any:
    """`finish(Future[Any]) -> T`: waits, and raises what the call raised."""
    key = kind.annotation_str
    with compiler.lock:
        if key not in _finishers:
            _finishers[key] = _make_finisher(kind)
    return _finishers[key]


def _make_finisher(kind: Any) -> Any:
    namespace: dict[str, Any] = {
        "Any": Any,
        "Future": torch.futures.Future,
        "Value": annotation(kind),
        "torch": torch,
    }
    if str(kind) == "NoneType":
        take, _ = taker(kind)
        lines = ["-> None:", f"    {take}(future.wait())"]
    elif is_reference_type(kind):
        lines = [
            "-> Value:",
            "    return Value(torch.ops.gradwire.take_rref(future.wait()))",
        ]
    else:
        take, more = taker(kind)
        namespace.update(more)
        lines = [
            "-> Value:",
            "    value = future.wait()",
            # one that never was in Python is the same object for all who hold it
            "    if torch.jit.isinstance(value, Value):",
            "        return value",
            f"    return {take}(value)",
        ]
    source = "\n".join([f"def finish(future: Future[Any]) {lines[0]}", *lines[1:]])
    return compiler.function(source, namespace, {})


def typer(kind: Any) -> Any:
    """`typed(Future[Any]) -> Future[T]`: a future of Python as one for scripts."""
    key = kind.annotation_str
    with compiler.lock:
        if key not in _typers:
            namespace = {
                "Any": Any,
                "Future": torch.futures.Future,
                "Value": annotation(kind),
                "finish": finisher(kind),
                "torch": torch,
            }
            source = (
                "def typed(future: Future[Any]) -> Future[Value]:\n"
                "    return torch.jit._fork(finish, future)"
            )
            _typers[key] = compiler.function(source, namespace, {})
    return _typers[key]
