"""Autograd through real calls: what workers compute with, the ways to call, and what comes of it.

The workers live in this process, so a test can see what each of them has. What they compute with
is in `weights`; a call can only get there by its name. Every gradient is compared with that of the
same program, run here.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import gradwire as gw
from gradwire._autograd.contexts import Context
from gradwire.api import current_worker
from gradwire.testing import World
from tests.autograd.functions import doubles
from tests.worlds import wait_until, wait_until_no_contexts

close = torch.testing.assert_close

weights: dict[str, Tensor] = {}
"""What each worker computes with."""


@contextmanager
def world_with_weights(size: int, **options: Any) -> Iterator[World]:
    """A world in which this thread is worker 0, with new weights; no context of it may stay."""
    weights.clear()
    weights.update({f"worker{i}": doubles(3) for i in range(4)})
    with World(size, **options) as world, world.as_worker(0):
        yield world
        wait_until_no_contexts(world.workers)


def check_gradients(
    world: World, ctx: int, local: Tensor, leaves: Sequence[Sequence[Tensor]]
) -> None:
    """As `check_gradients_of`, for all workers of a world."""
    check_gradients_of(world.workers, ctx, local, leaves)


def check_gradients_of(
    workers: Sequence[gw.Worker],
    ctx: int,
    local: Tensor,
    leaves: Sequence[Sequence[Tensor]],
) -> None:
    """Those of each worker are those of the same program run here, and `.grad` is left alone."""
    flat = [leaf for own in leaves for leaf in own]
    expected = dict(zip(flat, torch.autograd.grad(local, flat), strict=True))
    for worker, own in zip(workers, leaves, strict=True):
        is_known = ctx in [context.id for context in worker.autograd.contexts]
        found = worker.autograd.get_gradients(ctx) if is_known else {}
        close(found, {leaf: expected[leaf] for leaf in own})
        assert all(leaf.grad is None for leaf in own)


def known(world: World, ctx: int) -> list[Context]:
    """The context as each worker that knows it does."""
    return [
        c for worker in world.workers for c in worker.autograd.contexts if c.id == ctx
    ]


def forget_gradients(world: World, ctx: int) -> None:
    for context in known(world, ctx):
        context.gradients.clear()


def recorded(world: World, ctx: int) -> list[tuple[int, int]]:
    """How many sends and recvs each worker has."""
    return [(len(c.sends), len(c.recvs)) for c in known(world, ctx)]


def apply_weight(x: Tensor) -> Tensor:
    """Something of what came and what this worker has."""
    return torch.sin(x) * weights[current_worker().name]


def applied_locally(x: Tensor, worker: int) -> Tensor:
    """What `apply_weight` makes of it there, computed here."""
    return torch.sin(x) * weights[f"worker{worker}"]


def same(x: Any) -> Any:
    return x


# Ways to call


def by_sync(to: str, func: Any, args: Any) -> Any:
    return gw.rpc_sync(to, func, args)


def by_async(to: str, func: Any, args: Any) -> Any:
    return gw.rpc_async(to, func, args).wait()


def by_remote(to: str, func: Any, args: Any) -> Any:
    return gw.remote(to, func, args).to_here()


def by_confirmed_remote(to: str, func: Any, args: Any) -> Any:
    rref = gw.remote(to, func, args)
    wait_until(rref.confirmed_by_owner)
    return rref.to_here()


def by_await(to: str, func: Any, args: Any) -> Any:
    async def call() -> Any:
        return await gw.rpc_async(to, func, args)

    return asyncio.run(call())


def by_then(to: str, func: Any, args: Any) -> Any:
    return gw.rpc_async(to, func, args).then(lambda future: future.value()).wait()


WAYS = [by_sync, by_async, by_remote, by_confirmed_remote, by_await, by_then]
ways = pytest.mark.parametrize("call", WAYS)
two_ways = pytest.mark.parametrize("call", [by_sync, by_remote])
Way = Callable[[str, Any, Any], Any]


def apply_along(x: Tensor, path: list[str]) -> Tensor:
    """Weigh here, then on a path of other workers, and here again with what was there before."""
    h = apply_weight(x)
    if path:
        h = h + gw.rpc_sync(path[0], apply_along, (h, path[1:]))
    return apply_weight(h) * x


def applied_along_locally(x: Tensor, path: list[str]) -> Tensor:
    h = torch.sin(x) * weights[path[0]]
    if len(path) > 1:
        h = h + applied_along_locally(h, path[1:])
    return torch.sin(h) * weights[path[0]] * x


def current_id() -> int:
    context = current_worker().autograd.contexts.current()
    return 0 if context is None else context.id
