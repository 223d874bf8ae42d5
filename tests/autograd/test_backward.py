"""Passes over worlds of workers: right gradients, no hangs, errors where they belong."""

import random
import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

from gradwire._transport.faulty import Faults
from gradwire.errors import GradwireError, RemoteError, WorkerLostError
from tests.autograd.functions import Gate, Raises, doubles, there_and_back
from tests.worlds import LIMIT, Autograds, autograds, orders, socket_world, wait_until

close = torch.testing.assert_close


@pytest.fixture(autouse=True)
def _switch_on() -> None:
    Raises.is_on = True


# Right gradients


@orders
def test_a_call_and_its_return(seed: int | None) -> None:
    with autograds(2, seed=seed) as world, world[0].context() as context:
        x, w = doubles(3), doubles(3)
        loss = there_and_back(world, context, x * 2, lambda t: torch.sin(t) * w).sum()
        world[0].backward(context, [loss])
        gx, gw = torch.autograd.grad((torch.sin(x * 2) * w).sum(), [x, w])
        close(world[0].get_gradients(context), {x: gx})
        close(world[1].get_gradients(context), {w: gw})
        assert x.grad is None
        assert world.passes() == 0


def test_a_pass_without_messages() -> None:
    with autograds(1) as world, world[0].context() as context:
        x = doubles(3)
        world[0].backward(context, [(x * x).sum()])
        close(world[0].get_gradients(context), {x: 2 * x.detach()})


@orders
def test_a_residual_path_around_a_call(seed: int | None) -> None:
    with autograds(2, seed=seed) as world, world[0].context() as context:
        x = doubles(3)
        h = x * 2
        loss = (there_and_back(world, context, h, torch.sin) * h).sum()
        world[0].backward(context, [loss])
        h = x * 2
        (gx,) = torch.autograd.grad((torch.sin(h) * h).sum(), [x])
        close(world[0].get_gradients(context), {x: gx})


def test_a_worker_that_sends_to_itself() -> None:
    with autograds(1) as world, world[0].context() as context:
        x = doubles(3)
        h = x * 2
        (a,) = world.transfer(0, 0, context, [h])
        (b,) = world.transfer(0, 0, context, [a * h])
        world[0].backward(context, [(b * a).sum()])
        (gx,) = torch.autograd.grad(((2 * x) ** 3).sum(), [x])
        close(world[0].get_gradients(context), {x: gx})


@orders
def test_a_chain_of_nested_calls(seed: int | None) -> None:
    with autograds(4, seed=seed) as world, world[0].context() as context:
        x = doubles(3)
        value = x
        for at in range(3):
            (value,) = world.transfer(at, at + 1, context, [torch.sin(value)])
        for at in (3, 2, 1):
            (value,) = world.transfer(at, at - 1, context, [value * 2])
        world[0].backward(context, [value.sum()])
        local = torch.sin(torch.sin(torch.sin(x))) * 8
        (gx,) = torch.autograd.grad(local.sum(), [x])
        close(world[0].get_gradients(context), {x: gx})


@orders
def test_several_roots_and_passes_add_up(seed: int | None) -> None:
    with autograds(2, seed=seed) as world, world[0].context() as context:
        x = doubles(3)
        y = there_and_back(world, context, x, torch.exp)
        for _ in range(3):
            roots = [y.sum(), (y * x).sum(), x.sum()]
            world[0].backward(context, roots, retain_graph=True)
        local = torch.exp(x)
        (gx,) = torch.autograd.grad(local.sum() + (local * x).sum() + x.sum(), [x])
        close(world[0].get_gradients(context), {x: 3 * gx})


def test_the_caller_need_not_have_begun_the_context() -> None:
    with autograds(2) as world, world[0].context() as context:
        x = doubles(3)
        (there,) = world.transfer(0, 1, context, [x])
        world[1].backward(context, [(there * there).sum()])
        close(world[0].get_gradients(context), {x: 2 * x.detach()})


def test_parts_of_what_arrived_can_go_unused() -> None:
    with autograds(2) as world, world[0].context() as context:
        x, y = doubles(3), doubles(3)
        first, _ = world.transfer(0, 1, context, [x, y])
        world[1].backward(context, [first.sum()])
        close(world[0].get_gradients(context), {x: torch.ones_like(x)})


def test_a_second_pass_without_retain_graph_fails_as_it_does_locally() -> None:
    with autograds(2) as world, world[0].context() as context:
        loss = there_and_back(world, context, doubles(3), torch.exp).sum()
        world[0].backward(context, [loss])
        with pytest.raises(RuntimeError, match="backward through the graph a second"):
            world[0].backward(context, [loss])
        assert world.passes() == 0


def test_sparse_tensors_and_gradients() -> None:
    with autograds(2) as world, world[0].context() as context:
        bag = torch.nn.EmbeddingBag(10, 3, mode="sum", sparse=True)
        where, offsets = torch.tensor([1, 2, 4, 5, 4]), torch.tensor([0, 2])
        scale = torch.rand(5, requires_grad=True)
        (there,) = world.transfer(0, 1, context, [scale])
        (back,) = world.transfer(1, 0, context, [bag(where, offsets, there)])
        for _ in range(2):
            world[0].backward(context, [back.sum()], retain_graph=True)
        local = bag(where, offsets, scale).sum()
        gradient, gscale = torch.autograd.grad(local, [bag.weight, scale])
        found = world[1].get_gradients(context)[bag.weight]
        assert found.is_sparse
        close(found.to_dense(), 2 * gradient.to_dense())
        close(world[0].get_gradients(context)[scale], 2 * gscale)


def sparse() -> Tensor:
    where, values = [[0, 1, 1], [2, 0, 2]], [3.2, 4.1, 5.3]
    return torch.sparse_coo_tensor(where, values, (3, 3), requires_grad=True)


@pytest.mark.parametrize("at", [0, 1])
def test_sparse_tensors_cross_and_come_back(at: int) -> None:
    with autograds(2) as world, world[0].context() as context:
        a, b = sparse(), sparse()
        there = world.transfer(0, at, context, [a, b])
        (back,) = world.transfer(at, 0, context, [torch.add(*there)])
        for _ in range(2):
            world[0].backward(context, [torch.sparse.sum(back)], retain_graph=True)
        wanted = torch.autograd.grad(torch.sparse.sum(a + b), [a, b])
        found = world[0].get_gradients(context)
        for leaf, gradient in zip((a, b), wanted, strict=True):
            assert found[leaf].is_sparse == gradient.is_sparse
            close(found[leaf].to_dense(), 2 * gradient.to_dense())


def test_a_parameter_that_is_sent_gets_its_gradient() -> None:
    with autograds(2) as world, world[0].context() as context:
        weight = torch.nn.Parameter(torch.ones(3))
        loss = there_and_back(world, context, weight, lambda t: t * 3).sum()
        world[0].backward(context, [loss])
        close(world[0].get_gradients(context)[weight], torch.full((3,), 3.0))


# No hangs


@orders
def test_results_that_are_not_used(seed: int | None) -> None:
    with autograds(3, seed=seed) as world, world[0].context() as context:
        x, w = doubles(3), doubles(3)
        there_and_back(world, context, x, lambda t: t * w)  # not used at all
        (there,) = world.transfer(0, 1, context, [x * 2])
        world.transfer(1, 2, context, [there * w])  # used nowhere
        world.transfer(2, 0, context, [doubles(3)])
        world[0].backward(context, [(x * x).sum()])
        close(world[0].get_gradients(context), {x: 2 * x.detach()})
        assert world[1].get_gradients(context) == {}
        assert world.passes() == 0


def test_an_unused_result_voids_a_path_through_the_used_one() -> None:
    with autograds(2) as world, world[0].context() as context:
        x = doubles(3)
        (r,) = world.transfer(1, 0, context, [doubles(3)])
        world.transfer(
            0, 1, context, [r * x]
        )  # waits for worker 1, which must hear of it
        world[0].backward(context, [(r * 2).sum()])
        assert world[0].get_gradients(context) == {}


@orders
def test_a_call_that_failed_does_not_hold_up_a_pass(seed: int | None) -> None:
    with autograds(3, seed=seed) as world, world[0].context() as context:
        x = doubles(3)
        world.leave(0, 1, context, [x * 2])
        y = there_and_back(world, context, x, torch.exp)
        world.leave(1, 2, context, [doubles(3)])
        world[0].backward(context, [y.sum()])
        close(world[0].get_gradients(context), {x: torch.exp(x).detach()})


def test_many_threads_with_their_own_contexts() -> None:
    with autograds(4) as world:
        errors: list[BaseException] = []
        weight = doubles(3)

        def train(at: int) -> None:
            try:
                for _ in range(3):
                    with world[at].context() as context:
                        x = doubles(3)
                        (there,) = world.transfer(at, 0, context, [x])
                        (back,) = world.transfer(0, at, context, [there * weight])
                        world[at].backward(context, [(back * x).sum()])
                        mine = world[at].get_gradients(context)
                        close(mine, {x: (2 * x * weight).detach()})
                        theirs = world[0].get_gradients(context)
                        close(theirs, {weight: (x * x).detach()})
            except BaseException as error:  # noqa: BLE001 for the test to raise
                errors.append(error)

        threads = [
            threading.Thread(target=train, args=(at,))
            for at in (1, 2, 3)
            for _ in range(20)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT)
        assert errors == []
        assert not any(thread.is_alive() for thread in threads)
        assert world.passes() == 0


def test_overlapping_passes_in_one_context() -> None:
    with autograds(2) as world, world[0].context() as context:
        x, w = doubles(3), doubles(3)
        h = x * 2
        loss = (there_and_back(world, context, h, lambda t: t * w) * h).sum()
        threads = [
            threading.Thread(target=world[0].backward, args=(context, [loss], True))
            for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT)
        assert not any(thread.is_alive() for thread in threads)
        local = (2 * x) * w * (2 * x)
        gx, gw = torch.autograd.grad(local.sum(), [x, w])
        close(world[0].get_gradients(context), {x: 8 * gx})
        close(world[1].get_gradients(context), {w: 8 * gw})


def test_a_thousand_passes_leave_nothing_behind() -> None:
    with autograds(2) as world, world[0].context() as context:
        x = doubles(3)
        loss = there_and_back(world, context, x, torch.exp).sum()
        for _ in range(1000):
            world[0].backward(context, [loss], retain_graph=True)
        here = world[0].contexts.get(context)
        assert here.parts == {}
        assert [send.crossing.runs for send in here.sends.values()] == [[]]
        close(world[0].get_gradients(context), {x: 1000 * torch.exp(x).detach()})


# Errors


def test_bad_arguments_are_refused_at_the_caller() -> None:
    with autograds(1) as world, world[0].context() as context:
        run: Any = world[0].backward
        for arguments in ((context, None), (None, None), (context, [1])):
            with pytest.raises(TypeError, match="incompatible function arguments"):
                run(*arguments)
        no_grad, vector = torch.rand(3), torch.rand(3, requires_grad=True)
        for roots, text in (
            ([], "No tensors provided for gradient computation"),
            ([no_grad], "requires_grad not set on"),
            ([vector], "is not a scalar, all roots need to be scalar"),
            (
                [torch.rand(1, requires_grad=True)],
                "does not have a valid gradient func",
            ),
        ):
            with pytest.raises(RuntimeError, match=text):
                run(context, roots)
        for roots in ([vector.sum()], [no_grad], []):  # as PyTorch: that comes first
            with pytest.raises(RuntimeError, match=r"Could not find .* with id: 100"):
                run(100, roots)


@orders
@pytest.mark.parametrize("at", [0, 1, 2])
def test_an_error_anywhere_reaches_the_caller_and_goes_by(
    at: int, seed: int | None
) -> None:
    with autograds(3, seed=seed) as world, world[0].context() as context:
        x = doubles(3)
        value = x
        for source, target in ((0, 1), (1, 2), (2, 0)):
            value = Raises.apply(value) if source == at else value * 1
            (value,) = world.transfer(source, target, context, [value * x])
        loss = (value * x).sum()
        for _ in range(50):
            with pytest.raises(
                RuntimeError, match=f"Error on Node {at}: this bac"
            ) as e:
                world[0].backward(context, [loss], retain_graph=True)
            assert type(e.value.__cause__) is ValueError
            if at:
                assert isinstance(e.value.__cause__.__cause__, RemoteError)
                assert "in backward" in str(e.value.__cause__.__cause__)
        wait_until(lambda: world.passes() == 0)
        Raises.is_on = False
        before = dict(world[0].get_gradients(context))
        for _ in range(49):
            world[0].backward(context, [loss], retain_graph=True)
        assert world[0].get_gradients(context).keys() >= before.keys()
        assert world.passes() == 0


def test_an_error_frees_those_who_wait() -> None:
    with autograds(2) as world, world[0].context() as context:
        x = doubles(3)
        h = x * 2
        y = there_and_back(world, context, h, lambda t: Raises.apply(t * 2))
        with pytest.raises(RuntimeError, match="Error on Node 1"):
            world[0].backward(context, [(y * h).sum()])  # which waits inside the engine
        assert world.passes() == 0


def test_a_long_way_around_keeps_few_threads_waiting() -> None:
    most = 0

    def look(_: Tensor) -> None:
        nonlocal most
        most = max(most, threading.active_count())

    with autograds(3) as world, world[0].context() as context:
        x = doubles(2)
        y = x * 1
        for step in range(300):
            (y,) = world.transfer(step % 3, (step + 1) % 3, context, [y])
            y = y * 1.01
            y.register_hook(look)
        world[0].backward(context, [y.sum()])
        (gradient,) = world[0].get_gradients(context).values()
    torch.testing.assert_close(gradient, torch.full_like(x, 1.01**300))
    assert 1 < most < 120


def test_a_delivery_that_lacks_a_gradient_is_an_error() -> None:
    with autograds(2) as world, world[0].context() as context:
        x, y = doubles(3), doubles(3)
        first, _ = world.transfer(0, 1, context, [x, y])
        original = world[1].ask

        def ask(to: int, message: Any, *others: Any) -> Any:
            lacking = type(message)(message.numbers, message.tensors[:-1])
            return original(to, lacking, *others)

        world[1].ask = ask  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="lacks gradients that are not void"):
            world[1].backward(context, [first.sum()])
        wait_until(lambda: world.passes() == 0)


def test_a_context_released_during_a_pass_is_an_error() -> None:
    with autograds(2) as world, world[0].context() as context:

        class Releases(Function):
            @staticmethod
            def forward(ctx: Any, tensor: Tensor) -> Tensor:
                return tensor * 1

            @staticmethod
            def backward(ctx: Any, *gradients: Tensor) -> Tensor:
                world[0].release(context)
                return gradients[0]

        x = doubles(3)
        y = there_and_back(world, context, Releases.apply(x), Releases.apply)
        with pytest.raises(RuntimeError, match="Could not find autograd context"):
            world[0].backward(context, [y.sum()])
        wait_until(lambda: world.passes() == 0 and world.contexts() == 0)


def test_a_pass_under_way_is_counted() -> None:
    with autograds(2) as world, world[0].context() as context:
        gate = Gate()
        loss = there_and_back(world, context, doubles(3), gate).sum()
        thread = threading.Thread(target=world[0].backward, args=(context, [loss]))
        thread.start()
        assert gate.entered.wait(LIMIT)
        for at in (0, 1):
            assert world[at].debug_info() == {
                "num_current_backward_passes": 1,
                "num_autograd_contexts": 1,
            }
        gate.open.set()
        thread.join(LIMIT)
        assert world.passes() == 0


@pytest.mark.parametrize("path", ["chain", "residual"])
def test_a_worker_killed_during_a_pass_ends_it_at_once(path: str) -> None:
    with autograds(3) as world, world[0].context() as context:
        gate, x = Gate(), doubles(3)
        h = x * 2
        (there,) = world.transfer(0, 1, context, [h])
        (value,) = world.transfer(1, 2, context, [there * 2])
        (value,) = world.transfer(2, 1, context, [gate(value)])
        (value,) = world.transfer(1, 0, context, [value * there])
        loss = (value * (h if path == "residual" else x)).sum()
        errors: list[Exception] = []
        raised_at: list[float] = []

        def run() -> None:
            try:
                world[0].backward(context, [loss])
            except Exception as error:  # noqa: BLE001 for the test to look at
                errors.append(error)
                raised_at.append(time.monotonic())

        thread = threading.Thread(target=run)
        thread.start()
        assert gate.entered.wait(LIMIT)
        killed_at = time.monotonic()
        killer = threading.Thread(target=world.world.kill, args=(2,))
        killer.start()
        thread.join(LIMIT)
        assert not thread.is_alive()
        gate.open.set()
        killer.join(LIMIT)
        assert raised_at[0] - killed_at < 2
        assert isinstance(errors[0], WorkerLostError)
        world.services[2].close()
        wait_until(lambda: world.passes() == 0)


def test_a_pass_to_a_worker_that_is_gone_fails() -> None:
    with autograds(2) as world, world[0].context() as context:
        loss = there_and_back(world, context, doubles(3), torch.exp).sum()
        world.world.kill(1)
        with pytest.raises(WorkerLostError):
            world[0].backward(context, [loss])
        assert world[0].debug_info()["num_current_backward_passes"] == 0


def test_contexts_of_a_lost_worker_end() -> None:
    with autograds(2) as world:
        context = world[0].new_context()
        world.transfer(0, 1, context.id, [doubles(3)])
        world.world.kill(0)
        wait_until(lambda: len(world[1].contexts) == 0)


@pytest.mark.parametrize("is_over", [False, True])
def test_who_was_called_by_a_lost_worker_hears_of_the_end(is_over: bool) -> None:
    with autograds(3) as world:
        context = world[0].new_context()
        (there,) = world.transfer(0, 1, context.id, [doubles(3)])
        world.transfer(1, 2, context.id, [there])
        if is_over:  # and the word of it goes with worker1
            world[0].contexts.remove(context.id)
        world.world.kill(1)
        if not is_over:
            wait_until(lambda: world[0].contexts.get(context.id).known == {2})
            assert len(world[2].contexts) == 1
            world[0].release(context.id)
        wait_until(lambda: len(world[2].contexts) == 0)


def test_a_release_that_is_lost_is_said_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from gradwire._autograd import context_release, service

    monkeypatch.setattr(service, "_PATIENCE", 0.05)
    monkeypatch.setattr(context_release, "_PAUSE", 0.01)
    monkeypatch.setattr(context_release, "_TRIES", 100)
    faults = Faults(drop=0.5, kinds=frozenset([service.RELEASE]))
    with autograds(2, seed=3, faults=faults) as world:
        for _ in range(10):
            with world[0].context() as context:
                world.transfer(0, 1, context, [doubles(3)])
        wait_until(lambda: world.contexts() == 0)


def test_delays_and_repeats_change_nothing() -> None:
    faults = Faults(delay=0.3, repeat=0.3, longest_delay=0.005)
    with autograds(3, seed=1, faults=faults) as world:
        chance = random.Random(1)
        for _ in range(10):
            with world[0].context() as context:
                x = doubles(3)
                value, local = x, x
                at = 0
                for _ in range(6):
                    to = chance.randrange(3)
                    (value,) = world.transfer(at, to, context, [value * 2])
                    local, at = local * 2, to
                if at != 0:
                    (value,) = world.transfer(at, 0, context, [value])
                world[0].backward(context, [(value * x).sum()])
                (gx,) = torch.autograd.grad((local * x).sum(), [x])
                close(world[0].get_gradients(context)[x], gx)


def test_an_error_of_a_kind_that_cannot_be_sent_is_told_in_words() -> None:
    class Odd(Exception):
        def __reduce__(self) -> Any:
            raise TypeError("never")

    with autograds(2) as world, world[0].context() as context:
        Raises.error = staticmethod(lambda: Odd("odd"))
        try:
            loss = there_and_back(world, context, doubles(3), Raises.apply).sum()
            with pytest.raises(GradwireError, match="Error on Node 1: odd") as caught:
                world[0].backward(context, [loss])
            assert isinstance(caught.value.__cause__, RemoteError)
        finally:
            Raises.error = staticmethod(lambda: ValueError("this backward fails"))


# Elsewhere


def test_passes_over_sockets() -> None:
    with socket_world(3) as workers:
        world = Autograds(workers)
        for _ in range(20):
            with world[0].context() as context:
                x, w = doubles(300, 40), doubles(300, 40)
                h = x * 2
                (there,) = world.transfer(0, 1, context, [h])
                (further,) = world.transfer(1, 2, context, [there * w])
                (back,) = world.transfer(2, 0, context, [torch.sin(further) * 2])
                world[0].backward(context, [(back * h).sum()])
                local = torch.sin(2 * x * w) * 2 * 2 * x
                gx, gw = torch.autograd.grad(local.sum(), [x, w])
                close(world[0].get_gradients(context), {x: gx})
                close(world[1].get_gradients(context), {w: gw})
        wait_until(lambda: world.contexts() == 0)
        world.close()
