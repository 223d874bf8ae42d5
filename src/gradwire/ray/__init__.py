"""Worlds on a Ray cluster, which places, supervises and restarts their workers."""

from importlib.util import find_spec as _find_spec
from typing import TYPE_CHECKING as _TYPE_CHECKING

if _find_spec("ray") is None:
    raise ModuleNotFoundError(
        "gradwire.ray needs Ray: pip install 'gradwire[ray]'", name="ray"
    )

from .joining import end, join
from .world import World

if _TYPE_CHECKING:
    from .train import GradwireConfig as GradwireConfig

# Without `GradwireConfig`, which needs Ray Train.
__all__ = ["World", "end", "join"]


def __getattr__(name: str) -> object:
    if name == "GradwireConfig":
        from .train import GradwireConfig

        return GradwireConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
