"""The values of calls, taken out of Python.

What a call returns comes as an object of Python, of which the compiler knows nothing. An operator
for each type (`gradwire::take_...`) says what it is. Its name is the type, so that a saved script
can be loaded by a process that has never made such a call (`define_needed`).

No operator can return references or named tuples, or lists, dicts and tuples of them: it returns
what they are made of (`parts.py`). Classes and enums cannot be taken apart: they are taken by a
function of Python, so that what calls for one cannot be saved.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from . import compiler, operators, parts
from .types import annotation, in_schema

_PREFIX = "take_"


def taker(kind: Any) -> tuple[str, dict[str, Any]]:
    """What turns an object of Python, or a failure, into a value of this type in a script.

    An expression for a function, and the names in it.
    """
    operator = _operator(kind)
    if operator is not None:
        return operator, {}
    made_of = parts.parts_of(kind)
    operator = None if made_of is None else _operator(made_of)
    if operator is None:
        return "take", {"take": _python_taker(kind)}
    namespace: dict[str, Any] = {
        "Any": Any,
        "Value": annotation(kind),
        "build": parts.builder(kind),
        "torch": torch,
    }
    source = f"def take(value: Any) -> Value:\n    return build({operator}(value))"
    return "take", {"take": compiler.function(source, namespace, {})}


def define_needed(code: str) -> None:
    """Define the operators that saved code uses."""
    for found in set(re.findall(rf"ops\.gradwire\.{_PREFIX}([0-9a-f]+)", code)):
        kind = bytes.fromhex(found).decode()
        with compiler.lock:
            operators.define_taker(_PREFIX + found, kind)


def _operator(kind: Any) -> str | None:
    """The operator that takes values of this type; None if it can have none."""
    written = in_schema(kind)
    name = _PREFIX + written.encode().hex()
    try:
        operators.define_taker(name, written)
    except RuntimeError:
        return None
    return f"torch.ops.gradwire.{name}"


def _python_taker(kind: Any) -> Any:
    def take(value: Any) -> Any:
        return operators.outcome(value)

    take.__annotations__ = {"value": Any, "return": annotation(kind)}
    return torch.jit.ignore(take)
