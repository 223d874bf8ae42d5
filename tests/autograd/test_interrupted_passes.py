"""Calls in signal handlers and finalizers, in the middle of what autograd does."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire.api import enter
from gradwire.worker import Worker
from tests.interruption import Calling, Interruption, collecting, ticking
from tests.worlds import SOON, socket_world, wait_until_no_contexts

SECONDS = 2.0  # for which passes are interrupted

weight = torch.tensor([2.0, 3.0], requires_grad=True)


def call_with_gradients(worker: Worker, function: Any) -> Any:
    """In the context that the interrupted thread is in."""
    x = torch.ones(2, requires_grad=True)
    return worker.rpc_sync("worker1", function, (x,), timeout=SOON).detach()


def differentiate(worker: Worker, function: Any) -> Any:
    """A whole pass of its own context."""
    if worker.autograd.contexts.current() is not None:
        return -torch.ones(2)  # contexts do not nest
    x = torch.ones(2, requires_grad=True)
    with worker.autograd.context() as ctx:
        y = worker.rpc_sync("worker1", function, (x,), timeout=SOON)
        worker.autograd.backward(ctx, [y.sum()], timeout=SOON)
        return worker.autograd.get_gradients(ctx)[x]


@pytest.fixture
def workers() -> Iterator[list[Worker]]:
    with socket_world(2) as world:
        before = enter(world[0])
        try:
            yield world
            wait_until_no_contexts(world)
        finally:
            enter(before)


def signals(interruption: Interruption) -> AbstractContextManager[None]:
    return ticking(interruption)


def finalizers(_: Interruption) -> AbstractContextManager[None]:
    return collecting()


@pytest.mark.filterwarnings("ignore::gradwire.LostGradientWarning")
@pytest.mark.parametrize("interrupting", [call_with_gradients, differentiate])
@pytest.mark.parametrize("how", [signals, finalizers])
def test_a_call_may_interrupt_a_forward_and_a_backward(
    workers: list[Worker],
    how: Callable[[Interruption], AbstractContextManager[None]],
    interrupting: Callable[[Worker, Any], Any],
) -> None:
    interruption = Interruption(workers[0], interrupting)
    end = time.monotonic() + SECONDS
    with how(interruption):
        while time.monotonic() < end or not interruption.results:
            with gw.context() as ctx:
                if how is finalizers:
                    Calling(interruption)
                y = gw.rpc_sync("worker1", torch.mul, (weight, weight), timeout=SOON)
                gw.backward(ctx, [y.sum()], timeout=SOON)
                gradient = gw.get_gradients(ctx)[weight]
            assert torch.equal(gradient, 2 * weight.detach())
    interruption.check()


def test_where_it_would_wait_for_its_own_thread_a_call_raises(
    workers: list[Worker],
) -> None:
    with gw.context() as ctx:
        context = workers[0].autograd.contexts.get(ctx)
        with context.lock, pytest.raises(gw.GradwireError, match="signal handler"):
            call_with_gradients(workers[0], torch.neg)
        assert torch.equal(call_with_gradients(workers[0], torch.neg), -torch.ones(2))


def test_what_ends_a_pass_raises_where_its_own_thread_has_the_pass(
    workers: list[Worker],
) -> None:
    """Say a call in a signal handler, which is told that a worker is lost."""
    ends: list[str] = []

    def interrupted(_: torch.Tensor) -> None:
        (part,) = workers[0].autograd.contexts.get(ctx).parts.values()
        lock: Any = part.lock  # type: ignore[attr-defined]
        with lock, pytest.raises(gw.GradwireError, match="signal handler"):
            part.worker_gone(1, "worker1")
        ends.append("refused")

    with gw.context() as ctx:
        y = gw.rpc_sync("worker1", torch.mul, (weight, weight))
        y.register_hook(interrupted)
        gw.backward(ctx, [y.sum()])
    assert ends
