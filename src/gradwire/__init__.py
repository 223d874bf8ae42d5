"""Distributed autograd for PyTorch: call functions on other workers, with tensors.

>>> import gradwire as gw
>>> with gw.init_rpc("worker0", rank=0, world_size=2):        # doctest: +SKIP
...     gw.rpc_sync("worker1", torch.add, args=(torch.ones(2), 1))

The names are imported on first use, all together, so that `gradwire --help` need not import torch.
"""

import importlib as _importlib
import typing as _typing

if _typing.TYPE_CHECKING:
    from . import autograd, checkpoint, nn, optim, rpc, script
    from ._rpc.serial import serial
    from ._rref.reference import RRef
    from .api import (
        all_gather,
        backward,
        barrier,
        context,
        get_gradients,
        get_worker_info,
        get_worker_infos,
        grad,
        init_rpc,
        on_join,
        on_leave,
        register_reducer,
        remote,
        rpc_async,
        rpc_sync,
        shutdown,
    )
    from .checkpoint import load, save
    from .errors import (
        AuthenticationError,
        BackwardTimeout,
        CallTimeout,
        ClosedError,
        GradwireError,
        LostGradientWarning,
        NotAllowedError,
        OwnersError,
        ProtocolError,
        RemoteError,
        StaleReferenceError,
        WorkerLostError,
    )
    from .ids import WorkerInfo
    from .local import local_world
    from .nn import RemoteModule
    from .optim import DistributedOptimizer, GradScaler
    from .options import Options
    from .retries import idempotent
    from .serving import stop_serving
    from .training_loop import resumable
    from .worker import Worker

__version__ = "0.2.0"

__all__ = [
    "AuthenticationError",
    "BackwardTimeout",
    "CallTimeout",
    "ClosedError",
    "DistributedOptimizer",
    "GradScaler",
    "GradwireError",
    "LostGradientWarning",
    "NotAllowedError",
    "Options",
    "OwnersError",
    "ProtocolError",
    "RRef",
    "RemoteError",
    "RemoteModule",
    "StaleReferenceError",
    "Worker",
    "WorkerInfo",
    "WorkerLostError",
    "__version__",
    "all_gather",
    "autograd",
    "backward",
    "barrier",
    "checkpoint",
    "context",
    "get_gradients",
    "get_worker_info",
    "get_worker_infos",
    "grad",
    "idempotent",
    "init_rpc",
    "load",
    "local_world",
    "nn",
    "on_join",
    "on_leave",
    "optim",
    "register_reducer",
    "remote",
    "resumable",
    "rpc",
    "rpc_async",
    "rpc_sync",
    "save",
    "script",
    "serial",
    "shutdown",
    "stop_serving",
]

_ORIGINS = (
    "_rpc.serial _rref.reference api checkpoint errors ids local nn optim".split()
)
_ORIGINS += ["options", "retries", "serving", "training_loop", "worker"]


def __getattr__(name: str) -> object:
    """A public name, with all others; or a module of ours."""
    is_module = (
        name not in __all__ or name in "autograd checkpoint nn optim rpc script".split()
    )
    if not is_module:
        for origin in _ORIGINS:
            module = _importlib.import_module(f"{__name__}.{origin}")
            found = vars(module).keys() & set(__all__) - globals().keys()
            globals().update({key: getattr(module, key) for key in found})
        return globals()[name]
    if not name.startswith("_"):
        try:
            return _importlib.import_module(f"{__name__}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{__name__}.{name}":
                raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(globals().keys() | set(__all__))
