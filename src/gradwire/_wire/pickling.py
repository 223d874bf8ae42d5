"""Any Python object as bytes, with its tensors beside it: pickle 5 on top of cloudpickle.

Tensors never enter the pickle: they go to a list, and the pickle holds their places in it.
Functions and classes that can be imported go by name; lambdas, closures and what the main script
defines go by value, unless the other worker runs the same script. Then they go by name too, with
the value beside it where the other one may lack them.

Only used between workers that have proven the world's key: unpickling runs code.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import cloudpickle
import torch

from . import tensor_kinds
from .device_maps import DeviceMap
from .functions import CHILD_MAIN, MAIN_MODULES, may_be_missing

Reducer = Callable[[Any], "tuple[Any, ...] | str"]


class Serializer(Protocol):
    """Converts objects to bytes: pass one to `Options(serializer=...)` to use your own."""

    def dumps(self, obj: Any, tensors: list[torch.Tensor]) -> bytes:
        """`obj` as bytes; appends its tensors to `tensors`, which are sent alongside."""

    def loads(self, data: bytes | memoryview, tensors: list[torch.Tensor]) -> Any:
        """The inverse of `dumps`, with the tensors that arrived."""


@dataclass(slots=True)
class Beside:
    """What one message contains besides the bytes and tensors of its pickle."""

    replaced: frozenset[type] = frozenset()
    """Exact types of objects for which numbers are pickled."""
    replace: Callable[[Any], tuple[int, ...]] | None = None
    """What gives the numbers of one."""
    restore: Callable[..., Any] | None = None
    """What makes the object of its numbers."""
    is_traced: bool = False
    """Tensors that require grad will have a history where they arrive."""
    devices: DeviceMap | None = None
    """Where its tensors arrive; None: on devices of the same names."""
    traced: dict[int, torch.Tensor] = field(default_factory=dict)
    """Those, by number; where they arrived, without their history yet."""

    def leave(self, tensor: torch.Tensor) -> int:
        """The number of a tensor that leaves."""
        number = len(self.traced)
        self.traced[number] = tensor
        return number

    def arrive(self, number: int, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that arrived."""
        self.traced[number] = tensor
        return tensor


class PickleSerializer:
    """The default serializer. `same_main`: the other worker runs the same script."""

    def __init__(
        self,
        reducers: dict[type, Reducer],
        *,
        same_main: bool,
        beside: Beside | None = None,
    ) -> None:
        self.reducers = reducers
        self.same_main = same_main
        self._beside = beside or Beside()

    def dumps(self, obj: Any, tensors: list[torch.Tensor]) -> bytes:
        child = sys.modules.get(CHILD_MAIN)
        if child is not None:
            cloudpickle.register_pickle_by_value(child)  # which takes it for importable
        file = io.BytesIO()
        pickler = _Pickler(file, tensors, self, self._beside)
        pickler.dump(obj)
        return file.getvalue()

    def loads(self, data: bytes | memoryview, tensors: list[torch.Tensor]) -> Any:
        return _Unpickler(io.BytesIO(data), tensors, self._beside).load()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(
        self,
        file: io.BytesIO,
        tensors: list[torch.Tensor],
        serializer: PickleSerializer,
        beside: Beside,
    ) -> None:
        super().__init__(file, protocol=5)
        self.is_value = False
        """Whether it pickles something of the main script by value, with what belongs to it."""
        self._tensors = tensors
        self._serializer = serializer
        self._reducers = serializer.reducers
        self._same_main = serializer.same_main
        self._beside = beside

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind in self._reducers:
            return self._reducers[kind](obj)
        beside = self._beside
        if kind in beside.replaced and beside.replace is not None:
            return restored, beside.replace(obj)
        if beside.is_traced and isinstance(obj, torch.Tensor) and obj.requires_grad:
            return traced, (beside.leave(obj), without_history(obj))
        if kind is torch.Tensor:
            return self._tensor(obj)
        if kind is tensor_kinds.Copy:
            return self._beside_pickle(obj.tensor)
        if isinstance(obj, torch.Tensor):
            return self._subclass(obj)
        if (
            self._same_main
            and isinstance(obj, (types.FunctionType, type))
            and obj.__module__ in MAIN_MODULES
            and _found_in_main(obj)
        ):
            if not may_be_missing(obj.__qualname__):
                return obj.__qualname__  # by name
            if not self.is_value:
                return of_main, self._name_and_value(obj)
        return super().reducer_override(obj)

    def _name_and_value(self, obj: Any) -> tuple[str, bytes, str]:
        """The arguments of `of_main`: a name, and a pickle or why there is none."""
        beside, tensors, file = self._beside, self._tensors, io.BytesIO()
        counts = len(tensors), len(beside.traced)
        pickler = _Pickler(file, tensors, self._serializer, beside)
        pickler.is_value = True
        try:
            pickler.dump(obj)
        except Exception as error:  # noqa: BLE001 user code; the other one may not need it
            del tensors[counts[0] :]
            for number in range(counts[1], len(beside.traced)):
                del beside.traced[number]
            return obj.__qualname__, b"", f"{type(error).__name__}: {error}"
        return obj.__qualname__, file.getvalue(), ""

    def _tensor(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        recipe = tensor_kinds.take_apart(tensor, self._beside.devices)
        if recipe is not None:
            return tensor_kinds.put_together, recipe
        return self._beside_pickle(tensor)

    def _beside_pickle(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        self._tensors.append(tensor)
        return tensor_at, (len(self._tensors) - 1,)

    def _subclass(self, obj: torch.Tensor) -> Any:
        kind = type(obj)
        if isinstance(obj, torch.nn.Parameter) and kind is torch.nn.Parameter:
            grad = obj.requires_grad
            inner = obj.detach().as_subclass(torch.Tensor).requires_grad_(grad)
            return _parameter, (inner, grad, vars(obj))
        if _is_memory_with_methods(kind):
            grad = obj.requires_grad
            inner = obj.detach().as_subclass(torch.Tensor).requires_grad_(grad)
            return _as_subclass, (kind, inner, vars(obj))
        recipe = tensor_kinds.on_device(obj, self._beside.devices)
        if recipe is not None:
            return tensor_kinds.put_together, recipe
        return (
            NotImplemented  # it has state of its own, which its __reduce_ex__ includes
        )


class _Unpickler(pickle.Unpickler):
    def __init__(
        self, file: io.BytesIO, tensors: list[torch.Tensor], beside: Beside
    ) -> None:
        super().__init__(file)
        self._tensors = tensors
        self._beside = beside

    def find_class(self, module: str, name: str) -> Any:
        if module == __name__:
            if name == "tensor_at":
                return self._tensors.__getitem__
            if name == "of_main":
                return self._of_main
            if name == "restored" and self._beside.restore is not None:
                return self._beside.restore
            if name == "traced":
                return self._beside.arrive
        if module in MAIN_MODULES:
            module = "__main__"
        return super().find_class(module, name)

    def _of_main(self, name: str, value: bytes, reason: str) -> Any:
        """What this main script has under a name; otherwise what the sender's has."""
        sent = None
        if (
            value
        ):  # also if it is not needed: references and tensors in it have to arrive
            sent = _Unpickler(io.BytesIO(value), self._tensors, self._beside).load()
        found = _in_main(name)
        if found is None and not value:
            raise LookupError(
                f"{name!r} is not defined by the main script here, and cannot be sent by value "
                f"({reason}): define it before init_rpc, on all workers"
            )
        return sent if found is None else found


def of_main(name: str, value: bytes, reason: str) -> Any:
    """Placeholder in a pickle for an object of the main script; only our unpickler resolves it."""
    raise pickle.UnpicklingError(
        f"{name!r} of the main script can only be sent in calls"
    )


def tensor_at(index: int) -> torch.Tensor:
    """Placeholder in a pickle for a tensor sent alongside; only our unpickler resolves it."""
    raise pickle.UnpicklingError(f"tensor {index} is not part of this pickle")


def restored(*numbers: int) -> Any:
    """Placeholder in a pickle for an object sent as numbers."""
    raise pickle.UnpicklingError("it can only be sent in calls")


def traced(number: int, tensor: torch.Tensor) -> torch.Tensor:
    """Wrapper in a pickle around a tensor that gets a history on arrival."""
    raise pickle.UnpicklingError("its history exists only in its context")


def without_history(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor, of the same type and with the same attributes, without grad."""
    bare = tensor.detach()
    if isinstance(tensor, torch.nn.Parameter):
        bare = torch.nn.Parameter(bare, requires_grad=False)
    if type(tensor) is not torch.Tensor:
        for name, value in vars(tensor).items():
            vars(bare).setdefault(name, value)  # what `detach` returned has its own
    return bare


def _found_in_main(obj: Any) -> bool:
    return _in_main(obj.__qualname__) is obj


def _in_main(name: str) -> Any:
    """What the main script has under a name, or None."""
    found: Any = sys.modules["__main__"]
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _is_memory_with_methods(kind: type[torch.Tensor]) -> bool:
    """Whether a subclass adds nothing to a tensor's memory that we could lose."""
    plain = torch.Tensor
    return (
        kind.__reduce_ex__ is plain.__reduce_ex__
        and kind.__reduce__ is plain.__reduce__
        and kind not in copyreg.dispatch_table
        and not hasattr(kind, "__tensor_flatten__")
        and "__torch_dispatch__" not in _attributes_below(kind, plain)
    )


def _attributes_below(kind: type, base: type) -> set[str]:
    classes = kind.__mro__[: kind.__mro__.index(base)]
    ours = (c for c in classes if c is not torch.nn.Parameter)
    return {name for c in ours for name in vars(c)}


def _parameter(
    inner: torch.Tensor, grad: bool, attributes: dict[str, Any]
) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(inner.detach(), grad)
    vars(parameter).update(attributes)
    return parameter


def _as_subclass(
    kind: type[torch.Tensor], inner: torch.Tensor, attributes: dict[str, Any]
) -> torch.Tensor:
    tensor = inner.detach().as_subclass(kind).requires_grad_(inner.requires_grad)
    vars(tensor).update(attributes)
    return tensor
