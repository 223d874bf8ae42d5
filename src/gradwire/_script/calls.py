"""The functions that take the place of `rpc_sync`, `rpc_async` and `remote` in a script.

For a call of `f`, two are generated. `arguments_of` has the signature of `f` and returns its
arguments as a tuple: so the compiler itself checks them, fills in defaults, and says in its own
words what is wrong. `calling` makes the call and has the result's type.
"""

from __future__ import annotations

import builtins
import itertools
from typing import Any

import torch

from .._rpc.function_runner import is_async_execution
from . import compiler
from .conversions import finisher, typer
from .references import reference_to
from .types import annotation, awaited, kind_of

names: dict[str, Any] = {}
"""By the name that rewritten scripts have for it, what was generated."""

_numbers = itertools.count()
_names: dict[tuple[str, ...], str] = {}
_packers: dict[str, Any] = {}


def arguments_of(function: Any) -> str:
    """The name of the function that packs the arguments of another one."""
    return _named(("arguments", function.qualified_name), lambda: packer(function))


def packer(function: Any) -> Any:
    """A function with the signature of another one, which returns its arguments as a tuple."""
    key = function.qualified_name
    with compiler.lock:
        if key not in _packers:
            _packers[key] = _make_packer(function)
    return _packers[key]


def _make_packer(function: Any) -> Any:
    known: dict[str, Any] = {}
    given, parameters, defaults = [], [], {}
    for number, argument in enumerate(function.schema.arguments):
        known[f"Type{number}"] = annotation(argument.type)
        given.append(f"{argument.name}: Type{number}")
        parameters.append(argument.name)
        if argument.has_default_value():
            defaults[argument.name] = argument.default_value
    body = f"({', '.join(parameters)},)" if parameters else "None"
    source = f"def {function.name}({', '.join(given)}):\n    return {body}"
    return compiler.function(source, known, defaults)


def calling(frontend: str, way: str, function: Any, target: str) -> str:
    """The name of the function that calls another one, which goes by `target`, on a worker."""
    key = (frontend, way, target)
    kind = function.schema.returns[0].type
    if is_async_execution(function):  # the caller gets the value of the future
        kind = awaited(kind)
    return _named(key, lambda: _make_call(*key, kind))


def _make_call(frontend: str, way: str, target: str, kind: Any) -> Any:
    operator = (
        f"torch.ops.gradwire.{way}({frontend!r}, to, {target!r}, args, kwargs, timeout)"
    )
    known: dict[str, Any] = {
        "Any": Any,
        "Future": torch.futures.Future,
        "Value": annotation(kind),
        "torch": torch,
    }
    if way == "rpc_sync":
        known["finish"] = finisher(kind)
        returned, body = "Value", f"finish({operator})"
    elif way == "rpc_async":
        known["typed"] = typer(kind)
        returned, body = "Future[Value]", f"typed({operator})"
    else:
        known["Reference"] = annotation(reference_to(kind))
        returned, body = "Reference", f"Reference({operator})"
    source = (
        f"def {way}(to: Any, args: Any, kwargs: Any, timeout: float) -> {returned}:\n"
        f"    return {body}"
    )
    return compiler.function(source, known, {})


def _named(key: tuple[str, ...], make: Any) -> str:
    """The name in the namespace of what is made once for a key."""
    with compiler.lock:
        if key not in _names:
            name = _names[key] = f"__gw{next(_numbers)}"  # short: the source is, too
            names[name] = make()
            if is_enabled:
                setattr(builtins, name, names[name])
    return _names[key]


def reference(inner: Any) -> str:
    """The name of the class of `RRef[T]`, for an annotation T."""
    kind = kind_of(inner)
    key = ("RRef", kind.annotation_str)
    return _named(key, lambda: annotation(reference_to(kind)))


def typed_future(inner: Any) -> str:
    """The name of what makes a `Future[T]` of a future from Python, for an annotation T."""
    kind = kind_of(inner)
    return _named(("Future", kind.annotation_str), lambda: typer(kind))


def note() -> str:
    """The name of the function that begins scripts which may change threads."""
    return _named(("note",), _make_note)


def _make_note() -> Any:
    source = "def note() -> None:\n    torch.ops.gradwire.note()"
    return compiler.function(source, {"torch": torch}, {})


is_enabled = False


def enable(is_on: bool) -> None:
    """Whether scripts find what was generated: every lookup of a name ends at the builtins."""
    global is_enabled
    is_enabled = is_on
    for name, value in names.items():
        if is_on:
            setattr(builtins, name, value)
        elif hasattr(builtins, name):
            delattr(builtins, name)
