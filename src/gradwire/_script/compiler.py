"""Compiles the small TorchScript functions and classes that scripted calls are made of.

They are written here as text, once per function that is called or type that is referred to. The
names in the text are looked up in a namespace that goes with it.

Compiling is not thread-safe in torch. What is made here is made where a program compiles a script
of its own, or under `lock`.
"""

from __future__ import annotations

import ast
import threading
import types
import warnings
from typing import Any

import torch
from torch._jit_internal import createResolutionCallbackFromEnv
from torch._sources import ParsedDef, make_source_context
from torch.jit.frontend import build_class_def, get_jit_def

MODULE = "gradwire_script"
"""Where the generated code is said to be from, in graphs and in saved modules."""

lock = threading.RLock()


def function(source: str, namespace: dict[str, Any], defaults: dict[str, Any]) -> Any:
    """The scripted function with this source."""
    code = ast.parse(source)
    (definition,) = code.body
    assert isinstance(definition, ast.FunctionDef)
    tree = get_jit_def(_parsed(code, source), definition.name)
    made = torch._C._jit_script_compile(
        f"__torch__.{MODULE}.{definition.name}", tree, _lookup(namespace), defaults
    )
    made._torchdynamo_inline = made
    return made


def script(value: Any) -> Any:
    """What `torch.jit.script` makes, without its warning: the program did not ask for it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)  # which it is from torch 2.15
        return torch.jit.script(value)


def script_class(source: str, namespace: dict[str, Any]) -> Any:
    """The type of the scripted class with this source."""
    code = ast.parse(source)
    (definition,) = code.body
    assert isinstance(definition, ast.ClassDef)
    context = make_source_context(source, MODULE, 1, 0, False)
    methods, defaults = [], {}
    for method in definition.body:
        assert isinstance(method, ast.FunctionDef)
        one = ast.Module([method], [])
        methods.append(
            get_jit_def(_parsed(one, source), method.name, self_name=definition.name)
        )
        defaults[method.name] = _defaults(method)
    tree = build_class_def(context, definition, methods, [], definition.name, [])
    name = f"__torch__.{MODULE}.{definition.name}"
    return torch._C._jit_script_class_compile(name, tree, defaults, _lookup(namespace))


def _parsed(code: ast.Module, source: str) -> Any:
    context = make_source_context(source, MODULE, 1, 0, True)
    return ParsedDef(code, context, source, MODULE, 1)


def _defaults(method: ast.FunctionDef) -> dict[str, Any]:
    values = [ast.literal_eval(value) for value in method.args.defaults]
    names = [argument.arg for argument in method.args.args]
    return dict(zip(names[len(names) - len(values) :], values, strict=True))


def _lookup(namespace: dict[str, Any]) -> Any:
    env: Any = types.SimpleNamespace(**namespace)
    return createResolutionCallbackFromEnv(env)
