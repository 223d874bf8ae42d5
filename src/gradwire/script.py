"""Calls, references and backward passes made by TorchScript.

After `enable()`, functions and modules that are scripted can call `rpc_sync`, `rpc_async` and
`remote` on scripted functions, take, hold and return `RRef[T]`, and call `backward` and
`get_gradients`.
"""

from __future__ import annotations

import torch

from ._rpc import caller as _caller

__all__ = ["disable", "enable"]


def enable() -> None:
    """Let functions that are scripted from now on make calls. Idempotent.

    This installs hooks into torch's compiler. Under `gradwire run`, it is already enabled.

    Raises:
        RuntimeError: this torch has no TorchScript.

    >>> gw.script.enable()
    >>> gw.script.disable()
    """
    try:
        from ._script import arguments, hooks
        from ._script.own import OWN
    except (ImportError, AttributeError) as error:
        raise RuntimeError(
            f"this torch, {torch.__version__}, has no TorchScript that can make calls "
            f"({error}): call rpc_sync and the others from Python"
        ) from error
    hooks.install(OWN)
    _caller.check_scripted = arguments.check_arguments


def disable() -> None:
    """Remove the hooks from torch's compiler. Existing scripts continue to work.

    >>> gw.script.enable()
    >>> gw.script.disable()
    """
    from ._script import hooks
    from ._script.own import OWN

    hooks.uninstall(OWN)
    _caller.check_scripted = None
