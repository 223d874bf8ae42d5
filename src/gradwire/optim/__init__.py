"""Optimizers of parameters on any workers: the class of `torch.distributed.optim`, and more."""

from .optimizer import DistributedOptimizer
from .scaler import GradScaler

__all__ = ["DistributedOptimizer", "GradScaler"]
