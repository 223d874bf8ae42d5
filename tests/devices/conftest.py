from collections.abc import Iterator

import pytest

from gradwire.testing import World
from tests.devices.pretended import pretended_devices


@pytest.fixture(autouse=True, scope="package")
def devices() -> Iterator[None]:
    with pretended_devices():
        yield


@pytest.fixture
def world() -> Iterator[World]:
    with World(2) as made, made.as_worker(0):
        yield made
