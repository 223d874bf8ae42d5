"""The world that most tests of calls use."""

from collections.abc import Iterator

import pytest

from gradwire.testing import World
from tests.worlds import ORDERS, SEEDS


@pytest.fixture(params=SEEDS, ids=ORDERS)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Also with messages that overtake each other."""
    with World(3, seed=request.param) as world:
        yield world
