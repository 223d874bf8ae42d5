"""Modules on other workers that scripts can call: methods made from a TorchScript interface.

For an interface with a method `forward`, the handle gets `forward` and `forward_async` of the same
signature, whose calls are made by the script; the module's worker runs a scripted function, which
is generated from the interface there, too, under the same name.

Private torch names, and what breaks without them: `torch._jit_internal`, for the names of
interfaces. Without it a remote module could not be scripted.
"""

from __future__ import annotations

import linecache
import sys
import zlib
from types import ModuleType
from typing import Any

import torch
from torch._jit_internal import _qualified_name

from . import compiler, targets
from .frontends import Frontend
from .references import reference_to
from .types import annotation

_FORWARD = """
def forward(self, {parameters}) -> Value:
    args = (self.module_rref, self.device{given})
    return rpc_async(self.module_rref.owner(), remote_forward, args).wait()
"""
_FORWARD_ASYNC = """
def forward_async(self, {parameters}) -> Future[Value]:
    args = (self.module_rref, self.device{given})
    return rpc_async(self.module_rref.owner(), remote_forward, args)
"""

_module = sys.modules.setdefault(compiler.MODULE, ModuleType(compiler.MODULE))
"""Where other workers find what their callers name."""


def methods(interface: Any, frontend: Frontend) -> list[Any]:
    """The functions `forward` and `forward_async` for the handle of a module."""
    schema = _schema(interface)
    parameters = schema.arguments[1:]
    names = {
        **_types(parameters, schema),
        "Future": torch.futures.Future,
        "rpc_async": frontend.functions["rpc_async"],
        "remote_forward": remote_forward(interface),
    }
    made = []
    for number, source in enumerate((_FORWARD, _FORWARD_ASYNC)):
        code = source.format(
            parameters=_declared(parameters, defaults=True),
            given="".join(f", {parameter.name}" for parameter in parameters),
        )
        title = f"<{_word(interface)} {number} of {frontend.name}>"
        linecache.cache[title] = len(code), None, code.splitlines(True), title
        space = dict(names, __name__=compiler.MODULE)
        exec(compile(code, title, "exec"), space)
        made.append(torch.jit.export(space["forward_async" if number else "forward"]))
    return made


def remote_forward(interface: Any) -> Any:
    """The scripted function that the module's worker runs; made once."""
    name = f"forward_{_word(interface)}"
    with compiler.lock:
        if not hasattr(_module, name):
            setattr(_module, name, _make_remote_forward(interface, name))
    return getattr(_module, name)


def annotated(interface: Any) -> Any:
    """What `RRef[interface]` is in an annotation."""
    return annotation(reference_to(_kind(interface)))


def _make_remote_forward(interface: Any, name: str) -> Any:
    schema = _schema(interface)
    parameters = schema.arguments[1:]
    names = {**_types(parameters, schema), "Module": annotated(interface)}
    given = ", ".join(
        f"{parameter.name}.to(device)" if _is_tensor(parameter.type) else parameter.name
        for parameter in parameters
    )
    declared = _declared(parameters, defaults=False)
    source = (
        f"def {name}(module: Module, device: str, {declared}) -> Value:\n"
        f"    value = module.local_value().forward({given})\n"
        f"    return {_on_cpu('value', schema.returns[0].type)}"
    )
    return compiler.function(source, names, {})


def _on_cpu(name: str, kind: Any) -> str:
    """The value with its tensors on the CPU, as far as its type tells of them."""
    if _is_tensor(kind):
        return f"{name}.cpu()"
    if isinstance(kind, torch._C.TupleType):
        parts = enumerate(kind.elements())
        moved = [_on_cpu(f"{name}[{number}]", part) for number, part in parts]
        return f"({''.join(part + ', ' for part in moved)})"
    return name


def _declared(parameters: list[Any], *, defaults: bool) -> str:
    given = []
    for number, parameter in enumerate(parameters):
        default = defaults and parameter.has_default_value()
        equals = f" = Default{number}" if default else ""
        given.append(f"{parameter.name}: Type{number}{equals}")
    return ", ".join(given)


def _types(parameters: list[Any], schema: Any) -> dict[str, Any]:
    found = {"Value": annotation(schema.returns[0].type)}
    for number, parameter in enumerate(parameters):
        found[f"Type{number}"] = annotation(parameter.type)
        if parameter.has_default_value():
            found[f"Default{number}"] = parameter.default_value
    return found


def _kind(interface: Any) -> Any:
    if not getattr(interface, "__torch_script_interface__", False):
        raise ValueError(
            f"module_interface_cls {interface} must be a type object decorated by "
            "@torch.jit.interface"
        )
    return targets.interface(_qualified_name(interface))


def _schema(interface: Any) -> Any:
    kind = _kind(interface)
    if "forward" not in kind.getMethodNames():
        raise ValueError(
            f"interface {interface.__qualname__} has no method 'forward': "
            f"it has {kind.getMethodNames()}"
        )
    return kind.getMethod("forward")


def _is_tensor(kind: Any) -> bool:
    return str(kind) == "Tensor"


def _word(interface: Any) -> str:
    name = _qualified_name(interface).removeprefix("__torch__.")
    return f"{name.replace('.', '_')}_{zlib.crc32(name.encode()):08x}"
