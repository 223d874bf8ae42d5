"""Hooks of tensors and of nodes run in a pass as they do in an ordinary backward.

Each program is run twice: locally, where torch fills `.grad`, and over workers.
"""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

import gradwire as gw
from gradwire._autograd import hooks
from gradwire.testing import World
from tests.autograd.functions import doubles

close = torch.testing.assert_close

Call = Callable[[Tensor], Tensor]
Hook = Callable[[Tensor, list[str]], object]


@pytest.fixture(autouse=True)
def no_hooks_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a program that has put none on anything yet."""
    made = RemovableHandle.next_id
    monkeypatch.setattr(hooks, "_not_on_nodes", [made])


def accumulator(leaf: Tensor) -> Any:
    """The node that collects the gradients of a leaf; lives as long as it is held."""
    node = leaf.view_as(leaf).grad_fn
    assert node is not None
    return node.next_functions[0][0]


# What a hook is put on: a leaf, which is used as a program says


def on_tensor(leaf: Tensor, called: list[str]) -> object:
    def hook(gradient: Tensor) -> Tensor:
        called.append("tensor")
        return gradient * 2

    return leaf.register_hook(hook)


def before_accumulator(leaf: Tensor, called: list[str]) -> object:
    def hook(gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        called.append("before")
        return (gradients[0] * 3,)

    node = accumulator(leaf)
    node.register_prehook(hook)
    return node


def after_accumulator(leaf: Tensor, called: list[str]) -> object:
    node = accumulator(leaf)
    node.register_hook(lambda *_: called.append("after"))
    return node


def all_of_them(leaf: Tensor, called: list[str]) -> object:
    node = accumulator(leaf)
    kept = [
        node,
        on_tensor(leaf, called),
        on_tensor(leaf, called),
        node.register_prehook(lambda gradients: called.append("looks")),
        before_accumulator(leaf, called),
        after_accumulator(leaf, called),
    ]
    gone = node.register_prehook(lambda gradients: called.append("gone"))
    gone.remove()
    return kept


HOOKS: list[Hook] = [on_tensor, before_accumulator, after_accumulator, all_of_them]


# What is done with the leaf; `call` carries a tensor to another worker, and back

weights: dict[str, Tensor] = {}


def apply_weight(x: Tensor) -> Tensor:
    return torch.sin(x) * weights["there"]


def at_the_root(call: Call) -> Tensor:
    return (weights["here"] * 3).sum()


def sent_by_itself(call: Call) -> Tensor:
    return call(weights["here"]).sum()


def sent_after_a_step(call: Call) -> Tensor:
    return call(weights["here"] * 3).sum()


def around_a_call(call: Call) -> Tensor:
    h = weights["here"] * 3
    return (call(h) * h).sum()


def on_both_sides(call: Call) -> Tensor:
    return (call(call(weights["here"] * 3)) * weights["here"]).sum()


PROGRAMS = [
    at_the_root,
    sent_by_itself,
    sent_after_a_step,
    around_a_call,
    on_both_sides,
]


def remotely(x: Tensor) -> Tensor:
    result: Tensor = gw.rpc_sync("worker1", apply_weight, (x,))
    return result


@pytest.mark.parametrize("is_profiled", [False, True], ids=["plain", "profiled"])
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("where", ["here", "there"])
@pytest.mark.parametrize("put", HOOKS)
def test_hooks_of_leaves(
    put: Hook, where: str, program: Callable[[Call], Tensor], is_profiled: bool
) -> None:
    weights.update(here=doubles(3), there=doubles(3))
    called: list[str] = []
    kept = put(weights[where], called)
    program(apply_weight).backward()
    expected = {leaf: leaf.grad for leaf in weights.values() if leaf.grad is not None}
    in_order = called.copy()
    for leaf in weights.values():
        leaf.grad = None
    called.clear()
    with World(2) as world, world.as_worker(0), gw.context() as ctx:
        loss = program(remotely)
        with torch.autograd.profiler.profile(enabled=is_profiled):
            gw.backward(ctx, [loss])
        found = gw.get_gradients(ctx)
        if program is not at_the_root:
            found |= world[1].autograd.get_gradients(ctx)
    assert called == in_order
    close(found, expected)
    assert all(leaf.grad is None for leaf in weights.values())
    del kept


@pytest.mark.parametrize("program", PROGRAMS[1:])
def test_hooks_of_leaves_where_grad_is_filled_too(
    program: Callable[[Call], Tensor],
) -> None:
    weights.update(here=doubles(3), there=doubles(3))
    called: list[str] = []
    kept = [all_of_them(leaf, called) for leaf in weights.values()]
    for leaf in weights.values():
        leaf.register_post_accumulate_grad_hook(lambda _: called.append("filled"))
    program(apply_weight).backward()
    expected = [leaf.grad for leaf in weights.values()]
    count = len(called)
    for leaf in weights.values():
        leaf.grad = None
    called.clear()
    with World(2) as world, world.as_worker(0), gw.context() as ctx:
        gw.backward(ctx, [program(remotely)], accumulate=True)
    assert len(called) == count
    assert called.count("filled") == 2
    close([leaf.grad for leaf in weights.values()], expected)
    del kept


def test_hooks_that_want_grad_to_be_filled_are_not_run_otherwise() -> None:
    weights.update(here=doubles(3), there=doubles(3))
    called: list[Tensor] = []
    weights["here"].register_post_accumulate_grad_hook(called.append)
    with World(2) as world, world.as_worker(0), gw.context() as ctx:
        gw.backward(ctx, [around_a_call(remotely)])
    assert called == []


def test_a_hook_may_take_the_gradient_away() -> None:
    weights.update(here=doubles(3), there=doubles(3))
    node = accumulator(weights["here"])
    node.register_prehook(lambda gradients: (None,))
    with World(2) as world, world.as_worker(0), gw.context() as ctx:
        gw.backward(ctx, [around_a_call(remotely)])
        assert gw.get_gradients(ctx) == {}


def test_a_gradient_that_a_hook_keeps_is_not_the_one_in_the_context() -> None:
    weights.update(here=doubles(3), there=doubles(3))
    node, kept = accumulator(weights["here"]), torch.ones(3, dtype=torch.float64)
    node.register_prehook(lambda gradients: (kept,))
    with World(2) as world, world.as_worker(0), gw.context() as ctx:
        gw.backward(ctx, [around_a_call(remotely)])
        found = gw.get_gradients(ctx)[weights["here"]]
        close(found, kept)
        assert found.data_ptr() != kept.data_ptr()


# The nodes of sends and recvs


@pytest.mark.parametrize("is_profiled", [False, True], ids=["plain", "profiled"])
@pytest.mark.parametrize("kind", ["residual", "chain"])
def test_hooks_of_recvs(kind: str, is_profiled: bool) -> None:
    weights.update(here=doubles(3), there=doubles(3))
    x, w = weights["here"], weights["there"]
    called: list[str] = []
    with World(2) as world, world.as_worker(0), gw.context() as ctx:
        h = x * 3
        y = remotely(h)
        node: Any = y.grad_fn
        assert node.name() == "torch::distributed::autograd::RecvRpcBackward"

        def before(gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            called.append("before")
            return (gradients[0] * 5,)

        node.register_prehook(before)
        node.register_hook(lambda *_: called.append("after"))
        y.register_hook(lambda gradient: called.append("tensor"))
        loss = (y * h).sum() if kind == "residual" else y.sum()
        with torch.autograd.profiler.profile(enabled=is_profiled):
            gw.backward(ctx, [loss])
        assert sorted(called) == ["after", "before", "tensor"]
        close(
            world[1].autograd.get_gradients(ctx)[w],
            5 * torch.sin(x * 3).detach() * (1 if kind == "chain" else h.detach()),
        )


@pytest.mark.parametrize("is_profiled", [False, True], ids=["plain", "profiled"])
@pytest.mark.parametrize("kind", ["residual", "chain", "by itself"])
def test_hooks_of_sends(kind: str, is_profiled: bool) -> None:
    weights.update(here=doubles(3), there=doubles(3))
    x, w = weights["here"], weights["there"]
    called: list[str] = []
    with World(2) as world, world.as_worker(0), gw.context() as ctx:
        h = x if kind == "by itself" else x * 3
        y = remotely(h)
        (send,) = world[0].autograd.contexts.get(ctx).sends.values()
        node: Any = send.node
        assert node.name() == "torch::distributed::autograd::SendRpcBackward"

        def after(inputs: Any, outputs: Any) -> Any:
            called.append("after")
            return tuple(None if g is None else g * 5 for g in inputs)

        node.register_prehook(lambda gradients: called.append("before"))
        node.register_hook(after)
        loss = (y * h).sum() if kind == "residual" else y.sum()
        with torch.autograd.profiler.profile(enabled=is_profiled):
            gw.backward(ctx, [loss])
        assert called == ["before", "after"]
        back = torch.cos(h) * w * 5 * (h if kind == "residual" else 1)
        direct = apply_weight(h) if kind == "residual" else 0
        expected = (back + direct) * (1 if kind == "by itself" else 3)
        close(gw.get_gradients(ctx)[x], expected.detach())


@pytest.mark.parametrize("put", [before_accumulator, after_accumulator, all_of_them])
def test_it_is_noted_when_a_node_gets_its_first_hook(put: Hook) -> None:
    leaf = doubles(3)
    node = accumulator(leaf)
    assert not hooks.before(node)
    assert not hooks.after(node)
    assert not hooks.were_made()
    kept = put(leaf, [])
    assert hooks.were_made()
    assert hooks.before(node) or hooks.after(node)
    del kept


HOOKS_BEFORE = """
import torch
x = torch.ones(3, requires_grad=True)
node = x.view_as(x).grad_fn.next_functions[0][0]
{put}
import gradwire
from gradwire._autograd import hooks
print(len(hooks.after(node)), hooks.were_made())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("put", "said"), [("node.register_hook(print)", "1 True"), ("", "0 False")]
)
def test_hooks_that_were_there_before_us_are_found(put: str, said: str) -> None:
    code = HOOKS_BEFORE.format(put=put)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == said
