"""The functions that take the place of `rpc_sync`, `rpc_async` and `remote` in a script.

For a call of `f`, two are generated. `arguments_of` has the signature of `f` and returns its
arguments as a tuple: so the compiler itself checks them, fills in defaults, and says in its own
words what is wrong. `calling` makes the call and has the result's type.
"""

from __future__ import annotations

import builtins
import itertools
from collections.abc import Callable
from typing import Any

import torch

from .._rpc.function_runner import is_async_execution
from . import compiler, targets
from .conversions import finisher, typer
from .references import reference_to
from .types import annotation, awaited, kind_of

names: dict[str, Any] = {}
"""By the name that rewritten scripts have for it, what stands for something generated."""

_numbers = itertools.count()
_names: dict[Any, str] = {}
_packers: dict[str, Any] = {}
_generated: dict[Any, Any] = {}
"""By the function of Python that stands for it and makes it; None until then."""


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


def calling(frontend: str, way: str, function: Any) -> str:
    """The name of the function that calls another one on a worker."""
    target = function.qualified_name
    key = (frontend, way, target)
    return _named(key, lambda: _make_call(frontend, way, function, target))


def refused(frontend: str, way: str, script: Callable[[], Any]) -> tuple[str, str]:
    """The names of both functions for one of Python, which `script` compiles.

    As in torch, such a call is refused when it is made.
    """

    def make() -> Any:
        function = script()
        target = targets.PYTHON + function.qualified_name
        return _make_call(frontend, way, function, target)

    return _named(object(), lambda: packer(script())), _named(object(), make)


def error(refusal: Callable[[], Exception]) -> str:
    """The name of what cannot be compiled: the compiler gets this error."""

    def make() -> Any:
        raise refusal()

    return _named(object(), make)


def _make_call(frontend: str, way: str, function: Any, target: str) -> Any:
    kind = function.schema.returns[0].type
    if is_async_execution(function):  # the caller gets the value of the future
        kind = awaited(kind)
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


def _named(key: Any, make: Callable[[], Any]) -> str:
    """The name of what `make` makes, once for each key, when the compiler comes to it.

    That is never where it leaves out a branch: what stands there may be for Python only.
    """
    with compiler.lock:
        if key not in _names:
            _names[key] = _put(make)
            _generated[make] = None
    return _names[key]


def _put(value: Any) -> str:
    """A name that scripts have for something."""
    name = f"__gw{next(_numbers)}"  # short: the source is, too
    names[name] = value
    if is_enabled:
        setattr(builtins, name, value)
    return name


def generated(function: Any) -> Any:
    """What is in the place of a function of Python; None for those of others."""
    if function not in _generated:
        return None
    with compiler.lock:
        if _generated[function] is None:
            _generated[function] = function()
    return _generated[function]


def reference(inner: Any) -> str:
    """The name of the class of `RRef[T]`, for an annotation T."""
    kind = kind_of(inner)
    key = ("RRef", kind.annotation_str)
    with compiler.lock:
        if key not in _names:
            _names[key] = _put(annotation(reference_to(kind)))
    return _names[key]


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
