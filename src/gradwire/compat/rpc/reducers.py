"""Futures cannot be sent: programs for torch's RPC expect the error that it has for them."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from ... import api as gradwire_api
from ..._rpc.futures import CallFuture, Future


def register() -> None:
    """Have the workers of this process refuse them."""
    for kind in (torch.futures.Future, Future, CallFuture):
        gradwire_api.register_reducer(kind, _refuse)


def _refuse(future: Any) -> NoReturn:
    raise RuntimeError("Can not pickle torch.futures.Future")
