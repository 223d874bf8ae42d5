"""Worlds for what happens to references on their way."""

from collections.abc import Iterator

import pytest

from gradwire._rref import held_forks, notifier, serialization
from gradwire.testing import World
from tests.rref.lossy import WORLDS, entered
from tests.rref.values import ended
from tests.worlds import ORDERS, SEEDS, PostedWorld, three_workers


@pytest.fixture(autouse=True)
def nothing_has_ended_yet() -> None:
    """A test may look before its values are made, and others before it had the same names."""
    ended.clear()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Say again soon what was not answered."""
    monkeypatch.setattr(notifier, "_RETRY", 0.05)
    monkeypatch.setattr(notifier, "_LOOK", 0.02)
    monkeypatch.setattr(serialization, "_RETRY", 0.05)
    monkeypatch.setattr(held_forks, "PATIENCE", 0.3)


@pytest.fixture(params=SEEDS, ids=ORDERS)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Also with messages that overtake each other."""
    with three_workers(seed=request.param) as opened:
        yield opened


@pytest.fixture
def plain() -> Iterator[World]:
    """One world is enough for what does not depend on the order of messages."""
    with three_workers() as opened:
        yield opened


@pytest.fixture(params=WORLDS)
def lossy_world(request: pytest.FixtureRequest) -> Iterator[World]:
    opened = WORLDS[request.param](3)
    with entered(opened):
        yield opened


@pytest.fixture
def posted() -> Iterator[PostedWorld]:
    """A world whose messages can be held back."""
    opened = PostedWorld(3)
    with entered(opened):
        yield opened
        opened.post.release()
