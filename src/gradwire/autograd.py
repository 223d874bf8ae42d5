"""Distributed autograd: the names and signatures of `torch.distributed.autograd`, and more."""

from .api import backward, context, get_gradients, grad

__all__ = ["backward", "context", "get_gradients", "grad"]
