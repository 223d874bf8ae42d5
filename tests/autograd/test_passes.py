"""How a pass goes from worker to worker: what is run at once, what waits, what fails."""

import gc
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire._autograd import deliveries, messages, pass_driver
from gradwire._autograd.contexts import Context
from gradwire._autograd.failures import describe
from gradwire._autograd.messages import Abort, Answer, Delivery, Failed, Header, Load
from gradwire._autograd.parts import Part
from gradwire._autograd.pass_state import Step
from gradwire._autograd.recording import look_at_graph
from gradwire.errors import GradwireError
from tests.autograd.functions import (
    Gate,
    MessageCounts,
    Raises,
    doubles,
    gradients_of_weighted,
    there_and_back,
    weighted,
)
from tests.worlds import LIMIT, Autograds, autograds, wait_until

close = torch.testing.assert_close


@pytest.fixture(autouse=True)
def _switch_on() -> None:
    Raises.is_on = True


def tied(world: Autograds, context: int, x: Tensor) -> Tensor:
    """Something that worker 1 cannot run at once: two of its results have a node in common."""
    (there,) = world.transfer(0, 1, context, [x])
    h = torch.sin(there)
    (a,) = world.transfer(1, 0, context, [h * 2])
    (b,) = world.transfer(1, 0, context, [h * 3])
    return (a * b).sum()


def ask(
    world: Autograds, context: int, number: int, send: int, gradients: Sequence[Tensor]
) -> Any:
    """Have worker 0 say in a pass that it has gradients for a send of worker 1."""
    load = Load([Delivery(send, gradients)])
    message = messages.request(Header(context, number, 0, number), load)
    return messages.unpack(world[0].request(1, message).wait(), 0)


def test_a_call_and_its_return_take_one_message() -> None:
    with autograds(2) as world, world[0].context() as context:
        said = MessageCounts(world)
        x = doubles(3)
        world[0].backward(context, [there_and_back(world, context, x, torch.sin).sum()])
        close(world[0].get_gradients(context), {x: torch.cos(x.detach())})
        assert said.steps == {Step.RUN: 1}


def over_worker_1(world: Autograds, context: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """What worker 2 makes of it, by way of worker 1, which does nothing with it; and that there."""
    (there,) = world.transfer(0, 1, context, [x])
    (on,) = world.transfer(1, 2, context, [there])
    (back,) = world.transfer(2, 1, context, [torch.sin(on)])
    (home,) = world.transfer(1, 0, context, [back])
    return home, back


def test_a_hook_sees_what_is_sent_on_as_it_came() -> None:
    with autograds(3) as world, world[0].context() as context:
        x = doubles(3)
        home, back = over_worker_1(world, context, x)
        back.register_hook(lambda gradient: gradient * 2)
        world[0].backward(context, [home.sum()])
        close(world[0].get_gradients(context), {x: 2 * torch.cos(x.detach())})


@pytest.mark.parametrize("is_changed", [False, True])
def test_a_hook_outlives_what_is_sent_on_as_it_came(is_changed: bool) -> None:
    with autograds(3) as world, world[0].context() as context:
        x = doubles(3)
        home, back = over_worker_1(world, context, x)
        back.register_hook(lambda gradient: gradient * 2)
        if is_changed:
            back.mul_(7)
        del back
        gc.collect()
        world[0].backward(context, [home.sum()])
        close(world[0].get_gradients(context), {x: 2 * torch.cos(x.detach())})


def test_a_sparse_tensor_is_sent_on() -> None:
    with autograds(3) as world, world[0].context() as context:
        x = torch.eye(3, dtype=torch.float64).to_sparse().requires_grad_()
        (there,) = world.transfer(0, 1, context, [x * 2])
        (on,) = world.transfer(1, 2, context, [there])
        world[2].backward(context, [torch.sparse.sum(on)])
        found = world[0].get_gradients(context)[x].to_dense()
        close(found, 2 * torch.eye(3, dtype=torch.float64))


def test_what_is_large_is_not_kept_for_being_sent_on() -> None:
    with autograds(3) as world, world[0].context() as context:
        x = doubles(3000)
        home, back = over_worker_1(world, context, x)
        there = weakref.ref(back)
        del back
        gc.collect()
        assert there() is None
        world[0].backward(context, [home.sum()])
        close(world[0].get_gradients(context), {x: torch.cos(x.detach())})


def test_the_gradient_of_what_is_sent_on_as_it_came_is_retained() -> None:
    with autograds(3) as world, world[0].context() as context:
        home, back = over_worker_1(world, context, doubles(3))
        back.retain_grad()
        world[0].backward(context, [(home * 5).sum()])
        close(back.grad, torch.full((3,), 5.0, dtype=torch.float64))


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (0, 0), (1,), (0, 1, 1)])
def test_some_of_what_came_is_sent_on_in_any_order(order: tuple[int, ...]) -> None:
    with autograds(3) as world, world[0].context() as context:
        x, y = doubles(3), doubles(3)
        came = world.transfer(0, 1, context, [x * 2, y * 3])
        on = world.transfer(1, 2, context, [came[i] for i in order])
        world[2].backward(context, [weighted(on)])
        expected = gradients_of_weighted([x * 2, y * 3], order, [x, y])
        close(world[0].get_gradients(context), expected)


def test_the_gradient_of_a_root_is_its_own() -> None:
    with autograds(2) as world:
        x = torch.ones(3, requires_grad=True)
        for spoil in (False, True, True, False):
            with world[0].context() as context:
                loss = there_and_back(world, context, x, torch.sin).sum()
                if spoil:
                    loss.register_hook(lambda gradient: gradient.data.mul_(7))
                world[0].backward(context, [loss])
                factor = 7 if spoil else 1
                expected = {x: factor * torch.cos(x.detach())}
                close(world[0].get_gradients(context), expected)


def test_back_and_forth_takes_a_message_for_each_time() -> None:
    with autograds(2) as world, world[0].context() as context:
        said = MessageCounts(world)
        x = doubles(3)
        value = x
        for _ in range(5):
            value = there_and_back(world, context, value * 2, torch.sin)
        world[0].backward(context, [value.sum()])
        local = x
        for _ in range(5):
            local = torch.sin(local * 2)
        (gx,) = torch.autograd.grad(local.sum(), [x])
        close(world[0].get_gradients(context), {x: gx})
        assert said.steps == {Step.RUN: 5}


def test_a_segment_waits_for_all_that_comes_with_one_message() -> None:
    with autograds(2) as world, world[0].context() as context:
        said = MessageCounts(world)
        x = doubles(3)
        world[0].backward(context, [tied(world, context, x)])
        (gx,) = torch.autograd.grad((6 * torch.sin(x) ** 2).sum(), [x])
        close(world[0].get_gradients(context), {x: gx})
        assert said.steps == {Step.RUN: 1}
        assert world.passes() == 0


def test_some_is_run_at_once_and_some_is_parked() -> None:
    with autograds(3) as world, world[0].context() as context:
        x, w = doubles(3), doubles(3)
        (there,) = world.transfer(0, 2, context, [x])
        (simple,) = world.transfer(2, 0, context, [there * w])
        loss = tied(world, context, x) + simple.sum()
        world[0].backward(context, [loss])
        local = (6 * torch.sin(x) ** 2).sum() + (x * w).sum()
        gx, gw = torch.autograd.grad(local, [x, w])
        close(world[0].get_gradients(context), {x: gx})
        close(world[2].get_gradients(context), {w: gw})


def test_what_is_parked_can_go_on_where_few_nodes_were_made_and_many_sends() -> None:
    with autograds(2) as world, world[0].context() as context:
        x, y = doubles(3), doubles(3)
        loss = sum(there_and_back(world, context, x, torch.sin).sum() for _ in range(5))
        (there,) = world.transfer(0, 1, context, [y])
        (back,) = world.transfer(1, 0, context, [there * 2])
        (again,) = world.transfer(0, 1, context, [back * 3])
        again.grad_fn._set_sequence_nr(5)  # as in a thread that has made few nodes
        (end,) = world.transfer(1, 0, context, [again + there])
        world[0].backward(context, [loss + end.sum()])
        close(
            world[0].get_gradients(context),
            {x: 5 * x.detach().cos(), y: torch.full_like(y, 7)},
        )


def test_the_one_that_leads_may_have_to_park_too() -> None:
    with autograds(2) as world, world[0].context() as context:
        x = doubles(3)
        h = torch.sin(x)
        a = there_and_back(world, context, h * 2, torch.exp)
        b = there_and_back(world, context, h * 3, torch.exp)
        world[0].backward(context, [(a + b).sum()])
        local = (torch.exp(torch.sin(x) * 2) + torch.exp(torch.sin(x) * 3)).sum()
        (gx,) = torch.autograd.grad(local, [x])
        close(world[0].get_gradients(context), {x: gx})


def test_a_long_way_around_many_workers_does_not_take_many_threads() -> None:
    with autograds(3) as world, world[0].context() as context:
        said = MessageCounts(world)
        x = doubles(3)
        value = x
        for step in range(90):
            (value,) = world.transfer(step % 3, (step + 1) % 3, context, [value * 1.01])
        before = threading.active_count()
        most = 0

        def look(gradient: Tensor) -> None:
            nonlocal most
            most = max(most, threading.active_count())

        x.register_hook(look)
        world[0].backward(context, [value.sum()])
        close(world[0].get_gradients(context)[x], torch.full_like(x, 1.01**90))
        assert said.steps == {Step.RUN: 90}
        assert most - before < 60


def test_one_worker_at_work_does_not_delay_what_goes_by_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pass_driver, "_GLANCE", LIMIT)
    gate = Gate()
    with autograds(3) as world, world[0].context() as context:
        x = doubles(3)
        slow = there_and_back(world, context, x * 1, gate)
        y = x * 1
        y.register_hook(lambda gradient: gate.open.set())
        for _ in range(3):
            (there,) = world.transfer(0, 2, context, [y * 2])
            (y,) = world.transfer(2, 0, context, [there * 2])
        world[0].backward(context, [slow.sum() + y.sum()])
        close(world[0].get_gradients(context), {x: torch.full_like(x, 65.0)})


@pytest.mark.parametrize("at", ["root", "there"])
def test_hooks_of_recvs_are_called(at: str) -> None:
    with autograds(2) as world, world[0].context() as context:
        x = doubles(3)
        seen = []
        (there,) = world.transfer(0, 1, context, [x])
        (back,) = world.transfer(1, 0, context, [torch.sin(there)])
        node: Any = back.grad_fn if at == "root" else there.grad_fn
        node.register_hook(lambda *_: seen.append(at))
        world[0].backward(context, [back.sum()])
        assert seen == [at]
        close(world[0].get_gradients(context), {x: torch.cos(x.detach())})


def test_an_error_is_told_and_the_context_can_be_used_again() -> None:
    with autograds(2) as world, world[0].context() as context:
        x = doubles(3)
        for is_on in (True, False):
            Raises.is_on = is_on
            loss = there_and_back(world, context, x * 2, Raises.apply).sum()
            if is_on:
                with pytest.raises(
                    GradwireError, match="Error on Node 1: this backward"
                ):
                    world[0].backward(context, [loss])
            else:
                world[0].backward(context, [loss])
        close(world[0].get_gradients(context), {x: torch.full_like(x, 2)})
        assert world.passes() == 0


def test_others_are_told_of_a_failure_while_they_are_at_work() -> None:
    entered, go_on = threading.Event(), threading.Event()

    def wait(_: Tensor) -> None:
        entered.set()
        assert go_on.wait(LIMIT)

    class Failing(Raises):
        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            assert entered.wait(LIMIT)
            raise ValueError("this backward fails")

    with autograds(3) as world, world[0].context() as context:
        said = MessageCounts(world)
        x = doubles(3)
        a = there_and_back(world, context, x * 2, Failing.apply)
        (there,) = world.transfer(0, 2, context, [x * 3])
        waits = there * 1
        waits.register_hook(wait)
        (b,) = world.transfer(2, 0, context, [waits])
        try:
            with pytest.raises(GradwireError, match="Error on Node 1: this backward"):
                world[0].backward(context, [(a * b).sum()])
            wait_until(lambda: said.kinds[Abort])  # perhaps by another thread
        finally:
            go_on.set()
        wait_until(lambda: world.passes() == 0)
        assert said.kinds[Abort] == 1


@pytest.mark.parametrize("leader", [0, 1])
def test_a_thread_that_stops_because_of_another_one_says_why(leader: int) -> None:
    """Worker 1 is busy with what came from 2 while what came from 3 fails there."""
    has_failed = threading.Event()

    class Failing(Raises):
        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            has_failed.set()
            raise ValueError("this backward fails")

    with autograds(5) as world, world[leader].context() as context:

        def wait(_: Tensor) -> None:
            assert has_failed.wait(LIMIT)
            (there,) = world[1].contexts
            (part,) = there.parts.values()
            assert isinstance(part, Part)
            wait_until(lambda: part.failed is not None)

        busy = doubles(3) * 2
        busy.register_hook(wait)
        (there,) = world.transfer(1, 2, context, [busy])
        (a,) = world.transfer(2, 1, context, [there * 3])
        (fails,) = world.transfer(1, 4, context, [Failing.apply(doubles(3) * 2)])
        (fails,) = world.transfer(4, 3, context, [fails * 2])
        (b,) = world.transfer(3, 1, context, [fails * 3])
        value = a * b
        if leader == 0:
            (value,) = world.transfer(1, 0, context, [value])
        with pytest.raises(GradwireError, match="Error on Node 1: this backward"):
            world[leader].backward(context, [value.sum()])
        wait_until(lambda: world.passes() == 0)


def test_what_comes_after_a_failure_is_not_run() -> None:
    with autograds(2) as world, world[0].context() as context:
        x = doubles(3)
        loss = there_and_back(world, context, x, Raises.apply).sum()
        with pytest.raises(GradwireError, match="this backward fails"):
            world[0].backward(context, [loss])
        (there,) = world[1].contexts
        (failed,) = there.parts
        late = ask(
            world, context, failed, next(iter(there.sends)), [torch.ones_like(x)]
        )
        assert isinstance(late, Failed)
        assert world[1].get_gradients(context) == {}
        Raises.is_on = False
        world[0].backward(
            context, [there_and_back(world, context, x, Raises.apply).sum()]
        )
        assert len(there.parts) == 1


def test_passes_leave_nothing_behind_but_the_last_one() -> None:
    with autograds(2) as world, world[0].context() as context:
        x = doubles(3)
        loss = there_and_back(world, context, x * 2, torch.sin).sum()
        for _ in range(20):
            world[0].backward(context, [loss], retain_graph=True)
        (there,) = world[1].contexts
        assert len(there.parts) == 1
        (here,) = world[0].contexts
        assert not here.parts
        close(world[0].get_gradients(context)[x], 40 * torch.cos(2 * x.detach()))


class Over:
    """A pass that has ended here."""

    is_under_way = False


def test_passes_may_go_while_others_are_forgotten() -> None:
    context = Context(1)
    parts: dict[int, Any] = context.parts  # type: ignore[assignment]
    parts |= {number: Over() for number in range(1, 2000)}

    def another_ends(*_: object) -> None:
        if parts:
            parts.popitem()

    before = gc.get_threshold()
    # As what runs when things go, which takes its time.
    gc.callbacks.append(another_ends)
    gc.set_threshold(1)
    try:
        context.forget_passes(3000, 3000)
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(another_ends)
    assert not parts


def test_passes_of_several_threads_keep_what_they_need() -> None:
    with autograds(2) as world, world[0].context() as context:
        xs = [doubles(3) for _ in range(8)]
        losses = [
            tied(world, context, x)
            if i % 2
            else there_and_back(world, context, x, torch.sin).sum()
            for i, x in enumerate(xs)
        ]
        errors: list[BaseException] = []

        def run(loss: Tensor) -> None:
            try:
                for _ in range(3):
                    world[0].backward(context, [loss], retain_graph=True)
            except BaseException as error:  # noqa: BLE001 shown below
                errors.append(error)

        threads = [threading.Thread(target=run, args=(loss,)) for loss in losses]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT)
        assert not errors
        found = world[0].get_gradients(context)
        for i, x in enumerate(xs):
            local = 6 * torch.sin(x) ** 2 if i % 2 else torch.sin(x)
            (gx,) = torch.autograd.grad(local.sum(), [x])
            close(found[x], 3 * gx)


def test_gradients_for_what_was_released_meanwhile_are_refused_as_those() -> None:
    with autograds(2) as world, world[0].context() as context:
        send = world.leave(0, 1, context, [doubles(3)])
        known = world[0].contexts.get(context)
        known.clear()
        with pytest.raises(GradwireError, match="Could not find autograd context"):
            deliveries.take(known, 1, Delivery(send, [torch.ones(3)]))


def test_gradients_for_a_pass_that_has_failed_are_dropped() -> None:
    with autograds(2) as world, world[0].context() as context:
        x, w = doubles(3), doubles(3)
        there_and_back(world, context, x * 2, lambda t: t * w)
        (there,) = world[1].contexts
        (number,) = there.sends
        failed = describe(ValueError("no"), 0, pickles=False)
        world[1]._on_abort(0, Abort(context, 77, messages.pack_failed(failed)))
        late = ask(world, context, 77, number, [torch.ones_like(x)])
        assert isinstance(late, Answer)
        assert world[1].get_gradients(context) == {}


def test_a_leaf_that_was_sent_twice_may_get_a_hook_after_it_was_looked_at() -> None:
    with autograds(2) as world, world[0].context() as context:
        x = doubles(3)
        loss = there_and_back(world, context, x, torch.sin).sum()
        loss = loss + there_and_back(world, context, x, torch.exp).sum()
        (here,) = world[0].contexts
        look_at_graph(here)
        seen: list[Tensor] = []
        x.register_hook(seen.append)
        world[0].backward(context, [loss])
        whole = torch.cos(x.detach()) + torch.exp(x.detach())
        close(seen, [whole])
        close(world[0].get_gradients(context), {x: whole})


def test_a_root_that_is_a_single_path_to_what_was_sent_on_takes_the_protocol() -> None:
    with autograds(3) as world, world[0].context() as context:
        said = MessageCounts(world)
        x = doubles(3)
        value = there_and_back(world, context, x, torch.sin)
        (on,) = world.transfer(0, 2, context, [value])
        (back,) = world.transfer(2, 0, context, [on * 3])
        world[0].backward(context, [back.sum() + value.sum()], retain_graph=True)
        assert said.steps[Step.REST]
        said.steps.clear()
        world[0].backward(context, [value.sum()])
        close(world[0].get_gradients(context), {x: 5 * torch.cos(x.detach())})
        assert said.steps[Step.REST]
