"""Worlds in which messages about references overtake each other, get lost, or come twice."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import gradwire as gw
from gradwire.testing import World
from tests.rref.values import kept
from tests.worlds import PostedWorld, tables, wait_until_no_references

WORLDS: dict[str, Callable[[int], World]] = {
    "fifo": World,
    "unordered": lambda size: World(size, seed=1),
    "lossy1": lambda size: PostedWorld(size, 1),
    "lossy2": lambda size: PostedWorld(size, 2),
}

_current: World


@contextmanager
def entered(world: World) -> Iterator[None]:
    """The test is worker 0; in the end nothing may be left of any reference."""
    global _current
    with world, world.as_worker(0):
        _current = world
        kept.clear()
        yield
        kept.clear()
        wait_until_no_references(world)


def holders(rref: gw.RRef[Any]) -> list[str]:
    """Who holds a value, as its owner knows it: on any worker of the world that was entered."""
    owned = tables(_current[rref.owner().id])["owned"]
    return [holder for value in owned for holder in value["holders"]]
