"""`torch.distributed.nn.api.remote_module`, with Gradwire behind it.

Gradwire's own `RemoteModule` can do more; here it refuses what torch's does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from .._rref.reference import RRef
from ..api import register_reducer
from ..nn import RemoteModule as _Base
from ..nn.device import parse_device
from .rpc.scripting import TORCH

__all__ = ["RemoteModule"]

_REMOTE_MODULE_PICKLED_ATTRIBUTES = (
    "on",
    "device",
    "is_device_map_set",
    "is_scriptable",
    "generated_methods",
    "module_rref",
)
_REFUSED = """
    add_module apply bfloat16 buffers children cpu cuda double extra_repr float half ipu
    load_state_dict modules named_buffers named_children named_modules named_parameters
    register_backward_hook register_buffer register_forward_hook register_forward_pre_hook
    register_parameter requires_grad_ share_memory state_dict to type xpu zero_grad
""".split()


class _RemoteModule(_Base):
    """A module on another worker."""

    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., nn.Module],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        _module_interface_cls: Any = None,
    ) -> None:
        super().__init__(
            remote_device, module_cls, args, kwargs, interface=_module_interface_cls
        )

    @staticmethod
    def init_from_module_rref(
        remote_device: str,
        module_rref: RRef[nn.Module],
        _module_interface_cls: Any = None,
    ) -> Any:
        """Stand for a module that there is already."""
        made: Any = RemoteModule.from_module_rref(module_rref)
        made.on, made.device = parse_device(remote_device)
        if _module_interface_cls is not None:
            made._let_scripts_call(_module_interface_cls)
        return made

    def _let_scripts_call(self, interface: Any) -> None:
        super()._let_scripts_call(interface)
        self.is_scriptable = True

    @staticmethod
    def _frontend() -> Any:
        return TORCH

    def _stand_for(
        self, module_rref: RRef[nn.Module], on: str | int, device: str
    ) -> None:
        super()._stand_for(module_rref, on, device)
        self.is_device_map_set = self._is_mapped()
        self.is_scriptable = False
        self.generated_methods = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)  # it may have no hooks: it was passed on

    def train(self, mode: bool = True) -> _RemoteModule:
        self.module_rref.rpc_sync().train(mode)
        self.training = mode
        return self

    def eval(self) -> _RemoteModule:
        return self.train(False)

    def __reduce__(self) -> NoReturn:
        raise RuntimeError(
            "Cannot pickle RemoteModule in python pickler. RemoteModule can only be pickled "
            "when using RPC"
        )

    @torch.jit.export
    def __getstate__(self) -> None:
        raise RuntimeError(
            "Cannot pickle RemoteModule in python pickler. "
            "RemoteModule can only be pickled when using RPC"
        )

    @torch.jit.export
    def __setstate__(self, state: None) -> None:
        raise RuntimeError(
            "Cannot unpickle RemoteModule in python pickler. "
            "RemoteModule can only be unpickled when using RPC"
        )

    __repr__ = object.__repr__


def _refused(name: str) -> Callable[..., NoReturn]:
    def method(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise ValueError(f"Method ``{name}`` not supported for RemoteModule")

    return method


for _name in _REFUSED:
    setattr(_RemoteModule, _name, _refused(_name))


class RemoteModule(_RemoteModule):
    """A module on another worker: `RemoteModule("worker1/cpu", nn.Linear, args=(2, 3))`."""

    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., nn.Module],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(remote_device, module_cls, args, kwargs)


def _reduce(module: _RemoteModule) -> tuple[Any, ...]:
    names = _REMOTE_MODULE_PICKLED_ATTRIBUTES
    return _receive, (type(module), *(getattr(module, name) for name in names))


def _receive(cls: type[_RemoteModule], *values: Any) -> _RemoteModule:
    """What arrives on other workers is a handle with nothing of a module, as in torch."""
    made: _RemoteModule = object.__new__(cls)
    vars(made).update(zip(_REMOTE_MODULE_PICKLED_ATTRIBUTES, values, strict=True))
    vars(made).update(forward_async=made.forward_async, forward=made.forward)
    return made


for _kind in (_RemoteModule, RemoteModule):
    register_reducer(_kind, _reduce)
