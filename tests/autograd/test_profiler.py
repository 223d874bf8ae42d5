"""Profilers on the caller show passes, sends and recvs, whichever thread got the answers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import gradwire as gw
from gradwire.testing import World
from tests.autograd.functions import Raises, doubles
from tests.worlds import sockets_as_first

PREFIX = "torch::distributed::autograd::"

Profile = Callable[[Callable[[], object]], list[Any]]


def by_autograd_profiler(run: Callable[[], object]) -> list[Any]:
    with torch.autograd.profiler.profile() as profile:
        run()
    return list(profile.function_events)


def by_profiler(run: Callable[[], object]) -> list[Any]:
    with torch.profiler.profile(acc_events=True) as profile:
        run()
    return list(profile.events())


@pytest.fixture(params=[by_autograd_profiler, by_profiler])
def profile(request: pytest.FixtureRequest) -> Profile:
    """The events of what is run."""
    found: Profile = request.param
    return found


@contextmanager
def loopback(seed: int | None) -> Iterator[None]:
    with World(3, seed=seed) as world, world.as_worker(0):
        yield


sockets = partial(sockets_as_first, 3)


WORLDS: dict[str, Callable[[], Any]] = {
    "loopback": lambda: loopback(None),
    "overtaking": lambda: loopback(1),
    "sockets": sockets,
}


@pytest.fixture(params=WORLDS, autouse=True)
def world(request: pytest.FixtureRequest) -> Iterator[None]:
    with WORLDS[request.param]():
        yield


def double(x: Tensor) -> Tensor:
    return torch.sin(x) * 2


def raises(x: Tensor) -> Tensor:
    result: Tensor = Raises.apply(x)
    return result


def named(events: list[Any], name: str) -> list[Any]:
    return [event for event in events if event.name == PREFIX + name]


def see_times(events: list[Any]) -> None:
    (whole,) = named(events, "backward")
    assert whole.count == 1
    for name in ("SendRpcBackward", "RecvRpcBackward"):
        parts = named(events, name)
        assert all(part.count == 1 for part in parts)
        for part in parts:
            assert 0 < part.cpu_time_total < whole.cpu_time_total
            assert whole.time_range.start <= part.time_range.start
            assert part.time_range.end <= whole.time_range.end


def test_a_call_and_its_return(profile: Profile) -> None:
    with gw.context() as ctx:
        loss = gw.rpc_sync("worker1", torch.add, (doubles(3), doubles(3))).sum()
        events = profile(lambda: gw.backward(ctx, [loss]))
    see_times(events)
    assert len(named(events, "SendRpcBackward")) == 1
    assert len(named(events, "RecvRpcBackward")) == 1


def test_a_chain_of_calls(profile: Profile) -> None:
    with gw.context() as ctx:
        x = doubles(3)
        y = x
        for number in (1, 2, 1):
            y = gw.rpc_sync(f"worker{number}", double, (y * 2,))
        events = profile(lambda: gw.backward(ctx, [y.sum()]))
        assert gw.get_gradients(ctx).keys() == {x}
    see_times(events)
    assert len(named(events, "SendRpcBackward")) == 3
    assert len(named(events, "RecvRpcBackward")) == 3


def test_a_send_that_waits_shows_for_how_long(profile: Profile) -> None:
    with gw.context() as ctx:
        h = doubles(3) * 2
        y = gw.rpc_sync("worker1", double, (h,))
        events = profile(lambda: gw.backward(ctx, [(y * h).sum()]))
    see_times(events)
    assert len(named(events, "SendRpcBackward")) == 1
    assert len(named(events, "RecvRpcBackward")) == 1


@pytest.mark.parametrize("at", [0, 2])
def test_a_pass_that_fails_ends_while_it_is_profiled(profile: Profile, at: int) -> None:
    def run() -> None:
        with pytest.raises(gw.GradwireError, match=f"Error on Node {at}"):
            gw.backward(ctx, [y.sum()])

    with gw.context() as ctx:
        y = gw.rpc_sync(f"worker{at}", raises, (doubles(3) * 2,))
        y = gw.rpc_sync("worker1", double, (y * 2,))
        events = profile(run)
    see_times(events)


def test_a_pass_within_one_worker_is_shown(profile: Profile) -> None:
    with gw.context() as ctx:
        loss = double(doubles(3)).sum()
        events = profile(lambda: gw.backward(ctx, [loss]))
    see_times(events)
