"""Programs written for `torch.distributed.rpc` and its kin, run unmodified.

`install()` puts Gradwire behind the names of torch, in this process and in those it starts. All of
torch's quirks are in this folder; the layers below know nothing of them.
"""

from .installing import install

__all__ = ["install"]
