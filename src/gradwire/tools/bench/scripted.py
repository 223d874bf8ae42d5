"""A call that TorchScript makes. Both workers import this, which compiles it."""

from __future__ import annotations

import torch

from .library import rpc

if rpc.__name__.startswith("gradwire"):
    from ... import script

    script.enable()


@torch.jit.script
def add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a + b


@torch.jit.script
def call_add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = rpc.rpc_sync("worker1", add, (a, b))
    return result
