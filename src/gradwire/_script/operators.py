"""The operators that scripted calls come down to: TorchScript runs these, and they run Python.

All are `gradwire::...`. Types that an operator cannot name travel as `Any`; a reference is a
`Future(int)` that is done and holds the handle (`references.py`), a call under way is a
`Future(Any)`. None is ever dropped, merged with another or moved by the optimizer (CONSERVATIVE).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import api
from .._rpc.futures import fresh_copy
from .._rref.reference import RRef
from . import frontends, pickled, scope, targets

_library = torch.library.Library("gradwire", "DEF")
_defined: set[str] = set()

_BOXED = "Future(int)"
"""A reference, where the result of an operator has one."""

Raw = torch.futures.Future[Any]


def outcome(value: Any) -> Any:
    """The result of a call. To scripts, the exception of a future is its value.

    Raises:
        Exception: that of the call.
    """
    if isinstance(value, BaseException):
        raise fresh_copy(value)  # C++ holds the first: it must not hold frames
    return value


def done(value: Any) -> Raw:
    """A future that has this value."""
    future: Raw = torch.futures.Future()
    future.set_result(value)
    return future


def _define(schema: str, function: Callable[..., Any]) -> None:
    _library.define(schema, alias_analysis="CONSERVATIVE")
    name = schema.partition("(")[0]
    _library.impl(name, function, "CompositeImplicitAutograd")


def define_taker(name: str, kind: str) -> None:
    """Define what takes a value of this type out of Python. Idempotent.

    Raises:
        RuntimeError: no operator can have this type.
    """
    if name in _defined:
        return
    returned = "" if kind == "NoneType" else kind
    take = _take_boxed if _BOXED in kind else _takers.get(kind, outcome)
    _define(f"{name}(Any value) -> ({returned})", take)
    _defined.add(name)


def _take_tensor(value: Any) -> torch.Tensor:
    value = outcome(value)
    if isinstance(value, (int, float, complex)):  # torch takes numbers for tensors, too
        return torch.tensor(value)
    found: torch.Tensor = value
    return found


def _take_nothing(value: Any) -> None:
    outcome(value)


def _take_boxed(value: Any) -> Any:
    return _boxed(outcome(value))


def _boxed(value: Any) -> Any:
    """With the box of each reference in its place."""
    if isinstance(value, RRef):
        return done(value)
    if isinstance(value, dict):
        return {key: _boxed(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        boxed = map(_boxed, value)
        return list(boxed) if isinstance(value, list) else tuple(boxed)
    return value


_takers: dict[str, Callable[..., Any]] = {
    "Tensor": _take_tensor,
    "NoneType": _take_nothing,
}


# Calls


def _call(way: str, given: tuple[Any, ...]) -> Any:
    frontend, to, function, args, kwargs, timeout = given
    target = targets.find(function)
    args, kwargs = targets.arguments(target, args, kwargs)
    if isinstance(to, tuple):  # a WorkerInfo
        to = to[1]
    return frontends.get(frontend).make[way](to, target, args, kwargs, timeout)


def _rpc_async(*given: Any) -> Raw:
    return _raw(_call("rpc_async", given))


def _rpc_sync(*given: Any) -> Raw:
    if scope.inherited():  # one of torch's few threads: blocked, they could deadlock
        return _raw(_call("rpc_async", given))
    return done(_call("rpc_sync", given))


def _remote(*given: Any) -> Raw:
    return done(_call("remote", given))


def _raw(call: torch.futures.Future[Any]) -> Raw:
    raw: Raw = torch.futures.Future()

    def finish(call: torch.futures.Future[Any]) -> None:
        try:
            value = call.value()
        except Exception as error:  # noqa: BLE001 user code
            value = error.with_traceback(None)
        raw.set_result(value)

    call.add_done_callback(finish)
    return raw


# References


def _to_here(box: Raw, timeout: float, is_module: bool) -> Raw:
    rref = box.value()
    if is_module and not rref.is_owner():
        raise RuntimeError(
            f"{rref} is an RRef to a ScriptModule. It can't be sent through RPC from owner, "
            f"{rref.owner()}: a script would get a copy of it. Use it there"
        )
    if scope.inherited():  # as in `_rpc_sync`
        return _raw(rref.to_here_async(None if timeout < 0 else timeout))
    return done(rref.to_here() if timeout < 0 else rref.to_here(timeout))


def _local_value(box: Raw) -> Raw:
    rref = box.value()
    if not rref.is_owner():
        raise RuntimeError(
            f"Can't call RRef.local_value() on a non-owner RRef: {rref} is owned by "
            f"{rref.owner_name()!r}"
        )
    if scope.inherited():
        return _raw(rref.to_here_async())
    return done(rref.local_value())


def _owner(box: Raw) -> tuple[str, int]:
    info = box.value().owner()
    return info.name, info.id


def _take_rref(value: Any) -> Raw:
    return done(outcome(value))


# Backward


_CALL = "(str frontend, Any to, str function, Any args, Any kwargs, float timeout)"
_BOX = "(Future(int) box)"

_operators: dict[str, Callable[..., Any]] = {
    "note() -> ()": scope.note,
    f"rpc_async{_CALL} -> Future(Any)": _rpc_async,
    f"rpc_sync{_CALL} -> Future(Any)": _rpc_sync,
    f"remote{_CALL} -> Future(int)": _remote,
    "to_here(Future(int) box, float timeout, bool is_module) -> Future(Any)": _to_here,
    f"local_value{_BOX} -> Future(Any)": _local_value,
    f"owner{_BOX} -> (str, int)": _owner,
    f"is_owner{_BOX} -> bool": lambda box: box.value().is_owner(),
    f"confirmed_by_owner{_BOX} -> bool": lambda box: box.value().confirmed_by_owner(),
    "take_rref(Any value) -> Future(int)": _take_rref,
    "get_gradients(int context_id) -> Dict(Tensor, Tensor)": api.get_gradients,
    "dist_backward(int context_id, Tensor[] roots, bool retain_graph=False) -> ()": api.backward,
    f"dump{_BOX} -> str": lambda box: pickled.dump(box.value()),
    "load(str token) -> Future(int)": lambda token: done(pickled.load(token)),
}

for _schema, _function in _operators.items():
    _define(_schema, _function)
