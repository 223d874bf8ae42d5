"""Checkpoints of models on several workers, in the format of `torch.distributed.checkpoint`."""

from .api import load, save

__all__ = ["load", "save"]
