"""Types of TorchScript, as annotations and as the schemas of operators have them.

Private torch names, and what breaks without them: `torch.jit._state`, the table from classes to
types. Without it a generated function could not name a type that exists as an object only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._sources import fake_range
from torch.jit import _state

from . import compiler

_marks: dict[str, Any] = {}
_references: set[str] = set()


def note_reference(kind: Any) -> None:
    """This is the class of `RRef[T]` for some T."""
    _references.add(kind.qualified_name())


def is_reference_type(kind: Any) -> bool:
    return isinstance(kind, torch._C.ClassType) and kind.qualified_name() in _references


def kind_of(annotated: Any) -> Any:
    """The type that an annotation means."""
    return torch.jit.annotations.ann_to_type(annotated, fake_range())


def awaited(kind: Any) -> Any:
    """T, for the type `Future[T]`; any other type is returned as it is."""
    return kind.getElementType() if isinstance(kind, torch._C.FutureType) else kind


def annotation(kind: Any) -> Any:
    """A class that stands for a type in the text of generated code."""
    key = kind.annotation_str
    if key not in _marks:
        module, name = compiler.MODULE, f"Type{len(_marks)}"
        if isinstance(
            kind, torch._C.ClassType
        ):  # it can be called, and goes by its name
            module, _, name = kind.qualified_name().rpartition(".")
            module = module.removeprefix("__torch__.")
        mark = type(name, (), {"__module__": module})
        _state._script_classes[mark] = kind
        _marks[key] = mark
    return _marks[key]


def in_schema(kind: Any) -> str:
    """A type as the schema of an operator has it."""
    is_named = kind.annotation_str.startswith("__torch__.")  # no operator can have it
    if isinstance(kind, torch._C.TupleType) and not is_named:
        return f"({', '.join(map(in_schema, kind.elements()))})"
    if isinstance(kind, torch._C.ListType):
        return f"{in_schema(kind.getElementType())}[]"
    if isinstance(kind, torch._C.OptionalType):
        return f"{in_schema(kind.getElementType())}?"
    if isinstance(kind, torch._C.DictType):
        return f"Dict({in_schema(kind.getKeyType())}, {in_schema(kind.getValueType())})"
    if isinstance(kind, torch._C.FutureType):
        return f"Future({in_schema(kind.getElementType())})"
    return kind.annotation_str if is_named else str(kind)
