"""`torch.distributed.optim.optimizer`, with Gradwire behind it."""

from ..optim import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
