"""Calls, references and backward passes by torch's names, made by TorchScript."""

from __future__ import annotations

import logging
from typing import Any

from ..._script.frontends import Frontend
from .. import autograd, state
from . import api, profiling
from .internal import RPCExecMode
from .references import RRef

logger = logging.getLogger("gradwire.compat")


def _agent() -> Any:
    if state.agent is None:
        raise api._not_initialized()
    return state.agent


def _rpc_sync(to: Any, target: Any, args: Any, kwargs: Any, timeout: float) -> Any:
    if profiling.is_on():
        return _rpc_async(to, target, args, kwargs, timeout).wait()
    return _agent().call_sync(to, target, args, kwargs, timeout)


def _rpc_async(to: Any, target: Any, args: Any, kwargs: Any, timeout: float) -> Any:
    agent = _agent()
    if profiling.is_on():
        what = to, target, args, kwargs
        return profiling.call(agent, RPCExecMode.ASYNC_JIT, what, timeout)
    return agent.call_async(to, target, args, kwargs, timeout)


def _remote(to: Any, target: Any, args: Any, kwargs: Any, timeout: float) -> Any:
    return _agent().remote(to, target, args, kwargs, timeout)


TORCH = Frontend(
    name="torch",
    functions={
        "rpc_sync": api.rpc_sync,
        "rpc_async": api.rpc_async,
        "remote": api.remote,
    },
    make={"rpc_sync": _rpc_sync, "rpc_async": _rpc_async, "remote": _remote},
    reference=RRef,
    operators={
        "gradwire::dist_backward": autograd.backward,
        "gradwire::get_gradients": autograd.get_gradients,
    },
)


def install() -> None:
    """Have scripts make calls by torch's names, where this torch has TorchScript."""
    try:
        from ..._script import hooks
    except (ImportError, AttributeError) as error:
        logger.info("scripts cannot make calls with this torch: %s", error)
    else:
        hooks.install(TORCH)
