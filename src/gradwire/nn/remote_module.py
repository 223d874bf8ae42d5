"""A module on another worker, used like a local one.

The handle is an `nn.Module` without parameters of its own, so it can be a child of an ordinary
module: calls, `train`, `apply`, `to`, `state_dict` and `load_state_dict` of the parent reach the
module on its worker. Methods that would have to return the parameters themselves raise an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any, NoReturn

from torch import Tensor, nn

from .._rpc.futures import CallFuture
from .._rref.reference import RRef
from ..api import current_worker, remote, rpc_async, rpc_sync
from ..tracebacks import hidden_frames
from ..uncompiled import uncompiled
from .device import parse_device
from .spread_model import PartState, Standin, parameters_behind


class RemoteModule(Standin):
    """The module `module_cls(*args, **kwargs)` on a worker, used like a local one.

    `remote_device` names the worker, and optionally a device there: `"worker1"`,
    `"worker1/cuda:0"`, `"rank:1/cpu"`. An error in the constructor is raised at the first use.
    Inputs are moved to the module's device; outputs on a device other than the CPU arrive on the
    CPU, or according to the device map for its worker. It can be passed to other workers: all use
    the same module. With an `interface` (a class marked `torch.jit.interface`) it can be scripted,
    and scripts can call it; this needs `script.enable()`.

    Raises:
        ValueError, RuntimeError: `remote_device` is invalid, or there is no such worker.

    >>> layer = gw.RemoteModule("worker1", torch.nn.Linear, args=(2, 3))
    >>> layer(torch.ones(4, 2)).shape
    torch.Size([4, 3])
    """

    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., nn.Module],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        interface: Any = None,
    ) -> None:
        super().__init__()
        on, device = parse_device(remote_device)
        given = (module_cls, tuple(args or ()), dict(kwargs or {}), device)
        if interface is None:
            self._stand_for(remote(on, _create, args=given), on, device)
        else:
            made = rpc_sync(on, _create_scripted, args=(interface, *given))
            self._stand_for(made, on, device)
            self._let_scripts_call(interface)

    def _let_scripts_call(self, interface: Any) -> None:
        """Make `torch.jit.script` treat it as a module with this TorchScript interface."""
        from .._script import remote_modules

        for method in remote_modules.methods(interface, self._frontend()):
            setattr(self, method.__name__, MethodType(method, self))
        known = {"module_rref": remote_modules.annotated(interface), "device": str}
        self.__annotations__ = known

    @staticmethod
    def _frontend() -> Any:
        """Whose functions it makes its calls by, in scripts."""
        from .._script.own import OWN

        return OWN

    @classmethod
    def from_module_rref(
        cls, module_rref: RRef[nn.Module], device: str = "cpu"
    ) -> RemoteModule:
        """Wrap an existing module; `device` is the one it is on."""
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made._stand_for(module_rref, module_rref.owner_name(), device)
        return made

    @classmethod
    def init_from_module_rref(
        cls, remote_device: str, module_rref: RRef[nn.Module]
    ) -> RemoteModule:
        """`from_module_rref` by torch's name; only the device of `remote_device` is used."""
        made = cls.from_module_rref(module_rref)
        made.on, made.device = parse_device(remote_device)
        return made

    def _stand_for(
        self, module_rref: RRef[nn.Module], on: str | int, device: str
    ) -> None:
        self.module_rref = module_rref
        self.on = on
        self.device = device

    def __reduce__(self) -> tuple[Any, ...]:
        """Other workers also get a handle. Outside of calls, the reference raises."""
        return _receive, (
            type(self),
            self.module_rref,
            self.on,
            self.device,
            self.training,
        )

    # What it does

    @uncompiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module and wait for its result."""
        with hidden_frames:
            if self.device == "cpu":
                return self.module_rref.rpc_sync()(*args, **kwargs)
            return self._there(_forward, self.device, args, kwargs, self._is_mapped())

    @uncompiled
    def forward_async(self, *args: Any, **kwargs: Any) -> CallFuture:
        """Run the module, and return a future of the result."""
        if self.device == "cpu":
            future: CallFuture = self.module_rref.rpc_async()(*args, **kwargs)
            return future
        return rpc_async(
            self.module_rref.owner(),
            _forward,
            args=(self.module_rref, self.device, args, kwargs, self._is_mapped()),
        )

    def _is_mapped(self) -> bool:
        """Whether this worker has a device map for the module's: outputs follow its inverse."""
        return self.module_rref.owner_name() in current_worker().card.device_maps

    def get_module_rref(self) -> RRef[nn.Module]:
        """A reference to the module."""
        return self.module_rref

    def remote_parameters(self, recurse: bool = True) -> list[RRef[nn.Parameter]]:
        """References to the module's parameters, for a `DistributedOptimizer`."""
        return [rref for _, rref in self._there(parameters_behind, "", recurse)]

    def train(self, mode: bool = True) -> RemoteModule:
        super().train(mode)
        self._there(_call, "train", (mode,))
        return self

    def requires_grad_(self, requires_grad: bool = True) -> RemoteModule:
        self._there(_call, "requires_grad_", (requires_grad,))
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._there(_call, "zero_grad", (set_to_none,))

    def apply(self, fn: Callable[[nn.Module], object]) -> RemoteModule:
        """Apply a function to the module and all its children, on their worker."""
        self._there(_call, "apply", (fn,))
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """What `to`, `cuda`, `double` and similar methods of a module or its parent call."""
        self.device = self._there(_convert, fn, recurse) or self.device
        return self

    def state_dict(  # type: ignore[override] # torch's takes old positional forms as well
        self,
        *,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
    ) -> dict[str, Any]:
        """A copy of the module's state dict; the state dict of a parent contains it."""
        if destination is None:
            destination = {}
        if isinstance(destination, PartState):
            return destination
        if keep_vars:
            _unsupported("state_dict(keep_vars=True)", "remote_parameters")
        for name, value in self._there(_state).items():
            destination[prefix + name] = value
        return destination

    def _load_from_state_dict(  # noqa: PLR0913 torch's signature
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """The module's part of `load_state_dict`, its own or that of a parent."""
        given = {
            name[len(prefix) :]: value
            for name, value in state_dict.items()
            if name.startswith(prefix)
        }
        if not given and not strict:
            return
        assign = local_metadata.get("assign_to_params_buffers", False)
        missing, unexpected, errors = self._there(_load, given, assign)
        missing_keys += [prefix + name for name in missing]
        unexpected_keys += [prefix + name for name in unexpected] if strict else []
        error_msgs += errors

    def extra_repr(self) -> str:
        return f"on {self.module_rref.owner_name()!r}, device {self.device}"

    def _there(self, func: Callable[..., Any], *args: Any) -> Any:
        """Call a function with the module, on its owner."""
        rref = self.module_rref
        return rpc_sync(rref.owner(), func, args=(rref, *args))

    # What cannot be done from here

    def parameters(self, recurse: bool = True) -> NoReturn:
        raise ValueError(
            "Method ``parameters`` not supported for RemoteModule. Please use "
            "``remote_parameters`` instead."
        )

    def named_parameters(self, *args: Any, **kwargs: Any) -> NoReturn:
        _unsupported("named_parameters", "gradwire.nn.named_remote_parameters(module)")

    def buffers(self, recurse: bool = True) -> NoReturn:
        _unsupported("buffers", "state_dict() for copies of them")

    def named_buffers(self, *args: Any, **kwargs: Any) -> NoReturn:
        _unsupported("named_buffers", "state_dict() for copies of them")

    def register_parameter(self, name: str, param: nn.Parameter | None) -> NoReturn:
        _unsupported("register_parameter", _ON_ITS_WORKER)

    def register_buffer(self, *args: Any, **kwargs: Any) -> NoReturn:
        _unsupported("register_buffer", _ON_ITS_WORKER)

    def add_module(self, name: str, module: nn.Module | None) -> NoReturn:
        _unsupported("add_module", _ON_ITS_WORKER)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        _unsupported(
            "__deepcopy__", "a new RemoteModule, and its load_state_dict(state_dict())"
        )


_ON_ITS_WORKER = (
    "apply(fn), whose fn gets the module on its worker, or an ordinary module "
    "around this one"
)


def _unsupported(method: str, remedy: str) -> NoReturn:
    raise ValueError(
        f"Method ``{method}`` not supported for RemoteModule: the module is on "
        f"another worker. Use {remedy}"
    )


# What runs on the owner


def _create(
    module_cls: Callable[..., nn.Module],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: str,
) -> nn.Module:
    module = module_cls(*args, **kwargs)
    if not isinstance(module, nn.Module):
        raise ValueError(
            "Expect `module_cls(*args, **kwargs)` returns an instance of <class nn.Module>, "
            f"but it returns an instance of {type(module)}."
        )
    return module.to(device)


def _create_scripted(interface: Any, *given: Any) -> RRef[nn.Module]:
    from .._script import compiler, remote_modules

    remote_modules.remote_forward(interface)  # which the callers name
    return RRef(compiler.script(_create(*given)), interface)


def _receive(
    cls: type[RemoteModule],
    module_rref: RRef[nn.Module],
    on: str | int,
    device: str,
    training: bool,
) -> RemoteModule:
    made = cls.from_module_rref(module_rref, device)
    made.on = on
    made.training = training
    return made


def _call(module: RRef[nn.Module], method: str, args: tuple[Any, ...]) -> None:
    """Call a method whose result, the module itself, stays here."""
    getattr(module.local_value(), method)(*args)


def _convert(
    module: RRef[nn.Module], fn: Callable[[Tensor], Tensor], recurse: bool
) -> str | None:
    """Convert all tensors; the device they are on now."""
    there = module.local_value()._apply(fn, recurse)
    first = next(there.parameters(), None)
    return None if first is None else str(first.device)


def _forward(
    module: RRef[nn.Module],
    device: str,
    args: Any,
    kwargs: dict[str, Any],
    is_mapped: bool,
) -> Any:
    args, kwargs = _moved((args, kwargs), device)
    value = module.local_value()(*args, **kwargs)
    return value if is_mapped else _moved(value, "cpu")


def _moved(value: Any, device: str) -> Any:
    """The same with all its tensors on a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _moved(item, device) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_moved(item, device) for item in value)
    return value


def _state(module: RRef[nn.Module]) -> dict[str, Any]:
    return dict(module.local_value().state_dict())


def _load(
    module: RRef[nn.Module], state: dict[str, Any], assign: bool
) -> tuple[list[str], list[str], list[str]]:
    """Load a state dict; missing keys, unexpected keys and errors."""
    try:
        keys = module.local_value().load_state_dict(state, strict=False, assign=assign)
    except RuntimeError as error:
        return [], [], [str(error)]
    return keys.missing_keys, keys.unexpected_keys, []
