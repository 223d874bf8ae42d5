"""Functions by name: `module:qualname`, resolved when called.

An importable function is sent as its name. `Names` is careful: a name is used only if it resolves
to the very same object, so a decorated, local or replaced function is never confused with another.
A function without a name is sent by value (`pickling.py`).

Functions of the main script have a name if the other worker runs the same script: they then use
that module's globals, as programs with a server's state in a global expect. Where the other worker
may not have reached a definition, the value is sent along (`pickling.py`).
"""

from __future__ import annotations

import ast
import hashlib
import sys
import types
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

CHILD_MAIN = "__mp_main__"  # what multiprocessing calls the main module in its children
MAIN_MODULES = ("__main__", CHILD_MAIN)
_MAX_REMEMBERED = 4096
_METHODS = (types.MethodType, types.BuiltinMethodType)  # created anew at every access


def main_fingerprint() -> str:
    """A fingerprint that is equal on workers with the same main script; empty without one.

    What the script has defined by now on any worker, the others have when they reach this point.
    """
    global _certain
    main = sys.modules.get("__main__")
    path = getattr(main, "__file__", None)
    try:
        source = Path(path).read_bytes() if path else b""
    except OSError:
        source = b""
    _certain = (main, _defined_by(source) & vars(main).keys()) if source else None
    return hashlib.sha256(source).hexdigest() if source else ""


_certain: tuple[types.ModuleType | None, frozenset[str]] | None = None
"""The main module, and which names of it every worker that runs the same script has, if known."""


def may_be_missing(qualname: str) -> bool:
    """Whether another worker that runs the same script may lack this definition."""
    if _certain is None or _certain[0] is not sys.modules.get("__main__"):
        return False
    return qualname.partition(".")[0] not in _certain[1]


@lru_cache(maxsize=4)
def _defined_by(source: bytes) -> frozenset[str]:
    """The names that a script defines unconditionally: not in an `if`, a `try` or a loop."""
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError):
        return frozenset()
    found = set()
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(statement.name)
        elif isinstance(statement, ast.Assign):
            found |= {t.id for t in statement.targets if isinstance(t, ast.Name)}
    return frozenset(found)


class Names:
    """Finds the names of functions, and caches them."""

    def __init__(self) -> None:
        self._names: dict[Any, str] = {}

    def name_of(
        self, func: Any, same_main: bool, *, is_enough: bool = True
    ) -> str | None:
        """The name by which `func` can be found elsewhere, or None.

        Also None if the other workers might not have it, where a name alone would not suffice.
        """
        try:
            name = self._names.get(func)
        except TypeError:  # unhashable: an instance, never found by name
            return None
        if name is None:
            name = _find_name(func)
            if name is None:  # not cached: a closure may hold much
                return None
            if len(self._names) > _MAX_REMEMBERED:
                self._names.clear()
            self._names[func] = name
        if not name.startswith("__main__:"):
            return name
        if same_main and (is_enough or not may_be_missing(name[len("__main__:") :])):
            return name
        return None


def resolve(name: str) -> Any:
    """The object that currently has this name.

    Raises:
        LookupError: there is no such module or attribute here.
    """
    try:
        title, module, attribute = _places[name]
        if sys.modules[title] is module:
            return getattr(module, attribute)
    except (KeyError, AttributeError):  # never seen, or already freed
        pass
    return _look_up(name)


_places: dict[str, tuple[str, types.ModuleType, str]] = {}
"""Where names were found: modules that need no import, and what to ask them for."""


def _look_up(name: str) -> Any:
    title, _, qualname = name.partition(":")
    try:
        __import__(title)  # waits if it is just being imported
        module: Any = sys.modules[title]
    except (ImportError, ValueError, TypeError) as error:  # or no name of a module
        raise LookupError(f"no module {title!r} here ({error})") from error
    found = module
    for part in qualname.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            hint = "; define it before init_rpc" if title == "__main__" else ""
            raise LookupError(
                f"no {qualname!r} in module {title!r} here{hint}"
            ) from error
    spec = getattr(module, "__spec__", None)
    is_ready = not getattr(spec, "_initializing", False)  # this call imports it
    if is_ready and "." not in qualname:
        if len(_places) > _MAX_REMEMBERED:
            _places.clear()
        _places[name] = title, module, qualname
    return found


def _find_name(func: Any) -> str | None:
    module, qualname = _origin(func)
    if not callable(func) or not isinstance(qualname, str) or "<" in qualname:
        return None
    candidates = [f"torch:{qualname.rpartition('.')[2]}", f"builtins:{qualname}"]
    if isinstance(module, str):
        alias = "__main__" if module in MAIN_MODULES else module
        candidates.insert(0, f"{alias}:{qualname}")
    for name in candidates:
        try:
            found = resolve(name)
        except LookupError:
            continue
        if found is func or (isinstance(func, _METHODS) and found == func):
            return name
    return None


def _origin(func: Any) -> tuple[Any, Any]:
    """The module and the name that a function claims."""
    if isinstance(func, torch.jit.ScriptFunction):  # all have the same, in Python
        module, _, name = func.qualified_name.rpartition(".")
        return module.removeprefix("__torch__").lstrip(".") or "__main__", name
    return getattr(func, "__module__", None), getattr(func, "__qualname__", None)


def describe(func: Any) -> str:
    """A name for messages to people."""
    if isinstance(func, torch.jit.ScriptFunction):
        return str(func.name)
    name = getattr(func, "__qualname__", None)
    if name is None:
        return repr(func) if isinstance(func, str) else f"a {type(func).__qualname__}"
    module = getattr(func, "__module__", None)
    return f"{module}.{name}" if module else str(name)
