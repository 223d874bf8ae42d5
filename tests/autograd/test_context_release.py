"""Other workers hear that contexts are over: with requests, or by messages of their own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire._autograd import context_release
from gradwire._autograd.context_release import Releases
from gradwire._autograd.messages import Release
from gradwire.testing import World
from tests.autograd.functions import doubles
from tests.worlds import autograds, wait_until


class Office:
    """An executor whose clock is moved by hand, and what is told."""

    def __init__(self) -> None:
        self.told: list[tuple[int, tuple[int, ...]]] = []
        self._looks: list[Callable[[], None]] = []
        executor: Any = self
        self.releases = Releases(executor, self._send)

    def look_at(self, when: float, look: Callable[[], None]) -> None:
        self._looks.append(look)

    def submit(self, task: Callable[[], None]) -> None:
        task()

    def on_done(self, wake: Callable[[], None]) -> None:
        """Of the answers to what is told: never."""

    def _send(self, worker: int, release: Release) -> Any:
        self.told.append((worker, release.contexts))
        return self

    def tick(self) -> bool:
        """Whether anyone still looked."""
        looks, self._looks = self._looks, []
        assert len(looks) <= 1
        for look in looks:
            look()
        return bool(looks)


def test_what_no_request_takes_is_told_together() -> None:
    office = Office()
    for context in (5, 6):
        office.releases.add(1, context)
    office.releases.add(2, 5)
    while office.tick():
        pass
    assert sorted(office.told) == [(1, (5, 6)), (2, (5,))]


def test_what_an_answered_request_told_is_not_told_again() -> None:
    office = Office()
    office.releases.add(1, 5)
    assert office.releases.take(2) is None
    word = office.releases.take(1) or pytest.fail("nothing to tell")
    assert word.context == 5
    assert office.releases.take(1) is None
    word.delivered()
    while office.tick():
        pass
    assert office.told == []


@pytest.mark.parametrize("ticks", [0, 1])
def test_what_a_lost_request_told_is_told_again(ticks: int) -> None:
    office = Office()
    office.releases.add(1, 5)
    for _ in range(ticks):
        office.tick()
    word = office.releases.take(1) or pytest.fail("nothing to tell")
    word.in_doubt()
    while office.tick():
        pass
    assert office.told == [(1, (5,))]


def test_what_is_told_late_is_not_kept() -> None:
    office = Office()
    for context in range(100):
        office.releases.add(1, context)
        office.tick()
    assert len(office.told) > 90
    assert sum(map(len, office.releases._free.values())) <= 2


def fail() -> None:
    raise ValueError("as asked")


def test_the_next_request_of_a_context_tells_of_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(context_release, "_GATHER", 3600.0)
    with World(2) as world, world.as_worker(0):
        x = doubles(3)
        for _ in range(3):
            with gw.context():
                gw.rpc_sync("worker1", torch.exp, args=(x,))
        with gw.context():
            gw.rpc_sync("worker1", max, args=(1, 2))
            wait_until(lambda: len(world[1].autograd.contexts) == 1)


@pytest.mark.parametrize("is_general", [False, True])
def test_a_request_that_fails_there_leaves_no_context(is_general: bool) -> None:
    with autograds(2) as world, world.world.as_worker(0):
        for _ in range(3):
            with gw.context(), pytest.raises(ValueError, match="as asked"):
                gw.rpc_sync("worker1", fail, kwargs={})
            with gw.context(), pytest.raises(TypeError):
                gw.rpc_sync("worker1", fail, args=(object,) if is_general else (1,))
        wait_until(lambda: world.contexts() == 0)
