"""Contexts and backward passes in scripts: the same gradients as without them."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import gradwire as gw
from gradwire.testing import World
from tests.script.functions import add, fuse, script


def fused(x: Tensor, w: Tensor, to: str) -> Tensor:
    return gw.rpc_async(to, fuse, (x, w)).wait()


def mixed_with_local_work(x: Tensor, y: Tensor, w: Tensor, to: str) -> Tensor:
    h = torch.sigmoid(x * w + y).relu() * 2
    r = gw.rpc_async(to, fuse, (h, y)).wait()
    z = (r * w).exp() * h + x
    future = gw.rpc_async(to, fuse, (z, r))
    local = (h * r).mean()
    return (future.wait() * z).sum() + local


def the_same_without(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    h = torch.sigmoid(x * w + y).relu() * 2
    r = torch.tanh(h * y + h)
    z = (r * w).exp() * h + x
    return (torch.tanh(z * r + z) * z).sum() + (h * r).mean()


def leaf(*values: float) -> Tensor:
    return torch.tensor(values, requires_grad=True)


def test_the_optimizer_of_torchscript_keeps_gradients_exact(world: World) -> None:
    scripted = script(mixed_with_local_work)
    patterns = [(1, 1, 1), (1, 0, 1), (0, 0, 1), (1, 1, 1), (0, 1, 0)]
    torch.manual_seed(0)
    for pattern in patterns * 3:
        given = [torch.rand(4, requires_grad=bool(needs)) for needs in pattern]
        with gw.context() as ctx:
            loss = scripted(*given, "worker1")
            gw.backward(ctx, [loss])
            found = gw.get_gradients(ctx)
        twins = [each.detach().requires_grad_(each.requires_grad) for each in given]
        expected = the_same_without(*twins)
        expected.backward()
        torch.testing.assert_close(loss, expected)
        for each, twin in zip(given, twins, strict=True):
            assert (each in found) == each.requires_grad
            if each.requires_grad:
                torch.testing.assert_close(found[each], twin.grad)


def test_backward_and_gradients_inside_a_script(world: World) -> None:
    def step(ctx: int, x: Tensor, w: Tensor) -> dict[Tensor, Tensor]:
        h = gw.rpc_async("worker1", fuse, (x, w)).wait()
        gw.backward(ctx, [(h * w).sum()])
        return gw.get_gradients(ctx)

    scripted = script(step)
    assert "gradwire::dist_backward" in str(scripted.graph)
    assert "gradwire::get_gradients" in str(scripted.graph)
    x, w = leaf(0.5, 1.0), leaf(2.0, -1.0)
    with gw.context() as ctx:
        found = scripted(ctx, x, w)
    twin_x, twin_w = x.detach().requires_grad_(), w.detach().requires_grad_()
    (torch.tanh(twin_x * twin_w + twin_x) * twin_w).sum().backward()
    assert {id(key) for key in found} == {id(x), id(w)}
    torch.testing.assert_close(found[x], twin_x.grad)
    torch.testing.assert_close(found[w], twin_w.grad)


def test_retain_graph_is_passed_on(world: World) -> None:
    def twice(ctx: int, loss: Tensor) -> None:
        gw.backward(ctx, [loss], True)
        gw.backward(ctx, [loss], retain_graph=False)

    w = leaf(1.0)
    with gw.context() as ctx:
        script(twice)(ctx, gw.rpc_sync("worker1", torch.mul, (w, 3)).sum())
        assert gw.get_gradients(ctx)[w].item() == 6


def test_forks_belong_to_the_context(world: World) -> None:
    one = script(fused)

    def call(x: Tensor, w: Tensor, to: str) -> Tensor:
        forks = [torch.jit.fork(one, x, w, to) for _ in range(3)]
        total = torch.zeros(2)
        for fork in forks:
            total = total + torch.jit.wait(fork)
        return total

    x, w = leaf(0.5, 1.0), leaf(2.0, -1.0)
    with gw.context() as ctx:
        gw.backward(ctx, [script(call)(x, w, "worker1").sum()])
        found = gw.get_gradients(ctx)
    twin_x, twin_w = x.detach().requires_grad_(), w.detach().requires_grad_()
    (3 * torch.tanh(twin_x * twin_w + twin_x)).sum().backward()
    torch.testing.assert_close(found[x], twin_x.grad)
    torch.testing.assert_close(found[w], twin_w.grad)


def test_what_comes_after_a_wait_belongs_to_the_context(world: World) -> None:
    """The script goes on in another thread once the first future is there."""

    def call(x: Tensor, to: str) -> tuple[Tensor, Tensor]:
        first = gw.rpc_async(to, add, (x, x))
        a = first.wait().sum()
        second = gw.rpc_async(to, add, (x, x))
        return a, second.wait().sum()

    x = leaf(1.0, 2.0)
    scripted = script(call)
    for _ in range(10):
        with gw.context() as ctx:
            gw.backward(ctx, list(scripted(x, "worker1")))
            assert gw.get_gradients(ctx)[x].tolist() == [4, 4]


@torch.jit.ignore
def tripled_in_python(x: Tensor, to: str) -> Tensor:
    tripled: Tensor = gw.rpc_sync(to, torch.mul, (x, 3))
    return tripled


def python_after_a_wait(x: Tensor, to: str) -> Tensor:
    doubled = gw.rpc_async(to, add, (x, x))
    return tripled_in_python(doubled.wait(), to)


def python_in_a_fork(x: Tensor, to: str) -> Tensor:
    fork = torch.jit.fork(tripled_by_a_script, x, to)
    return torch.jit.wait(fork) + x


@script
def tripled_by_a_script(x: Tensor, to: str) -> Tensor:
    return tripled_in_python(x, to)


@pytest.mark.parametrize(
    ("function", "factor"), [(python_after_a_wait, 6), (python_in_a_fork, 4)]
)
@pytest.mark.parametrize("to", ["worker0", "worker1"])
def test_python_that_a_script_runs_belongs_to_the_context(
    world: World, function: Any, factor: int, to: str
) -> None:
    scripted = script(function)
    for _ in range(10):  # what has come already is not waited for in another thread
        x = leaf(1.0, 2.0)
        with gw.context() as ctx:
            gw.backward(ctx, [scripted(x, to).sum()])
            assert gw.get_gradients(ctx)[x].tolist() == [factor, factor]


@torch.jit.ignore
def with_a_context_of_its_own(x: Tensor, to: str) -> Tensor:
    with gw.context() as ctx:
        gw.backward(ctx, [tripled_by_a_script(x, to).sum()])
        return gw.get_gradients(ctx)[x]


def forks_one_with_a_context(x: Tensor, to: str) -> Tensor:
    return torch.jit.wait(torch.jit.fork(begins_a_context, x, to))


@script
def begins_a_context(x: Tensor, to: str) -> Tensor:
    return with_a_context_of_its_own(x, to)


def test_python_in_a_fork_begins_a_context_where_there_is_none(world: World) -> None:
    scripted = script(forks_one_with_a_context)
    assert scripted(leaf(1.0), "worker1").tolist() == [3]
    with gw.context(), pytest.raises(RuntimeError, match="Already have an autograd"):
        scripted(leaf(1.0), "worker1")


class Nested(torch.autograd.Function):
    """A backward pass in a backward pass, until torch takes another thread for it."""

    seen: Any = None

    @staticmethod
    def forward(ctx: Any, x: Tensor, current: Any, depth: int) -> Tensor:
        ctx.more = x.detach(), current, depth
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, current, depth = ctx.more
        if depth:
            with torch.enable_grad():
                Nested.apply(x.requires_grad_(), current, depth - 1).sum().backward()
        else:
            Nested.seen = threading.get_ident(), current()
        return gradients[0], None, None


def test_threads_of_the_autograd_engine_are_in_no_context(world: World) -> None:
    """They have the state of the thread that began the pass, and with it its note."""
    current = world[0].autograd.contexts.current
    with gw.context() as ctx:
        script(python_in_a_fork)(leaf(1.0), "worker1")
        Nested.apply(leaf(1.0), current, 100).sum().backward()
        assert Nested.seen[0] != threading.get_ident()
        assert Nested.seen[1] is None
        assert gw.get_gradients(ctx) == {}


def test_nothing_is_recorded_once_the_context_has_ended(world: World) -> None:
    x, w = leaf(0.5, 1.0), leaf(2.0, -1.0)
    one = script(fused)

    def call(x: Tensor, w: Tensor, to: str) -> Tensor:
        return torch.jit.wait(torch.jit.fork(one, x, w, to))

    scripted = script(call)
    with gw.context():
        scripted(x, w, "worker1")
    assert scripted(x, w, "worker1").grad_fn is None


def test_threads_have_contexts_of_their_own(world: World) -> None:
    one = script(fused)

    def call(x: Tensor, w: Tensor, to: str) -> Tensor:
        return torch.jit.wait(torch.jit.fork(one, x, w, to))

    scripted = script(call)
    scripted(leaf(1.0), leaf(1.0), "worker1")
    wrong: list[Any] = []

    def train(number: float) -> None:
        with world.as_worker(0):
            for _ in range(10):
                x, w = leaf(number), leaf(1.0)
                with gw.context() as ctx:
                    gw.backward(ctx, [scripted(x, w, "worker1").sum()])
                    if set(gw.get_gradients(ctx)) != {x, w}:
                        wrong.append(number)

    threads = [threading.Thread(target=train, args=(float(n),)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert wrong == []
