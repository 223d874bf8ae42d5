"""Distributed autograd through calls: passes, and what fails."""

import sys
import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor

import gradwire as gw
from gradwire.errors import CallTimeout, GradwireError, RemoteError, WorkerLostError
from gradwire.testing import World
from tests.autograd.functions import Raises, boom_with, doubles
from tests.autograd.weights import (
    Way,
    applied_along_locally,
    applied_locally,
    apply_along,
    apply_weight,
    check_gradients,
    current_id,
    forget_gradients,
    known,
    same,
    two_ways,
    weights,
    world_with_weights,
)
from tests.rpc.functions import Boom, boom, held, holding
from tests.worlds import LIMIT, meanwhile, orders, wait_until, wait_until_no_contexts

_hooked, _resume = threading.Event(), threading.Event()
"""A backward has come to where it waits, and may go on (`weigh_hooked`)."""


@pytest.fixture(autouse=True)
def fresh() -> None:
    Raises.is_on = True
    _hooked.clear()
    _resume.clear()


# Passes


def test_several_passes_add_up() -> None:
    with world_with_weights(3) as world, gw.context() as ctx:
        x = doubles(3)
        y = gw.rpc_sync("worker1", apply_along, (x, ["worker2", "worker0"]))
        for _ in range(3):
            gw.backward(ctx, [y.sum()], retain_graph=True)
        gw.backward(ctx, [(y * x).sum()])
        y = applied_along_locally(x, ["worker1", "worker2", "worker0"])
        local = 3 * y.sum() + (y * x).sum()
        own = [[weights[f"worker{i}"]] for i in range(3)]
        check_gradients(world, ctx, local, [[x, *own[0]], own[1], own[2]])


def test_a_graph_that_was_not_retained_cannot_be_used_again() -> None:
    with world_with_weights(2), gw.context() as ctx:
        y = gw.rpc_sync("worker1", apply_weight, (doubles(3),)).sum()
        gw.backward(ctx, [y], retain_graph=True)
        gw.backward(ctx, [y])
        with pytest.raises(GradwireError, match=r"Error on Node \d: .*second time"):
            gw.backward(ctx, [y])


def weigh_once_more(x: Tensor) -> Tensor:
    return torch.sin(x * weights["hooked"])


def test_a_forward_after_a_pass_that_went_over_a_leaf_with_a_hook() -> None:
    """What the first pass has freed is not run again, although the leaf puts both together."""
    with world_with_weights(2) as world, gw.context() as ctx:
        w, x = doubles(3), torch.rand(3, dtype=torch.float64)
        weights["hooked"] = w
        seen: list[Tensor] = []
        w.register_hook(seen.append)
        for _ in range(3):
            y = gw.rpc_sync("worker1", weigh_once_more, (x,))
            gw.backward(ctx, [y.sum()])
        check_gradients(world, ctx, 3 * torch.sin(x * w).sum(), [[], [w]])
        assert len(seen) == 4  # and one here


def test_several_roots() -> None:
    with world_with_weights(3) as world, gw.context() as ctx:
        x = doubles(3)
        a = gw.rpc_sync("worker1", apply_weight, (x,))
        b = gw.rpc_sync("worker2", apply_weight, (a,))
        gw.backward(ctx, [a.sum(), b.sum(), (a * b).sum(), (x * 2).sum()])
        a = applied_locally(x, 1)
        b = applied_locally(a, 2)
        local = a.sum() + b.sum() + (a * b).sum() + (x * 2).sum()
        own = [[x], [weights["worker1"]], [weights["worker2"]]]
        check_gradients(world, ctx, local, own)


def test_a_root_that_arrived() -> None:
    with world_with_weights(2) as world, gw.context() as ctx:
        x = doubles(3)
        gw.backward(ctx, [gw.rpc_sync("worker1", torch.sum, (x * x,))])
        check_gradients(world, ctx, (x * x).sum(), [[x], []])


def backward_there(ctx: int, x: Tensor) -> None:
    gw.backward(ctx, [apply_weight(x).sum()])


def test_a_pass_begun_on_another_worker() -> None:
    with world_with_weights(2) as world, gw.context() as ctx:
        x = doubles(3)
        gw.rpc_sync("worker1", backward_there, (ctx, x * 2))
        local = applied_locally(x * 2, 1).sum()
        check_gradients(world, ctx, local, [[x], [weights["worker1"]]])


def test_a_pass_begun_in_another_thread() -> None:
    with world_with_weights(2) as world, gw.context() as ctx:
        x = doubles(3)
        y = gw.rpc_sync("worker1", apply_weight, (x,)).sum()
        seen: list[int] = []

        def run() -> None:
            with world.as_worker(0):
                seen.append(current_id())
                gw.backward(ctx, [y])

        with meanwhile(run):
            pass
        assert seen == [0]
        check_gradients(
            world, ctx, applied_locally(x, 1).sum(), [[x], [weights["worker1"]]]
        )


def fan_out(x: Tensor) -> list[Tensor]:
    return [apply_weight(x), torch.exp(x), x * 2, x.detach()]


def waste(x: Tensor) -> Tensor:
    """Makes calls whose results it does not use."""
    gw.rpc_sync("worker2", apply_weight, (x,))
    gw.rpc_sync("worker0", fan_out, (x,))
    gw.rpc_sync("worker2", same, (0,), {})
    return apply_weight(x)


def forget(x: Tensor) -> int:
    gw.rpc_sync("worker2", apply_weight, (apply_weight(x),))
    return 1


@orders
def test_results_that_are_not_used(seed: int | None) -> None:
    with world_with_weights(3, seed=seed) as world, gw.context() as ctx:
        x = doubles(3)
        gw.rpc_sync("worker1", apply_weight, (x,))
        gw.rpc_sync("worker2", fan_out, (x * 2,))
        a, b, *_ = gw.rpc_sync("worker1", fan_out, (x * 3,))
        c = gw.rpc_sync("worker1", waste, (a,))
        gw.rpc_sync("worker2", forget, (b,))
        gw.rpc_sync("worker1", forget, (c,))
        gw.remote("worker1", apply_weight, (c,))
        gw.backward(ctx, [(c * x).sum()])
        local = (applied_locally(applied_locally(x * 3, 1), 1) * x).sum()
        check_gradients(world, ctx, local, [[x], [weights["worker1"]], []])


def test_a_pass_that_needs_nobody_else() -> None:
    with world_with_weights(2) as world, gw.context() as ctx:
        x = doubles(3)
        gw.rpc_sync("worker1", apply_weight, (x,))
        gw.backward(ctx, [(x * x).sum()])
        check_gradients(world, ctx, (x * x).sum(), [[x], []])


def test_a_pass_while_a_call_is_under_way() -> None:
    with world_with_weights(3) as world, gw.context() as ctx, holding() as hold:
        x = doubles(3)
        h = x * 2
        y = gw.rpc_sync("worker1", apply_weight, (h,))
        future = gw.rpc_async("worker1", weigh_held, (y,))
        gw.backward(ctx, [y.sum()], retain_graph=True)
        hold.release.set()
        gw.backward(ctx, [future.wait().sum()], retain_graph=True)
        y = applied_locally(x * 2, 1)
        local = y.sum() + applied_locally(applied_locally(y, 2), 1).sum()
        own = [[x], [weights["worker1"]], [weights["worker2"]]]
        check_gradients(world, ctx, local, own)


# Calls that fail


def fail_after_a_call(x: Tensor) -> None:
    gw.rpc_sync("worker2", apply_weight, (x,))
    boom()


def unsendable(x: Tensor) -> Any:
    return x * 2, threading.Lock()


async def boom_async(x: Tensor) -> None:
    await gw.rpc_async("worker2", apply_weight, (x,))
    boom()


@orders
@two_ways
def test_a_pass_after_calls_that_failed(call: Way, seed: int | None) -> None:
    with world_with_weights(3, seed=seed) as world, gw.context() as ctx:
        x = doubles(3)
        h = x * 2
        for func, error in (
            (boom_with, Boom),
            (fail_after_a_call, Boom),
            (boom_async, Boom),
            (unsendable, TypeError),
        ):
            with pytest.raises(error):
                call("worker1", func, (h,))
        y = call("worker1", apply_weight, (h,))
        gw.backward(ctx, [(y * h).sum()])
        local = (applied_locally(2 * x, 1) * 2 * x).sum()
        check_gradients(world, ctx, local, [[x], [weights["worker1"]], []])


def weigh_held(x: Tensor) -> Tensor:
    held()
    return apply_weight(gw.rpc_sync("worker2", apply_weight, (x,)))


@pytest.mark.parametrize("ends", ["before", "after", "during"])
def test_a_pass_after_a_call_that_timed_out(ends: str) -> None:
    with world_with_weights(3) as world, gw.context() as ctx, holding() as hold:
        x = doubles(3)
        h = x * 2
        with pytest.raises(CallTimeout):
            gw.rpc_sync("worker1", weigh_held, (h,), timeout=0.05)
        y = gw.rpc_sync("worker1", apply_weight, (h,))
        if ends == "before":
            hold.release.set()
            wait_until(lambda: len(world[1].autograd.contexts.get(ctx).sends) == 3)
        if ends == "during":
            y.register_hook(lambda _: hold.release.set())
        gw.backward(ctx, [(y * h).sum()], retain_graph=True)
        hold.release.set()
        wait_until(lambda: len(world[1].autograd.contexts.get(ctx).sends) == 3)
        gw.backward(ctx, [(y * h).sum()])
        local = 2 * (applied_locally(2 * x, 1) * 2 * x).sum()
        check_gradients(world, ctx, local, [[x], [weights["worker1"]], []])


def weigh_and_raise(x: Tensor, path: list[str]) -> Tensor:
    h = apply_weight(x)
    if not path:
        return Raises.apply(h)
    result: Tensor = apply_weight(gw.rpc_sync(path[0], weigh_and_raise, (h, path[1:])))
    return result


@orders
@pytest.mark.parametrize("path", ["1", "12", "120", "0"])
def test_an_error_in_a_backward_and_then_none(path: str, seed: int | None) -> None:
    with world_with_weights(3, seed=seed) as world, gw.context() as ctx:
        x = doubles(3)
        first, *rest = [f"worker{digit}" for digit in path]
        y = gw.rpc_sync(first, weigh_and_raise, (x, rest))
        text = f"Error on Node {path[-1]}: this backward fails"
        for _ in range(5):
            with pytest.raises(GradwireError, match=text) as caught:
                gw.backward(ctx, [(y * x).sum()], retain_graph=True)
            cause = caught.value.__cause__
            assert type(cause) is ValueError
            if path[-1] != "0":
                assert isinstance(cause.__cause__, RemoteError)
        wait_until(lambda: not any(c.passes() for c in known(world, ctx)))
        Raises.is_on = False
        forget_gradients(world, ctx)
        gw.backward(ctx, [(y * x).sum()])
        local = (weigh_and_raise_here(x, path) * x).sum()
        leaves = [[x], [], []]
        for digit in path:
            leaves[int(digit)].append(weights[f"worker{digit}"])
        check_gradients(world, ctx, local, leaves)


def weigh_and_raise_here(x: Tensor, path: str) -> Tensor:
    h = applied_locally(x, int(path[0]))
    if len(path) == 1:
        return h
    return applied_locally(weigh_and_raise_here(h, path[1:]), int(path[0]))


def test_a_worker_that_died_is_missed_where_it_has_tensors_only() -> None:
    with World(3) as world, world.as_worker(0):
        with gw.context() as ctx:
            x = doubles(3)
            gw.rpc_sync("worker2", same, (1,))
            y = gw.rpc_sync("worker1", apply_weight, (x,))
            world.kill(2)
            wait_until(lambda: len(gw.get_worker_infos()) == 2)
            gw.backward(ctx, [y.sum()])
            leaves = [[x], [weights["worker1"]], []]
            check_gradients(world, ctx, applied_locally(x, 1).sum(), leaves)
        with gw.context() as ctx:
            y = gw.rpc_sync("worker1", apply_along, (x, ["worker0"]))
            world.kill(1)
            wait_until(lambda: len(gw.get_worker_infos()) == 1)
            began = time.monotonic()
            with pytest.raises(WorkerLostError, match="worker1"):
                gw.backward(ctx, [y.sum()])
            assert time.monotonic() - began < 2
        wait_until_no_contexts(world)


class Odd(BaseException):
    """No Exception."""


def weigh_first(x: Tensor) -> Tensor:
    weights["shared"] = x * 2
    return torch.sin(weights["shared"])


def weigh_second(x: Tensor) -> Tensor:
    """Shares a node with the first, so that one has to wait for the other."""

    def fail(gradient: Tensor) -> None:
        raise Odd("odd")

    weights["shared"].register_hook(fail)
    return torch.cos(weights["shared"]) * x


def test_what_is_raised_in_a_backward_may_be_no_exception() -> None:
    with world_with_weights(3) as world, gw.context() as ctx:
        a = gw.rpc_sync("worker1", weigh_first, (doubles(3),))
        b = gw.rpc_sync("worker2", apply_weight, (a,))
        c = gw.rpc_sync("worker1", weigh_second, (b,))
        with pytest.raises(GradwireError, match="Error on Node 1: odd"):
            gw.backward(ctx, [(b * c + a).sum()])
        wait_until(lambda: not any(c.passes() for c in known(world, ctx)))


def leave_early(x: Tensor) -> Tensor:
    result = x * 1
    result.register_hook(lambda gradient: sys.exit(3))
    return result


def test_an_exit_in_a_backward_is_an_error_of_that_worker() -> None:
    with world_with_weights(2), gw.context() as ctx:
        y = gw.rpc_sync("worker1", leave_early, (doubles(3),))
        with pytest.raises(GradwireError, match="Error on Node 1: 3"):
            gw.backward(ctx, [y.sum()])


def test_a_worker_that_dies_in_a_pass() -> None:
    with World(3) as world, world.as_worker(0):
        with gw.context() as ctx:
            x = doubles(3)
            y = gw.rpc_sync("worker1", apply_weight, (x,))
            z = gw.rpc_sync("worker2", weigh_hooked, (y,))
            killer = threading.Thread(target=lambda: _hooked.wait() and world.kill(2))
            killer.start()
            with pytest.raises(WorkerLostError, match="worker2"):
                gw.backward(ctx, [(z * y).sum()])
            _resume.set()
            killer.join()
        wait_until_no_contexts(world)


def weigh_hooked(x: Tensor) -> Tensor:
    def hook(gradient: Tensor) -> None:
        _hooked.set()
        _resume.wait(LIMIT)

    result = apply_weight(x)
    result.register_hook(hook)
    return result


def test_a_worker_whose_caller_died_forgets_its_context() -> None:
    with World(3) as world, world.as_worker(1):
        with world.as_worker(0), gw.context():
            gw.rpc_sync("worker1", apply_along, (doubles(3), ["worker2"]))
            world.kill(0)
        wait_until_no_contexts(world)
