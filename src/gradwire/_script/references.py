"""`RRef[T]` in scripts: a TorchScript class for each T, over one and the same handle of Python.

Its only attribute is a box, a `Future(int)` that is done and holds the handle. So TorchScript keeps
the handle alive, and lets go of it. A handle makes a new box each time that a script takes it: one
that kept its box would keep itself. What comes out of a script is a new handle on the same value.

Private torch names, and what breaks without them: `torch.jit._state`, the tables between classes
and types. Without them no reference could enter or leave a script.
"""

from __future__ import annotations

import re
import zlib
from typing import Any, NamedTuple

import torch
from torch.jit import _state

from .._rref.reference import RRef
from . import compiler, frontends
from .conversions import finisher
from .operators import done
from .types import annotation, kind_of, note_reference

BOX = "_script_box"

# As `gradwire.WorkerInfo`, whose annotations are in quotes, which TorchScript cannot read.
WorkerInfo = NamedTuple("WorkerInfo", [("name", str), ("id", int)])  # noqa: UP014

_SOURCE = """
class {name}:
    def __init__(self, box: Future[int]):
        self.{box} = box
    def to_here(self, timeout: float = -1.0) -> Value:
        return finish(torch.ops.gradwire.to_here(self.{box}, timeout, {is_module}))
    def local_value(self) -> Value:
        return finish(torch.ops.gradwire.local_value(self.{box}))
    def owner(self) -> WorkerInfo:
        name, number = torch.ops.gradwire.owner(self.{box})
        return WorkerInfo(name, number)
    def owner_name(self) -> str:
        name, number = torch.ops.gradwire.owner(self.{box})
        return name
    def is_owner(self) -> bool:
        return torch.ops.gradwire.is_owner(self.{box})
    def confirmed_by_owner(self) -> bool:
        return torch.ops.gradwire.confirmed_by_owner(self.{box})
    def __getstate__(self) -> str:
        return torch.ops.gradwire.dump(self.{box})
    def __setstate__(self, token: str) -> None:
        self.{box} = torch.ops.gradwire.load(token)
"""

_made: dict[str, Any] = {}


def reference_to(kind: Any) -> Any:
    """The type `RRef[T]` for the type T."""
    key = kind.annotation_str
    with compiler.lock:
        if key not in _made:
            _made[key] = _make(kind)
    return _made[key]


def _make(kind: Any) -> Any:
    word = re.sub(r"\W+", "_", str(kind)).strip("_")
    name = f"RRef_{word}_{zlib.crc32(str(kind).encode()):08x}"  # the same everywhere
    namespace = {
        "Value": annotation(kind),
        "WorkerInfo": WorkerInfo,
        "Future": torch.futures.Future,
        "finish": finisher(kind),
        "torch": torch,
    }
    is_module = isinstance(kind, torch._C.InterfaceType)
    source = _SOURCE.format(name=name, box=BOX, is_module=is_module)
    made = compiler.script_class(source, namespace)
    note_reference(made)
    handles = frontends.references()
    _state._name_to_pyclass[made.qualified_name()] = max(handles, key=_depth)
    return made


def _depth(kind: type) -> int:
    """How special a class is: handles of the drop-in have more to them than ours."""
    return len(kind.__mro__)


# The handles


def install(kind: type) -> None:
    """Have handles of this class enter and leave scripts."""
    setattr(kind, BOX, property(_box, _become))


def _box(rref: Any) -> Any:
    return done(rref)


def _become(rref: Any, box: Any) -> None:
    """Make a bare handle one on the value of another."""
    other = box.value()
    for kind in type(other).__mro__:
        for name in vars(kind).get("__slots__", ()):
            if name != "__weakref__" and hasattr(other, name):
                setattr(rref, name, getattr(other, name))


# Types that nobody has written down


def inferred(value: Any) -> Any:
    """The type of a reference, or of a list or dict of them; None for anything else.

    The owner is asked what it has: a reference does not know.

    Raises:
        RuntimeError: what it has is not of one type of TorchScript.
    """
    if isinstance(value, RRef):
        return reference_to(_type_of(value))
    if isinstance(value, list) and value and isinstance(value[0], RRef):
        return torch._C.ListType(inferred(value[0]))
    if isinstance(value, dict):
        first = next(iter(value.items()), None)
        if first is not None and isinstance(first[1], RRef):
            return torch._C.DictType(kind_of(type(first[0])), inferred(first[1]))
    return None


def _type_of(rref: Any) -> Any:
    kind = rref._get_type()
    if kind is torch.nn.Parameter:
        kind = torch.Tensor
    if kind in (torch.Tensor, int, float, bool, str, complex):
        return kind_of(kind)
    found = _state._get_script_class(kind)
    if found is None:
        raise RuntimeError(
            f"a script cannot tell what {rref} refers to: its value is a {kind.__qualname__}; "
            "annotate it, as RRef[T] for a type T of TorchScript"
        )
    return found
