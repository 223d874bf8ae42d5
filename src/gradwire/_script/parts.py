"""Values that no operator can return, taken apart, and put together again by generated code.

The part of a reference is its box (`references.py`), those of a named tuple are its elements. Both
may stand in lists, dicts, tuples and optionals, of which the elements are taken apart.
"""

from __future__ import annotations

from typing import Any

import torch

from . import compiler, targets
from .types import annotation, is_reference_type, kind_of

_BOX: Any = torch._C.FutureType(torch._C.IntType.get())
_CONTAINERS = (
    torch._C.DictType,
    torch._C.ListType,
    torch._C.OptionalType,
    torch._C.TupleType,
)
_builders: dict[str, Any] = {}


def parts_of(kind: Any) -> Any:
    """The type of what a value of this type is made of; None if it cannot be taken apart."""
    if is_reference_type(kind):
        return _BOX
    is_tuple = isinstance(kind, torch._C.TupleType)
    if is_tuple and _is_named(kind) and _named_tuple(kind) is None:
        return None
    if _is_named(kind) and not is_tuple:  # a class, an enum or an interface
        return None
    inner = [parts_of(one) for one in kind.containedTypes()]
    if not inner:
        return kind
    if None in inner or not isinstance(kind, _CONTAINERS):
        return None
    return torch._C.TupleType(inner) if is_tuple else type(kind)(*inner)


def builder(kind: Any) -> Any:
    """`build(parts) -> T`, for a type that can be taken apart."""
    key = kind.annotation_str
    if key not in _builders:
        namespace = {"Parts": annotation(parts_of(kind)), "Value": annotation(kind)}
        is_reference = is_reference_type(kind)
        if _is_named(kind) and not is_reference:
            namespace["Named"] = _named_tuple(kind)
        calls = []
        for number, one in enumerate([] if is_reference else kind.containedTypes()):
            is_whole = parts_of(one).annotation_str == one.annotation_str
            calls.append("" if is_whole else f"build{number}")
            if not is_whole:
                namespace[f"build{number}"] = builder(one)
        lines = ["def build(parts: Parts) -> Value:", *_body(kind, calls)]
        _builders[key] = compiler.function("\n    ".join(lines), namespace, {})
    return _builders[key]


def _body(kind: Any, calls: list[str]) -> list[str]:
    """`calls`: the functions that put the elements together, by number."""
    if is_reference_type(kind):
        return ["return Value(parts)"]
    if isinstance(kind, torch._C.OptionalType):
        return ["if parts is None:", "    return None", f"return {calls[0]}(parts)"]
    if isinstance(kind, torch._C.ListType):
        return [f"return [{calls[0]}(one) for one in parts]"]
    if isinstance(kind, torch._C.DictType):
        return [f"return {{key: {calls[1]}(one) for key, one in parts.items()}}"]
    elements = [f"{call}(parts[{number}])" for number, call in enumerate(calls)]
    return [f"return {'Named' if _is_named(kind) else ''}({', '.join(elements)},)"]


def _is_named(kind: Any) -> bool:
    named: bool = kind.annotation_str.startswith("__torch__.")
    return named


def _named_tuple(kind: Any) -> Any:
    """The class of a named tuple, which scripts call; None if its module does not have it.

    That may have another class of the name, or one with annotations in quotes, of which torch
    makes no type.
    """
    found = targets.in_module(kind.annotation_str)
    if not hasattr(found, "_fields"):
        return None
    try:
        return found if str(kind_of(found)) == str(kind) else None
    except Exception:  # noqa: BLE001 annotations of the user's
        return None
