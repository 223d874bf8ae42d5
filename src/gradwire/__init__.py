"""Distributed autograd for PyTorch: call functions on other workers, with tensors.

>>> import gradwire as gw
>>> with gw.init_rpc("worker0", rank=0, world_size=2):        # doctest: +SKIP
...     gw.rpc_sync("worker1", torch.add, args=(torch.ones(2), 1))
"""

from . import autograd, checkpoint, nn, optim, rpc
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
    NotAllowedError,
    OwnersError,
    ProtocolError,
    RemoteError,
    StaleReferenceError,
    WorkerLostError,
)
from .ids import WorkerInfo
from .nn import RemoteModule
from .optim import DistributedOptimizer, GradScaler
from .options import Options
from .worker import Worker

__version__ = "0.1.0"

__all__ = [
    "AuthenticationError",
    "BackwardTimeout",
    "CallTimeout",
    "ClosedError",
    "DistributedOptimizer",
    "GradScaler",
    "GradwireError",
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
    "init_rpc",
    "load",
    "nn",
    "on_join",
    "on_leave",
    "optim",
    "register_reducer",
    "remote",
    "rpc",
    "rpc_async",
    "rpc_sync",
    "save",
    "shutdown",
]
