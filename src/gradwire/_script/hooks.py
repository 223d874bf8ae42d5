"""What is put into torch so that scripts can make calls, and taken out again.

Private torch names, and what breaks without them: `torch.jit.frontend.parse_def`, which every
function, method and class passes on its way to the compiler (calls would not be rewritten);
`torch.jit._recursive.try_compile_fn`, which the compiler asks about functions of Python when it
comes to them (what is generated for a call would not be found); `get_annotations` there, which from
torch 2.15 on sees those of classes only (handles of remote modules, which have their own, could not
be scripted); `torch.jit.annotations.try_ann_to_type` (public; `RRef[T]` would be torch's own type);
`torch._C._jit_try_infer_type` (references in attributes would need annotations);
`torch.jit._builtins`, the table of functions that are operators (`backward`, `get_gradients`);
`torch._C.PyTorchFileReader` (a new process could not load modules that make calls).
"""

from __future__ import annotations

import inspect
import io
import os
import typing
from typing import Any

import torch
from torch.jit import _builtins, _recursive

from .._rpc.function_runner import is_async_execution
from . import calls, frontends, pickling, references, rewriting, scope, takers
from .frontends import Frontend

_frontend: Any = torch.jit.frontend
_annotations: Any = torch.jit.annotations
_modules: Any = _recursive
_table: Any = _builtins
_core: Any = torch._C

_parse_def = _frontend.parse_def
_try_ann_to_type = _annotations.try_ann_to_type
_infer_type = _core._jit_try_infer_type
_get_annotations = _modules.get_annotations
_try_compile_fn = _modules.try_compile_fn
_jit: Any = torch.jit
_load = _jit.load


def install(face: Frontend) -> None:
    """Have scripts call these functions. Idempotent."""
    is_first = not frontends.every()
    frontends.add(face)
    references.install(face.reference)
    pickling.register()
    scope.install()
    for operator, function in face.operators.items():
        _table._register_builtin(function, operator)
    if is_first:
        calls.enable(True)
        _frontend.parse_def = parse_def
        _annotations.try_ann_to_type = try_ann_to_type
        _core._jit_try_infer_type = infer_type
        _jit.load = load
        _modules.get_annotations = get_annotations
        _modules.try_compile_fn = try_compile_fn


def uninstall(face: Frontend) -> None:
    """Take it out again; what is compiled stays as it is. Idempotent."""
    if face not in frontends.every():
        return
    frontends.remove(face.name)
    for function in face.operators.values():
        _table._get_builtin_table().pop(id(function), None)
    if not frontends.every():
        calls.enable(False)
        _frontend.parse_def = _parse_def
        _annotations.try_ann_to_type = _try_ann_to_type
        _core._jit_try_infer_type = _infer_type
        _jit.load = _load
        _modules.get_annotations = _get_annotations
        _modules.try_compile_fn = _try_compile_fn


def parse_def(function: Any) -> Any:
    """What torch's own returns, with calls rewritten.

    Raises:
        RuntimeError: the function is marked async_execution, which scripting would lose.
    """
    if is_async_execution(function):
        raise RuntimeError(
            f"{function.__qualname__} is marked async_execution before it is scripted: "
            "put @async_execution above @torch.jit.script"
        )
    parsed = _parse_def(function)
    if inspect.isfunction(function) or inspect.ismethod(function):
        rewriting.rewrite(function, parsed)
    return parsed


def try_ann_to_type(annotation: Any, *where: Any, **more: Any) -> Any:
    """What torch's own returns; for `RRef[T]`, our type."""
    if typing.get_origin(annotation) in frontends.references():
        (inner,) = typing.get_args(annotation)
        return references.reference_to(try_ann_to_type(inner, *where, **more))
    if annotation in frontends.references():
        raise RuntimeError(
            "Attempted to use RRef without a contained type. Please add a contained type, "
            "e.g. RRef[int]"
        )
    return _try_ann_to_type(annotation, *where, **more)


def infer_type(value: Any) -> Any:
    """What torch's own returns; for references and lists and dicts of them, our types."""
    found = references.inferred(value)
    return _infer_type(value) if found is None else torch._C.InferredType(found)


def get_annotations(found: Any) -> Any:
    """What torch's own returns; for a module that has annotations of its own, those."""
    if isinstance(found, torch.nn.Module) and "__annotations__" in vars(found):
        return found.__annotations__
    return _get_annotations(found)


def try_compile_fn(function: Any, where: Any) -> Any:
    """What torch's own returns; for what stands for something generated, that."""
    made = calls.generated(function)
    return _try_compile_fn(function, where) if made is None else made


def load(f: Any, *given: Any, **more: Any) -> Any:
    """What torch's own returns; before that, defines what the code in the file needs."""
    if hasattr(f, "read"):
        f = io.BytesIO(f.read())
    elif not os.path.exists(f):
        return _load(f, *given, **more)  # raises what torch raises
    reader = _core.PyTorchFileReader(f if isinstance(f, io.BytesIO) else os.fspath(f))
    for name in reader.get_all_records():
        if name.startswith("code/") and name.endswith(".py"):
            takers.define_needed(reader.get_record(name).decode())
    if isinstance(f, io.BytesIO):
        f.seek(0)
    return _load(f, *given, **more)
