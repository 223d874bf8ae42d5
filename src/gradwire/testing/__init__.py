"""For tests, ours and yours: a whole world inside one process."""

from .world import World

__all__ = ["World"]
