"""The names of torch's RPC, from the library that this process measures.

Programs import them from here, so that the same text runs on torch's own and on Gradwire.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

VARIABLE = "GRADWIRE_BENCH_LIBRARY"
"""The environment variable that selects: `torch` or `gradwire`."""

_package = "torch.distributed" if os.environ.get(VARIABLE) == "torch" else "gradwire"

rpc: Any = import_module(f"{_package}.rpc")
dist_autograd: Any = import_module(f"{_package}.autograd")
DistributedOptimizer: Any = import_module(f"{_package}.optim").DistributedOptimizer
