from collections.abc import Iterator

import pytest

from gradwire.testing import World
from tests.worlds import scripting_world


@pytest.fixture
def world() -> Iterator[World]:
    with scripting_world() as made:
        yield made
