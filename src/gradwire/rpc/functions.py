"""Decorators for functions that other workers call: those of `torch.distributed.rpc.functions`."""

from .._rpc.function_runner import async_execution

__all__ = ["async_execution"]
