"""Passes with a time limit: one that is stuck ends, on all workers, and leaves nothing."""

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire.errors import BackwardTimeout, GradwireError
from tests.autograd.functions import Gate, doubles, there_and_back
from tests.worlds import LIMIT, SOON, Autograds, autograds, wait_until

SHORT = 0.05
"""Seconds for a pass that would not end."""


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.open.set()


def by_two_calls(world: Autograds, context: int, x: Tensor, gate: Gate) -> Tensor:
    """Gradients of the first have to wait for those of the second, inside the engine."""
    h = x * 2
    (there,) = world.transfer(0, 1, context, [h])
    (value,) = world.transfer(1, 2, context, [there * 2])
    (value,) = world.transfer(2, 1, context, [gate(value)])
    (value,) = world.transfer(1, 0, context, [value * there])
    return (value * h).sum()


def by_one_call(world: Autograds, context: int, x: Tensor, gate: Gate) -> Tensor:
    return there_and_back(world, context, x, gate).sum()


def by_chain(world: Autograds, context: int, x: Tensor, gate: Gate) -> Tensor:
    """The worker in between waits, too."""
    (there,) = world.transfer(0, 1, context, [x * 2])
    (value,) = world.transfer(1, 2, context, [there * 2])
    (value,) = world.transfer(2, 1, context, [gate(value)])
    (value,) = world.transfer(1, 0, context, [value * 2])
    return value.sum()


def by_two_workers(world: Autograds, context: int, x: Tensor, gate: Gate) -> Tensor:
    """Both are asked at the same time."""
    (a,) = world.transfer(0, 1, context, [x])
    (b,) = world.transfer(0, 2, context, [x])
    (a,) = world.transfer(1, 0, context, [a * 2])
    (b,) = world.transfer(2, 0, context, [gate(b)])
    return (a * b).sum()


Program = Callable[[Autograds, int, Tensor, Gate], Tensor]
programs = pytest.mark.parametrize(
    "program", [by_one_call, by_chain, by_two_workers, by_two_calls]
)


def backward(world: Autograds, context: int, loss: Tensor, **options: Any) -> None:
    world[0].backward(context, [loss], retain_graph=True, **options)


def grad(
    world: Autograds, context: int, loss: Tensor, x: Tensor, **options: Any
) -> Any:
    return world[0].grad(context, loss, x, retain_graph=True, **options)


@programs
@pytest.mark.parametrize("is_profiled", [False, True])
def test_a_pass_that_is_stuck_ends_in_time(
    program: Program, is_profiled: bool, gate: Gate
) -> None:
    with autograds(3) as world, world[0].context() as context:
        x = doubles(3)
        loss = program(world, context, x, gate)
        run = partial(backward, world, context, loss)
        with torch.autograd.profiler.profile(enabled=is_profiled):
            for limit in SHORT, 1.0, SOON / 2:
                began = time.monotonic()
                ended = f"{context} did not .* {limit:g} s"
                with pytest.raises(BackwardTimeout, match=ended):
                    run(timeout=limit)
                assert limit <= time.monotonic() - began < limit + SOON
                if gate.entered.is_set():  # else a busy machine did not come that far
                    break
        assert gate.entered.is_set()
        gate.open.set()
        wait_until(lambda: world.passes() == 0)
        world[0].contexts.get(context).gradients.clear()
        run(timeout=LIMIT)  # the context can be used again
        (expected,) = torch.autograd.grad(same_here(program, x), [x])
        torch.testing.assert_close(world[0].get_gradients(context)[x], expected)


def same_here(program: Program, x: Tensor) -> Tensor:
    if program is by_one_call:
        return x.sum()
    if program is by_chain:
        return (x * 2 * 2 * 2).sum()
    if program is by_two_workers:
        return (x * 2 * x).sum()
    return (x * 2 * 2 * x * 2 * x * 2).sum()


@programs
def test_the_same_for_grad(program: Program, gate: Gate) -> None:
    with autograds(3) as world, world[0].context() as context:
        x = doubles(3)
        loss = program(world, context, x, gate)
        with pytest.raises(BackwardTimeout):
            grad(world, context, loss, x, timeout=SHORT)
        gate.open.set()
        wait_until(lambda: world.passes() == 0)
        found = grad(world, context, loss, x, timeout=LIMIT)
        (expected,) = torch.autograd.grad(same_here(program, x), [x])
        torch.testing.assert_close(found, (expected,))


@programs
def test_what_comes_of_it_after_its_end_is_not_kept(
    program: Program, gate: Gate
) -> None:
    with autograds(3) as world:
        with world[0].context() as context:
            x = doubles(3)
            loss = program(world, context, x, gate)
            with pytest.raises(BackwardTimeout):
                backward(world, context, loss, timeout=SHORT, accumulate=True)
            x.grad = None
            gate.open.set()
            wait_until(lambda: world.passes() == 0)
        wait_until(lambda: world.contexts() == 0)
    assert x.grad is None


def through_weight(w: Tensor, gate: Gate) -> Callable[[Tensor], Tensor]:
    return lambda there: there * gate(w * 1)


def test_nor_is_that_of_leaves_over_there(gate: Gate) -> None:
    with autograds(2) as world, world[0].context() as context:
        w, left = doubles(3), threading.Event()
        node: Any = w.view_as(w).grad_fn
        node.next_functions[0][0].register_prehook(lambda _: left.set())
        loss = there_and_back(world, context, doubles(3), through_weight(w, gate)).sum()
        with pytest.raises(BackwardTimeout):
            backward(world, context, loss, timeout=SHORT, accumulate=True)
        gate.open.set()
    assert w.grad is None
    assert not left.is_set()


def test_a_limit_that_is_up_before_the_pass_has_begun(gate: Gate) -> None:
    with autograds(2) as world, world[0].context() as context:
        loss = there_and_back(world, context, doubles(3), gate).sum()
        with pytest.raises(BackwardTimeout):
            backward(world, context, loss, timeout=1e-9)
        gate.open.set()


def test_an_error_in_time_is_that_error() -> None:
    with autograds(2) as world, world[0].context() as context:
        x = doubles(3)
        loss = there_and_back(world, context, x, lambda there: there * 2).sum()
        world[0].backward(context, [loss], timeout=LIMIT)
        with pytest.raises(GradwireError, match=r"Error on Node 1: .*second time"):
            world[0].backward(context, [loss], timeout=LIMIT)
        assert not world[0]._limits._limits


def test_passes_that_end_in_time_share_an_alarm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with autograds(2) as world, world[0].context() as context:
        alarms: list[float] = []
        executor, call_at = world[0].executor, world[0].executor.call_at

        def noting(when: float, task: Callable[[], None]) -> None:
            alarms.append(when)
            call_at(when, task)

        monkeypatch.setattr(executor, "call_at", noting)
        x = doubles(3)
        loss = there_and_back(world, context, x, lambda there: there * 2).sum()
        for _ in range(100):
            backward(world, context, loss, timeout=LIMIT)
        assert len(alarms) == 1
        torch.testing.assert_close(
            world[0].get_gradients(context)[x], torch.full_like(x, 200.0)
        )


def test_one_pass_ends_while_another_goes_on(gate: Gate) -> None:
    with autograds(2) as world:
        errors: list[Exception] = []
        ended = threading.Event()

        def run() -> None:
            with world[0].context() as context:
                loss = there_and_back(world, context, doubles(3), gate).sum()
                try:
                    backward(world, context, loss, timeout=LIMIT)
                except Exception as error:  # noqa: BLE001 for the test to look at
                    errors.append(error)
            ended.set()

        thread = threading.Thread(target=run)
        thread.start()
        assert gate.entered.wait(LIMIT)
        with world[0].context() as context:
            stuck = Gate()
            loss = there_and_back(world, context, doubles(3), stuck).sum()
            with pytest.raises(BackwardTimeout):
                backward(world, context, loss, timeout=SHORT)
            stuck.open.set()
        assert not ended.is_set()
        gate.open.set()
        thread.join(LIMIT)
        assert ended.is_set()
        assert not errors


@pytest.mark.parametrize("given", [-1, "1", float("nan"), [1]])
def test_what_is_no_time(given: Any, gate: Gate) -> None:
    with autograds(2) as world, world[0].context() as context:
        x = doubles(3)
        loss = there_and_back(world, context, x, gate).sum()
        for run in (backward, partial(grad, x=x)):
            with pytest.raises(
                (TypeError, ValueError), match=r"timeout=.*give seconds"
            ):
                run(world, context, loss, timeout=given)
        assert world.passes() == 0
