"""Distributed autograd through real calls: what they carry is recorded, and gradients come back.

The workers live in this process, so a test can see what each of them has. What they compute with
is in `weights`; a call can only get there by its name. Every gradient is compared with that of the
same program, run here.
"""

import asyncio
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import gradwire as gw
from autograd_world import ENOUGH, Raises, doubles
from calls_world import Boom, boom, held, holding, meanwhile, orders, until
from gradwire.api import current_worker
from gradwire.autograd.contexts import Context
from gradwire.errors import CallTimeout, GradwireError, RemoteError, WorkerLostError
from gradwire.rpc.functions import async_execution
from gradwire.testing import World

close = torch.testing.assert_close

LARGE = 40_000
"""Elements that do not fit into a message itself."""

weights: dict[str, Tensor] = {}
"""What each worker computes with."""

_hooked, _resume = threading.Event(), threading.Event()
"""A backward has come to where it waits, and may go on (`weigh_hooked`)."""


@pytest.fixture(autouse=True)
def fresh() -> None:
    Raises.is_on = True
    _hooked.clear()
    _resume.clear()
    weights.clear()
    weights.update({f"worker{i}": doubles(3) for i in range(4)})


@contextmanager
def world_of(size: int, **options: Any) -> Iterator[World]:
    """A world in which this thread is worker 0, and of which no context may stay."""
    with World(size, **options) as world, world.as_worker(0):
        yield world
        see_nothing_left(world)


def see_nothing_left(world: World) -> None:
    infos = [w.autograd.debug_info for w in world.workers if not w.is_closed]
    until(lambda: not any(count for info in infos for count in info().values()))


def see_gradients(
    world: World, ctx: int, local: Tensor, leaves: Sequence[Sequence[Tensor]]
) -> None:
    """Those of each worker are those of the same program run here, and `.grad` is left alone."""
    flat = [leaf for own in leaves for leaf in own]
    expected = dict(zip(flat, torch.autograd.grad(local, flat), strict=True))
    for worker, own in zip(world.workers, leaves, strict=True):
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


def weigh(x: Tensor) -> Tensor:
    """Something of what came and what this worker has."""
    return torch.sin(x) * weights[current_worker().name]


def weighed(x: Tensor, worker: int) -> Tensor:
    """What `weigh` makes of it there, computed here."""
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
    until(rref.confirmed_by_owner)
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


@ways
@pytest.mark.parametrize("to", [0, 1])
def test_gradients_come_back_through_each_way_to_call(call: Way, to: int) -> None:
    with world_of(2) as world, gw.context() as ctx:
        x = doubles(3)
        h = x * 2
        y = call(f"worker{to}", weigh, (h,))
        close(y, weighed(h, to))
        gw.backward(ctx, [(y * h).sum()])
        local = (weighed(2 * x, to) * 2 * x).sum()
        leaves: list[list[Tensor]] = [[x], []]
        leaves[to].append(weights[f"worker{to}"])
        see_gradients(world, ctx, local, leaves)


@two_ways
def test_gradients_of_a_result_alone(call: Way) -> None:
    with world_of(2) as world, gw.context() as ctx:
        y = call("worker1", weigh, (torch.ones(3),))
        gw.backward(ctx, [y.sum()])
        local = weighed(torch.ones(3), 1).sum()
        see_gradients(world, ctx, local, [[], [weights["worker1"]]])


def test_arguments_given_by_name() -> None:
    with world_of(2) as world, gw.context() as ctx:
        x, y = doubles(3), doubles(3)
        kwargs = {"other": y, "alpha": 3}
        z = gw.rpc_sync("worker1", torch.add, (x * x,), kwargs)
        gw.backward(ctx, [z.sum()])
        see_gradients(world, ctx, (x * x + 3 * y).sum(), [[x, y], []])


def call_on(x: Tensor, path: list[str]) -> Tensor:
    """Weigh here, then on a path of other workers, and here again with what was there before."""
    h = weigh(x)
    if path:
        h = h + gw.rpc_sync(path[0], call_on, (h, path[1:]))
    return weigh(h) * x


def called_on(x: Tensor, path: list[str]) -> Tensor:
    h = torch.sin(x) * weights[path[0]]
    if len(path) > 1:
        h = h + called_on(h, path[1:])
    return torch.sin(h) * weights[path[0]] * x


@orders
@pytest.mark.parametrize("path", "1 10 0 00 11 120 1010 121 1212012".split())
def test_calls_that_make_calls(path: str, seed: int | None) -> None:
    with world_of(3, seed=seed) as world, gw.context() as ctx:
        x = doubles(3)
        names = [f"worker{digit}" for digit in path]
        h = x * 2
        y = gw.rpc_sync(names[0], call_on, (h, names[1:]))
        gw.backward(ctx, [(y * h).sum()])
        h = x * 2
        local = (called_on(h, names) * h).sum()
        leaves: list[list[Tensor]] = [[x], [], []]
        for name in set(names):
            leaves[int(name[-1])].append(weights[name])
        see_gradients(world, ctx, local, leaves)


def test_many_calls_at_once() -> None:
    with world_of(3) as world, gw.context() as ctx:
        x = doubles(3)
        h = x * 2
        futures = [
            gw.rpc_async(f"worker{1 + i % 2}", weigh, (h * i,)) for i in range(20)
        ]
        total = torch.stack([future.wait() for future in futures]).sum()
        gw.backward(ctx, [total])
        local = sum(weighed(2 * x * i, 1 + i % 2).sum() for i in range(20))
        assert isinstance(local, Tensor)
        own = [[x], [weights["worker1"]], [weights["worker2"]]]
        see_gradients(world, ctx, local, own)


# References


def weigh_at(rref: gw.RRef[Tensor]) -> Tensor:
    return weigh(rref.to_here())


@pytest.mark.parametrize("owner", [0, 1, 2])
def test_references_as_arguments(owner: int) -> None:
    with world_of(3) as world, gw.context() as ctx:
        x = doubles(3)
        rref = gw.remote(f"worker{owner}", weigh, (x * 2,))
        y = gw.rpc_sync("worker2", weigh_at, (rref,))
        gw.backward(ctx, [(y * x).sum()])
        local = (weighed(weighed(x * 2, owner), 2) * x).sum()
        leaves = [[x], [], [weights["worker2"]]]
        if owner != 2:
            leaves[owner].append(weights[f"worker{owner}"])
        see_gradients(world, ctx, local, leaves)


def test_a_reference_to_a_value_of_the_caller() -> None:
    with world_of(2) as world, gw.context() as ctx:
        x = doubles(3)
        y = gw.rpc_sync("worker1", weigh_at, (gw.RRef(x * 2),))
        gw.backward(ctx, [y.sum()])
        local = weighed(x * 2, 1).sum()
        see_gradients(world, ctx, local, [[x], [weights["worker1"]]])


def test_a_value_fetched_several_times() -> None:
    with world_of(3) as world, gw.context() as ctx:
        x = doubles(3)
        rref = gw.remote("worker1", weigh, (x,))
        a, b = rref.to_here(), rref.to_here()
        c = gw.rpc_sync("worker2", weigh_at, (rref,))
        gw.backward(ctx, [(a * b * c).sum()])
        w = weighed(x, 1)
        local = (w * w * weighed(w, 2)).sum()
        own = [[x], [weights["worker1"]], [weights["worker2"]]]
        see_gradients(world, ctx, local, own)


def test_a_value_made_before_the_context_began() -> None:
    with world_of(2) as world:
        rref = gw.remote("worker1", weigh, (torch.ones(3),))
        assert rref.to_here().grad_fn is None
        with gw.context() as ctx:
            gw.backward(ctx, [(rref.to_here() ** 2).sum()])
            local = (weighed(torch.ones(3), 1) ** 2).sum()
            see_gradients(world, ctx, local, [[], [weights["worker1"]]])
        del rref


class Layer:
    """Something with a weight of its own and methods."""

    made: "list[Layer]" = []  # noqa: RUF012 how a test gets at it

    def __init__(self) -> None:
        self.weight = doubles(3)
        Layer.made.append(self)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * self.weight

    @async_execution
    def forward_later(self, x: Tensor) -> torch.futures.Future[Tensor]:
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(self.forward(x))
        return future

    async def forward_async(self, x: Tensor) -> Tensor:
        await asyncio.sleep(0)
        return self.forward(x)


@pytest.mark.parametrize("method", "forward forward_later forward_async".split())
def test_methods_of_what_a_reference_stands_for(method: str) -> None:
    with world_of(2) as world:
        rref = gw.remote("worker1", Layer)  # before the context began
        with gw.context() as ctx:
            x = doubles(3)
            a = getattr(rref.rpc_sync(), method)(x)
            b = getattr(rref.rpc_async(), method)(a).wait()
            c = getattr(rref.remote(), method)(b).to_here()
            gw.backward(ctx, [c.sum()])
            layer = Layer.made.pop()
            local = layer.forward(layer.forward(layer.forward(x))).sum()
            see_gradients(world, ctx, local, [[x], [layer.weight]])
        del rref


# Functions that answer later


@async_execution
def weigh_by_then(x: Tensor) -> torch.futures.Future[Tensor]:
    def weigh_here(future: Any) -> Tensor:
        return torch.sin(future.value()) * weights["worker1"]

    return gw.rpc_async("worker2", weigh, (x,)).then(weigh_here)


@async_execution
def weigh_by_two_thens(x: Tensor) -> torch.futures.Future[Tensor]:
    """What follows what follows: the second callback makes the call."""

    def weigh_there(future: Any) -> Tensor:
        result = gw.rpc_sync("worker2", weigh, (future.value(),))
        return torch.sin(result) * weights["worker1"]

    return gw.rpc_async("worker2", same, (0,)).then(lambda _: x).then(weigh_there)


@async_execution
def weigh_in_a_thread(x: Tensor) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    there = gw.rpc_sync("worker2", weigh, (x,))

    def finish() -> None:
        future.set_result(torch.sin(there) * weights["worker1"])

    threading.Timer(0.01, finish).start()
    return future


async def weigh_by_await(x: Tensor) -> Tensor:
    there = await gw.rpc_async("worker2", weigh, (x,))
    await asyncio.sleep(0)
    return torch.sin(there) * weights["worker1"]


async def weigh_in_tasks(x: Tensor) -> Tensor:
    async def there() -> Tensor:
        result: Tensor = await gw.rpc_async("worker2", weigh, (x,))
        return result

    (result,) = await asyncio.gather(asyncio.create_task(there()))
    return torch.sin(result) * weights["worker1"]


@pytest.mark.parametrize("call", [by_sync, by_async, by_remote])
@pytest.mark.parametrize(
    "func",
    [
        weigh_by_then,
        weigh_by_two_thens,
        weigh_in_a_thread,
        weigh_by_await,
        weigh_in_tasks,
    ],
)
def test_functions_that_answer_later(call: Way, func: Any) -> None:
    with world_of(3) as world, gw.context() as ctx:
        x = doubles(3)
        y = call("worker1", func, (x * 2,))
        gw.backward(ctx, [(y * x).sum()])
        local = (weighed(weighed(x * 2, 2), 1) * x).sum()
        own = [[x], [weights["worker1"]], [weights["worker2"]]]
        see_gradients(world, ctx, local, own)


def test_callbacks_make_calls_of_the_context_they_were_given_in() -> None:
    with world_of(3) as world, gw.context() as ctx:
        x = doubles(3)

        def call_on(future: Any) -> Tensor:
            result: Tensor = gw.rpc_sync("worker2", weigh, (future.value(),))
            return result

        first = gw.rpc_async("worker1", weigh, (x,)).then(call_on)
        y = first.then(call_on).wait()
        gw.backward(ctx, [y.sum()])
        local = weighed(weighed(weighed(x, 1), 2), 2).sum()
        own = [[x], [weights["worker1"]], [weights["worker2"]]]
        see_gradients(world, ctx, local, own)


def test_callbacks_do_not_run_in_the_context_of_who_completes_the_future() -> None:
    seen: list[int] = []

    def note(future: Any) -> None:
        contexts = world[0].autograd.contexts
        current = contexts.current()
        seen.append(0 if current is None else current.id)

    with world_of(2) as world, holding() as hold:
        future = gw.rpc_async("worker1", held)  # in no context
        last = future.then(note).then(note)
        with gw.context():
            hold.release.set()
            future.wait()
            last.wait()
        assert seen == [0, 0]


def test_a_done_callback_makes_calls_of_its_context() -> None:
    with world_of(2) as world, gw.context() as ctx, holding() as hold:
        x, done, results = doubles(3), threading.Event(), []

        def call_on(future: Any) -> None:
            results.append(gw.rpc_sync("worker1", weigh, (x,)))
            done.set()

        gw.rpc_async("worker1", held).add_done_callback(call_on)
        hold.release.set()
        assert done.wait(ENOUGH)
        gw.backward(ctx, [results[0].sum()])
        local = weighed(x, 1).sum()
        see_gradients(world, ctx, local, [[x], [weights["worker1"]]])


def test_tasks_have_contexts_of_their_own() -> None:
    async def train(number: int) -> tuple[int, Tensor, Tensor]:
        x = doubles(3)
        with gw.context() as ctx:
            y = await gw.rpc_async("worker1", weigh, (x * number,))
            await asyncio.sleep(0.001 * (number % 3))
            z = await gw.rpc_async("worker2", weigh, (y,))
            gw.backward(ctx, [z.sum()])
            await asyncio.sleep(0)
            local = weighed(weighed(x * number, 1), 2).sum()
            (expected,) = torch.autograd.grad(local, [x])
            found = gw.get_gradients(ctx)
            assert list(found) == [x]
            return ctx, found[x], expected

    async def main() -> list[tuple[int, Tensor, Tensor]]:
        return await asyncio.gather(*map(train, range(1, 7)))

    with world_of(3):
        results = asyncio.run(main())
        assert len({ctx for ctx, _, _ in results}) == len(results)
        for _, found, expected in results:
            close(found, expected)


# What calls carry


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


@dataclass
class Batch:
    inputs: dict[str, Tensor]
    pairs: list[Pair]
    note: str
    numbers: Tensor


def take_apart(batch: Batch, *, scale: Tensor) -> dict[str, Any]:
    a, b = batch.inputs["a"], batch.inputs["b"]
    (pair,) = batch.pairs
    return {
        "sums": [a * pair.first * scale, (b - pair.second,)],
        "batch": Batch({"a": a}, [Pair(b, a * b)], batch.note, batch.numbers + 1),
    }


@two_ways
def test_tensors_deep_inside_arguments_and_results(call: Way) -> None:
    with world_of(2) as world, gw.context() as ctx:
        a, b, c, scale = (doubles(3) for _ in range(4))

        def make() -> tuple[Batch, Tensor]:
            pairs = [Pair(a * b, torch.ones(3, dtype=torch.float64))]
            return Batch({"a": a, "b": b * c}, pairs, "note", torch.arange(3)), scale

        def reduce(result: dict[str, Any]) -> Tensor:
            first, (second,) = result["sums"]
            batch = result["batch"]
            (pair,) = batch.pairs
            assert batch.note == "note"
            close(batch.numbers, torch.arange(3) + 1)
            total: Tensor = first * second + batch.inputs["a"] * pair.first
            return (total * pair.second).sum()

        batch, by = make()
        result = call("worker1", apply_with, (take_apart, (batch,), {"scale": by}))
        gw.backward(ctx, [reduce(result)])
        batch, by = make()
        local = reduce(take_apart(batch, scale=by))
        see_gradients(world, ctx, local, [[a, b, c, scale], []])


def apply_with(func: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)


@two_ways
@pytest.mark.parametrize("to", [0, 1])
def test_parameters_get_their_gradient(call: Way, to: int) -> None:
    with world_of(2) as world, gw.context() as ctx:
        p, x = nn.Parameter(torch.rand(3, dtype=torch.float64)), doubles(3)
        y = call(f"worker{to}", torch.mul, (p, x))
        z = call(f"worker{to}", torch.stack, ([p, x],))
        gw.backward(ctx, [y.sum() + (z**2).sum()])
        local = (p * x).sum() + (p**2).sum() + (x**2).sum()
        see_gradients(world, ctx, local, [[p, x], []])


def own_parameter() -> Tensor:
    return weights["parameter"]


@two_ways
def test_parameters_as_results_get_their_gradient_where_they_are(call: Way) -> None:
    parameter = nn.Parameter(torch.rand(3, dtype=torch.float64))
    weights["parameter"] = parameter
    with world_of(2) as world, gw.context() as ctx:
        y = call("worker1", own_parameter, ())
        assert type(y) is nn.Parameter
        gw.backward(ctx, [(y * y).sum()])
        local = (parameter * parameter).sum()
        see_gradients(world, ctx, local, [[], [parameter]])


def run_module(module: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = module(x)
    return result


def test_the_parameters_of_a_module_that_travels_get_their_gradients() -> None:
    with world_of(2) as world, gw.context() as ctx:
        module, x = nn.Linear(3, 2).double(), doubles(4, 3)
        y = gw.rpc_sync("worker1", run_module, (module, x))
        gw.backward(ctx, [(y**2).sum()])
        local = (module(x) ** 2).sum()
        see_gradients(world, ctx, local, [[*module.parameters(), x], []])


class Tagged(Tensor):
    """A tensor with a word on it."""

    tag: str


def tagged(tensor: Tensor, tag: str) -> Tagged:
    made = tensor.as_subclass(Tagged)
    made.tag = tag
    return made


def retag(x: Tagged) -> Tagged:
    assert type(x) is Tagged
    return tagged(weigh(x), x.tag + " again")


@two_ways
def test_subclasses_of_tensors_get_their_gradient(call: Way) -> None:
    with world_of(2) as world, gw.context() as ctx:
        leaf = tagged(torch.rand(3, dtype=torch.float64), "leaf").requires_grad_()
        x = doubles(3)
        y = call("worker1", retag, (leaf,))
        z = call("worker1", retag, (tagged(x * 2, "x"),))
        assert type(y) is type(z) is Tagged
        assert (y.tag, z.tag) == ("leaf again", "x again")
        gw.backward(ctx, [(y * z).sum().as_subclass(Tensor)])
        local = (weighed(leaf, 1) * weighed(x * 2, 1)).sum()
        see_gradients(world, ctx, local, [[leaf, x], [weights["worker1"]]])


class Sealed(Tensor):
    """Says itself how it is pickled."""

    seal = "none"

    def __reduce_ex__(self, protocol: Any) -> Any:
        inner = self.detach().as_subclass(Tensor)
        return sealed, (inner, self.seal, self.requires_grad)


def sealed(tensor: Tensor, seal: str, grad: bool = False) -> Sealed:
    made = tensor.as_subclass(Sealed).requires_grad_(grad or tensor.requires_grad)
    made.seal = seal
    return made


def reseal(x: Sealed) -> Sealed:
    assert type(x) is Sealed
    return sealed(weigh(x), x.seal + " again")


@two_ways
def test_subclasses_that_pickle_themselves_get_their_gradient(call: Way) -> None:
    with world_of(2) as world, gw.context() as ctx:
        x, leaf = doubles(3), sealed(torch.rand(3, dtype=torch.float64), "leaf", True)
        y = call("worker1", reseal, (sealed(x * 2, "wax"),))
        z = call("worker1", reseal, (leaf,))
        assert type(y) is type(z) is Sealed
        assert (y.seal, z.seal) == ("wax again", "leaf again")
        gw.backward(ctx, [(y * z).sum().as_subclass(Tensor)])
        local = (weighed(x * 2, 1) * weighed(leaf, 1)).sum()
        see_gradients(world, ctx, local, [[x, leaf], [weights["worker1"]]])


def mix(tensors: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    a, b, c = tensors
    return a * b, [b * c, c]


def test_kinds_of_tensors_side_by_side() -> None:
    with world_of(2) as world, gw.context() as ctx:
        leaf = tagged(torch.rand(3, dtype=torch.float64), "leaf").requires_grad_()
        x, p = doubles(3), nn.Parameter(torch.rand(3, dtype=torch.float64))
        ab, (bc, c) = gw.rpc_sync("worker1", mix, ([x, p, leaf],))
        gw.backward(ctx, [(ab * bc * c).sum().as_subclass(Tensor)])
        local = (x * p * p * leaf * leaf).sum()
        see_gradients(world, ctx, local, [[x, p, leaf], []])


def views(x: Tensor) -> list[Tensor]:
    return [x[0], x[1:], x.t(), x.expand(2, 3, 3), x.diagonal(), x.view(9)[::2]]


@pytest.mark.parametrize("index", range(6))
@pytest.mark.parametrize("in_list", [False, True])
def test_views_as_arguments(index: int, in_list: bool) -> None:
    with world_of(2) as world, gw.context() as ctx:
        x = doubles(3, 3)
        view = views(x * 2)[index]
        if in_list:
            y = gw.rpc_sync("worker1", torch.stack, ([view, view],))
        else:
            y = gw.rpc_sync("worker1", torch.mul, (view, view))
        gw.backward(ctx, [(y**2).sum()])
        view = views(x * 2)[index]
        local = torch.stack([view, view]) if in_list else view * view
        see_gradients(world, ctx, (local**2).sum(), [[x], []])


def weigh_views(x: Tensor) -> list[Tensor]:
    return views(x * weights["square"])


def test_views_as_results() -> None:
    with world_of(2) as world, gw.context() as ctx:
        x = doubles(3, 3)
        weights["square"] = doubles(3, 3)
        found = gw.rpc_sync("worker1", weigh_views, (x,))
        gw.backward(ctx, [sum((view**2).sum() for view in found)])  # type: ignore[list-item]
        local = sum((view**2).sum() for view in weigh_views(x))
        assert isinstance(local, Tensor)
        see_gradients(world, ctx, local, [[x], [weights["square"]]])


def change(tensors: list[Tensor]) -> list[Tensor]:
    """Changes in place what arrived."""
    a, b = tensors
    a.add_(b)
    b.mul_(3)
    return [a, b]


def change_one(x: Tensor) -> Tensor:
    x.mul_(3)
    x[0] = 7
    return x


def test_what_arrived_can_be_changed_in_place() -> None:
    with world_of(2) as world, gw.context() as ctx:
        x, y = doubles(3), doubles(3)
        a, b = gw.rpc_sync("worker1", change, ([x * 1, y * 1],))
        c = gw.rpc_sync("worker1", change_one, (x * 1,))
        c.mul_(y)
        gw.backward(ctx, [(a * b + c).sum()])
        a, b = change([x * 1, y * 1])
        c = change_one(x * 1) * y
        see_gradients(world, ctx, (a * b + c).sum(), [[x, y], []])


def change_views(tensors: list[Tensor]) -> Tensor:
    first, second, whole, constant = tensors
    whole.mul_(3)
    first.add_(second)
    constant.zero_()
    return first * second * whole[:2]


@pytest.mark.parametrize("size", [4, LARGE])
def test_views_of_one_tensor_do_not_share_memory_once_they_have_a_history(
    size: int,
) -> None:
    with world_of(2) as world, gw.context() as ctx:
        x = doubles(size)
        h = x * 2
        views = [h[:2], h[1:3], h, h.detach()]
        y = gw.rpc_sync("worker1", change_views, (views,))
        gw.backward(ctx, [(y * y).sum()], retain_graph=True)
        local = change_views([view.clone() for view in views])
        close(y, local)
        see_gradients(world, ctx, (local * local).sum(), [[x], []])


def sparse(*, grad: bool = True) -> Tensor:
    places = torch.tensor([[0, 1, 1], [2, 0, 2]])
    made = torch.sparse_coo_tensor(
        places, torch.rand(3, dtype=torch.float64), (3, 3), check_invariants=False
    )
    return made.coalesce().detach().requires_grad_(grad)


@two_ways
def test_sparse_tensors_as_arguments_and_results(call: Way) -> None:
    with world_of(2) as world, gw.context() as ctx:
        s, t, constant = sparse(), sparse(), sparse(grad=False)
        y = call("worker1", torch.add, (s, t))
        z = call("worker1", torch.add, (s, constant))
        assert y.layout is z.layout is torch.sparse_coo
        gw.backward(ctx, [torch.sparse.sum(y) + torch.sparse.sum(z)])
        local = torch.sparse.sum(s + t) + torch.sparse.sum(s + constant)
        expected = torch.autograd.grad(local, [s, t])
        found = gw.get_gradients(ctx)
        assert set(found) == {s, t}
        for leaf, gradient in zip((s, t), expected, strict=True):
            close(found[leaf].to_dense(), gradient.to_dense())
        assert world[1].autograd.get_gradients(ctx) == {}


def test_sparse_times_dense() -> None:
    with world_of(2), gw.context() as ctx:
        s, x = sparse(), doubles(3, 2)
        y = gw.rpc_sync("worker1", torch.sparse.mm, (s, x))
        gw.backward(ctx, [(y**2).sum()])
        gs, gx = torch.autograd.grad((torch.sparse.mm(s, x) ** 2).sum(), [s, x])
        found = gw.get_gradients(ctx)
        close(found[s].to_dense(), gs.to_dense())
        close(found[x], gx)


def test_gradients_of_leaves_in_other_sparse_layouts() -> None:
    with world_of(2), gw.context() as ctx:
        s = torch.eye(3, dtype=torch.float64).to_sparse_csr().requires_grad_()
        x = doubles(3, 2)
        y = gw.rpc_sync("worker1", torch.matmul, (s, x))
        gw.backward(ctx, [(y**2).sum()])
        gs, gx = torch.autograd.grad((torch.matmul(s, x) ** 2).sum(), [s, x])
        found = gw.get_gradients(ctx)
        close(found[s].to_dense(), gs.to_dense())
        close(found[x], gx)


def test_a_value_fetched_without_gradients_has_no_history() -> None:
    with world_of(2), gw.context():
        rref = gw.remote("worker1", torch.mul, (doubles(3), 2))
        assert rref.to_here().grad_fn is not None
        with torch.no_grad():
            assert rref.to_here().grad_fn is None


bags: list[nn.EmbeddingBag] = []


def look_up(words: Tensor, starts: Tensor) -> Tensor:
    result: Tensor = bags[0](words, starts)
    return result


def test_sparse_gradients_of_an_embedding_bag_add_up() -> None:
    bags[:] = [nn.EmbeddingBag(10, 4, mode="sum", sparse=True).double()]
    batches = [torch.tensor([1, 2, 4, 5]), torch.tensor([4, 3, 2, 9])]
    starts = torch.tensor([0, 2])
    with world_of(2) as world, gw.context() as ctx:
        found = [gw.rpc_sync("worker1", look_up, (words, starts)) for words in batches]
        gw.backward(ctx, [(found[0] * found[1]).sum()], retain_graph=True)
        gw.backward(ctx, [found[0].sum()])
        a, b = (look_up(words, starts) for words in batches)
        weight = bags[0].weight
        (expected,) = torch.autograd.grad((a * b).sum() + a.sum(), [weight])
        assert gw.get_gradients(ctx) == {}
        ((leaf, gradient),) = world[1].autograd.get_gradients(ctx).items()
        assert leaf is weight
        assert gradient.is_sparse
        close(gradient.to_dense(), expected.to_dense())


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]


def widen(tensors: list[Tensor], numbers: Tensor) -> list[Tensor]:
    return [tensor * numbers for tensor in tensors]


def test_dtypes_side_by_side() -> None:
    with world_of(2), gw.context() as ctx:
        leaves = [torch.rand(3).to(dtype).requires_grad_() for dtype in DTYPES]
        numbers = torch.tensor([1, 2, 3])
        found = gw.rpc_sync("worker1", widen, (leaves, numbers))
        assert [tensor.dtype for tensor in found] == DTYPES
        gw.backward(ctx, [(tensor.abs() ** 2).sum() for tensor in found])
        squares = [(tensor.abs() ** 2).sum() for tensor in widen(leaves, numbers)]
        expected = torch.autograd.grad(squares, leaves)
        close(gw.get_gradients(ctx), dict(zip(leaves, expected, strict=True)))


def test_a_gradient_in_another_dtype_than_what_it_flows_into() -> None:
    with world_of(2) as world, gw.context() as ctx:
        x = torch.rand(3, requires_grad=True)
        y = gw.rpc_sync("worker1", weigh, (x,))  # in double precision there
        assert y.dtype is torch.float64
        gw.backward(ctx, [y.sum()])
        local = weighed(x, 1).sum()
        see_gradients(world, ctx, local, [[x], [weights["worker1"]]])


def split(mixed: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Of four: with and without a gradient, and numbers."""
    a, b, c, numbers = mixed
    return a * b, c * 2, numbers + 1


@pytest.mark.parametrize("spread", [False, True])
def test_only_what_needs_a_gradient_is_recorded(spread: bool) -> None:
    with world_of(2) as world, gw.context() as ctx:
        a, b, c = doubles(3), doubles(3).detach(), doubles(3).detach()
        mixed = [a, b, c, torch.arange(3)]
        if spread:
            ab, c2, numbers = gw.rpc_sync("worker1", split_spread, mixed)
        else:
            ab, c2, numbers = gw.rpc_sync("worker1", split, (mixed,))
        assert (ab.requires_grad, c2.requires_grad) == (True, False)
        assert not numbers.requires_grad
        close(numbers, torch.arange(3) + 1)
        assert recorded(world, ctx) == [(1, 1), (1, 1)]
        for context in known(world, ctx):
            (send,), (recv,) = context.sends.values(), context.recvs.values()
            assert send.crossing.count == recv.crossing.count == 1
        gw.backward(ctx, [(ab * c2 * numbers).sum()])
        local = (a * b * c * 2 * (torch.arange(3) + 1)).sum()
        see_gradients(world, ctx, local, [[a], []])


def split_spread(*mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return split(list(mixed))


@two_ways
@pytest.mark.parametrize("in_list", [False, True])
def test_large_tensors(call: Way, in_list: bool) -> None:
    with world_of(2) as world, gw.context() as ctx:
        x, y = doubles(LARGE), doubles(LARGE)
        if in_list:
            z = call("worker1", torch.stack, ([x * 2, y],))
            local = torch.stack([x * 2, y])
        else:
            z = call("worker1", torch.mul, (x * 2, y))
            local = x * 2 * y
        gw.backward(ctx, [(z**2).sum()])
        see_gradients(world, ctx, (local**2).sum(), [[x, y], []])


@pytest.mark.parametrize("shape", [(), (0,), (1,), (2, 0, 3)])
def test_shapes_of_few_elements(shape: tuple[int, ...]) -> None:
    with world_of(2) as world, gw.context() as ctx:
        x = torch.rand(shape, dtype=torch.float64, requires_grad=True)
        y = gw.rpc_sync("worker1", torch.exp, (x,))
        gw.backward(ctx, [y.sum()])
        see_gradients(world, ctx, torch.exp(x).sum(), [[x], []])


def twice(pair: list[Tensor]) -> Tensor:
    return pair[0] * torch.sin(pair[1])


@pytest.mark.parametrize("is_leaf", [False, True])
def test_the_same_tensor_twice(is_leaf: bool) -> None:
    with world_of(2) as world, gw.context() as ctx:
        x = doubles(3)
        h = x if is_leaf else x * 2
        y = gw.rpc_sync("worker1", torch.mul, (h, h))
        z = gw.rpc_sync("worker1", twice, ([h, h],))
        a, b = gw.rpc_sync("worker1", same, ((h, h),))
        gw.backward(ctx, [(y * z + a * a * b).sum()], retain_graph=True)
        local = (h * h * h * torch.sin(h) + h**3).sum()
        see_gradients(world, ctx, local, [[x], []])


@two_ways
@pytest.mark.parametrize("is_leaf", [False, True])
@pytest.mark.parametrize("in_list", [False, True])
def test_a_tensor_that_is_passed_through(
    call: Way, is_leaf: bool, in_list: bool
) -> None:
    with world_of(2) as world, gw.context() as ctx:
        x = doubles(3)
        h = x if is_leaf else x * 2
        y = call("worker1", same, ([h],))[0] if in_list else call("worker1", same, (h,))
        gw.backward(ctx, [(y * h * h).sum()], retain_graph=True)
        see_gradients(world, ctx, (h**3).sum(), [[x], []])


@orders
def test_a_tensor_that_goes_back_and_forth(seed: int | None) -> None:
    with world_of(3, seed=seed) as world, gw.context() as ctx:
        x = doubles(3)
        y = x
        for round_trip in range(6):
            y = gw.rpc_sync(f"worker{1 + round_trip % 2}", weigh, (y + x,))
        gw.backward(ctx, [y.sum()])
        local = x
        for round_trip in range(6):
            local = weighed(local + x, 1 + round_trip % 2)
        own = [[x], [weights["worker1"]], [weights["worker2"]]]
        see_gradients(world, ctx, local.sum(), own)


class ByPickle:
    """A serializer of a user's own."""

    def dumps(self, obj: Any, tensors: list[Tensor]) -> bytes:
        def without(value: Any) -> Any:
            if isinstance(value, Tensor):
                tensors.append(value)
                return _Place(len(tensors) - 1)
            if type(value) in (list, tuple):
                return type(value)(map(without, value))
            return value

        return pickle.dumps(without(obj))

    def loads(self, data: bytes | memoryview, tensors: list[Tensor]) -> Any:
        def put_back(value: Any) -> Any:
            if isinstance(value, _Place):
                return tensors[value.index]
            if type(value) in (list, tuple):
                return type(value)(map(put_back, value))
            return value

        return put_back(pickle.loads(data))


@dataclass
class _Place:
    index: int


@pytest.mark.parametrize(
    "options",
    [{"allow": [torch]}, {"serializer": ByPickle()}],
    ids=["allow-list", "serializer"],
)
def test_gradients_through_other_encodings(options: dict[str, Any]) -> None:
    with world_of(2, **options) as world, gw.context() as ctx:
        x, y, constant = doubles(3), doubles(3), doubles(3).detach()
        a = gw.rpc_sync("worker1", torch.mul, (x * 2, y))
        b = gw.rpc_sync("worker1", torch.stack, ([x, constant, a, y, a],))
        gw.backward(ctx, [(b**2).sum()])
        a = x * 2 * y
        local = (torch.stack([x, constant, a, y, a]) ** 2).sum()
        see_gradients(world, ctx, local, [[x, y], []])


# Nothing recorded


@ways
def test_nothing_is_recorded_without_gradients_at_the_caller(call: Way) -> None:
    with world_of(2) as world, gw.context() as ctx:
        x, p = doubles(3), nn.Parameter(torch.rand(3))
        with torch.no_grad():
            y = call("worker1", weigh, (x,))
            z = call("worker1", torch.stack, ([p, p],))
        assert not y.requires_grad
        assert not z.requires_grad
        assert recorded(world, ctx) == [(0, 0), (0, 0)]
        assert [context.known - {i} for i, context in enumerate(known(world, ctx))] == [
            {1},
            {0},
        ]


@torch.no_grad()
def weigh_quietly(x: Tensor) -> Tensor:
    return weigh(x)


@two_ways
def test_nothing_is_recorded_of_a_result_without_gradients(call: Way) -> None:
    with world_of(2) as world, gw.context() as ctx:
        x = doubles(3)
        y = call("worker1", weigh_quietly, (x,))
        assert not y.requires_grad
        assert recorded(world, ctx) == [(1, 0), (0, 1)]
        gw.backward(ctx, [(y * x).sum()])
        local = (weighed(x, 1).detach() * x).sum()
        see_gradients(world, ctx, local, [[x], []])


@two_ways
def test_nothing_is_recorded_where_no_tensor_needs_a_gradient(call: Way) -> None:
    with world_of(2) as world, gw.context() as ctx:
        y = call("worker1", torch.add, (torch.ones(3), torch.ones(3)))
        assert not y.requires_grad
        assert recorded(world, ctx) == [(0, 0), (0, 0)]


@two_ways
def test_nothing_is_recorded_outside_of_contexts(call: Way) -> None:
    with world_of(2) as world:
        x = doubles(3)
        y = call("worker1", weigh, (x,))
        assert y.grad_fn is None
        assert [len(worker.autograd.contexts) for worker in world.workers] == [0, 0]
        with gw.context() as ctx:
            assert world[0].autograd.contexts.get(ctx).sends == {}


def test_calls_that_cannot_be_sent_leave_nothing() -> None:
    with world_of(2) as world, gw.context() as ctx:
        x = doubles(3)
        with pytest.raises(TypeError):
            gw.rpc_sync("worker1", same, ((x, threading.Lock()),))
        with pytest.raises(ValueError, match="nobody"):
            gw.rpc_sync("nobody", same, (x,))
        assert world[0].autograd.contexts.get(ctx).sends == {}
        y = gw.rpc_sync("worker1", weigh, (x,))
        gw.backward(ctx, [y.sum()])
        see_gradients(world, ctx, weighed(x, 1).sum(), [[x], [weights["worker1"]]])


def current_id() -> int:
    context = current_worker().autograd.contexts.current()
    return 0 if context is None else context.id


def test_calls_of_others_are_not_of_this_context() -> None:
    with world_of(2) as world, gw.context() as ctx, holding() as hold:
        future = gw.rpc_async("worker1", held)
        assert world[1].rpc_sync("worker0", current_id) == 0
        assert gw.rpc_sync("worker1", current_id) == ctx
        hold.release.set()
        future.wait()


@pytest.mark.parametrize("func", [weigh_by_then, weigh_by_await, weigh_in_a_thread])
def test_nothing_is_recorded_by_functions_that_answer_later(func: Any) -> None:
    with world_of(3) as world, gw.context() as ctx:
        with torch.no_grad():
            gw.rpc_sync("worker1", func, (doubles(3),))
        assert recorded(world, ctx) == [(0, 0), (0, 0), (0, 0)]


def nested(layout: torch.layout) -> Tensor:
    members = [torch.rand(2, 3), torch.rand(4, 3)]
    return torch.nested.nested_tensor(members, layout=layout, requires_grad=True)


def make_nested(layout: torch.layout) -> Tensor:
    return nested(layout)


no_nested = pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors:UserWarning"
)
layouts = pytest.mark.parametrize("layout", [torch.jagged, torch.strided])


@no_nested
@layouts
def test_what_cannot_be_recorded_is_not_sent(layout: torch.layout) -> None:
    with world_of(2) as world, gw.context() as ctx:
        with pytest.raises(
            TypeError, match="that requires grad cannot be sent in a con"
        ):
            gw.rpc_sync("worker1", same, ((gw.RRef(1), nested(layout)),))
        assert [len(c.sends) for c in known(world, ctx)] == [0]
        with pytest.raises(
            TypeError, match="that requires grad cannot be sent in a con"
        ):
            gw.rpc_sync("worker1", make_nested, (layout,))
        with torch.no_grad():
            assert gw.rpc_sync("worker1", same, (nested(layout),)).is_nested
        assert gw.rpc_sync("worker1", same, (nested(layout).detach(),)).is_nested
    # And the world ended: nobody waits for the reference to arrive.


def square_jagged(values: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    made = torch.nested.nested_tensor_from_jagged(values, offsets) ** 2
    return made.values(), made.offsets()


def test_the_parts_of_a_jagged_tensor_can_be_sent() -> None:
    with world_of(2), gw.context() as ctx:
        x = doubles(6, 3)
        jagged = torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 2, 6]))
        parts = jagged.values(), jagged.offsets()
        values, offsets = gw.rpc_sync("worker1", square_jagged, parts)
        back = torch.nested.nested_tensor_from_jagged(values, offsets)
        gw.backward(ctx, [back.values().sum()])
        close(gw.get_gradients(ctx), {x: 2 * x.detach()})


# The graph


def names(nodes: Sequence[tuple[Any, int]]) -> list[str]:
    return [node.name() for node, _ in nodes]


SEND = "torch::distributed::autograd::SendRpcBackward"
RECV = "torch::distributed::autograd::RecvRpcBackward"


@pytest.mark.parametrize(
    ("call", "to"),
    [(by_sync, 0), (by_async, 0), (by_sync, 1), (by_async, 1), (by_remote, 1)],
)
def test_the_graph_of_a_call(call: Way, to: int) -> None:
    with world_of(2) as world, gw.context() as ctx:
        a, b = doubles(3), doubles(3)
        y = call(f"worker{to}", torch.add, (a, b))
        here, *there = known(world, ctx)
        recv = y.grad_fn
        assert recv.name() == RECV
        assert recv in here.recvs.values()
        sends = list(here.sends.values())
        assert sends[0].node.name() == SEND
        leaves = [node.variable for node, _ in sends[0].node.next_functions]
        assert list(map(id, leaves)) == [id(a), id(b)]
        (answer,) = there[0].sends.values() if there else sends[1:]
        assert answer.node.name() == SEND
        ((add, _),) = answer.node.next_functions
        assert add.name() == "AddBackward0"
        assert names(add.next_functions) == [RECV, RECV]
        assert add.next_functions[0][0] is add.next_functions[1][0]
        assert [index for _, index in add.next_functions] == [0, 1]


def add_at(to: str, a: Tensor, b: Tensor) -> Tensor:
    result: Tensor = gw.rpc_sync(to, torch.add, (a, b))
    return result


@pytest.mark.parametrize("to", [0, 2])
def test_the_graph_of_a_nested_call(to: int) -> None:
    with world_of(3) as world, gw.context() as ctx:
        a, b = doubles(3), doubles(3)
        y = gw.rpc_sync("worker1", add_at, (f"worker{to}", a, b))
        assert y.grad_fn.name() == RECV
        middle = known(world, ctx)[1] if to else world[1].autograd.contexts.get(ctx)
        onward, answer = middle.sends.values()
        assert names(onward.node.next_functions) == [RECV, RECV]
        assert names(answer.node.next_functions) == [RECV]
        first, second = middle.recvs.values()
        assert onward.node.next_functions[0][0] is first
        assert answer.node.next_functions[0][0] is second
        last = world[to].autograd.contexts.get(ctx)
        assert len(last.sends) == (1 if to else 2)


def test_what_arrives_together_has_one_node() -> None:
    with world_of(2), gw.context():
        x = doubles(3)
        outputs = gw.rpc_sync("worker1", torch.unbind, (x * 2,))
        assert len(outputs) == 3
        assert len({id(output.grad_fn) for output in outputs}) == 1
        assert [output.output_nr for output in outputs] == [0, 1, 2]


# Contexts


def test_ids_tell_who_began_a_context() -> None:
    with world_of(2) as world:
        with gw.context() as first:
            pass
        with gw.context() as second:
            pass
        with world.as_worker(1), gw.context() as other:
            pass
        assert [number >> 48 for number in (first, second, other)] == [0, 0, 1]
        assert first != second


def count_known(ctx: int) -> int:
    return len(current_worker().autograd.contexts.get(ctx).known)


def call_count(to: str, ctx: int) -> int:
    return int(gw.rpc_sync(to, count_known, (ctx,)))


def test_workers_are_known_also_where_no_tensor_travels() -> None:
    with world_of(4) as world, gw.context() as ctx:
        gw.rpc_sync("worker1", call_count, ("worker2", ctx))
        gw.rpc_async("worker0", count_known, (ctx,)).wait()
        contexts = [world[i].autograd.contexts.get(ctx) for i in range(3)]
        others = [context.known - {i} for i, context in enumerate(contexts)]
        assert others == [{1}, {0, 2}, {1}]
        with pytest.raises(GradwireError):
            world[3].autograd.contexts.get(ctx)


def test_contexts_are_released_everywhere_after_the_block() -> None:
    with world_of(3) as world:
        with gw.context() as ctx:
            gw.rpc_sync("worker1", call_on, (doubles(3), ["worker2"]))
            assert [len(w.autograd.contexts) for w in world.workers] == [1, 1, 1]
        see_nothing_left(world)
        for worker in world.workers:
            with pytest.raises(GradwireError, match=f"context with id: {ctx}"):
                worker.autograd.get_gradients(ctx)


def test_contexts_are_released_everywhere_when_the_block_fails() -> None:
    with world_of(3) as world:
        with pytest.raises(Boom), gw.context():
            boom_with(gw.rpc_sync("worker1", call_on, (doubles(3), ["worker2"])))
        see_nothing_left(world)
        with gw.context() as ctx:  # and there is no context any more
            assert current_id() == ctx


def boom_with(x: Tensor) -> None:
    boom()


def test_contexts_reached_only_by_calls_that_failed_are_released() -> None:
    with world_of(3) as world:
        with gw.context() as ctx:
            with pytest.raises(Boom):
                gw.rpc_sync("worker1", boom_with, (doubles(3),))
            with pytest.raises(Boom):
                gw.remote("worker2", boom).to_here()
            for i in (1, 2):
                assert ctx in [c.id for c in world[i].autograd.contexts]
        see_nothing_left(world)


def test_a_context_released_while_its_call_runs() -> None:
    with world_of(2) as world:
        with holding() as hold:
            with gw.context():
                future = gw.rpc_async("worker1", held, (doubles(3),))
                assert hold.entered.wait(ENOUGH)
            until(lambda: not len(world[1].autograd.contexts))
            hold.release.set()
            result = future.wait()
        assert result.grad_fn is None
        see_nothing_left(world)


class EndsContexts:
    """Takes until there is no context any more to be pickled."""

    def __reduce__(self) -> Any:
        contexts = current_worker().autograd.contexts
        until(lambda: not len(contexts))
        return same, (1,)


def call_late(x: Tensor) -> None:
    held()
    gw.rpc_sync("worker2", same, ((EndsContexts(), x),))


def test_a_call_that_leaves_when_its_context_is_over() -> None:
    with world_of(3) as world, holding() as hold:
        with gw.context():
            future = gw.rpc_async("worker1", call_late, (doubles(3),))
            assert hold.entered.wait(ENOUGH)
            hold.release.set()
        future.wait()
        assert [len(worker.autograd.contexts) for worker in world.workers] == [0] * 3


def open_context() -> int:
    with gw.context() as ctx:
        return ctx


def test_contexts_are_not_nested() -> None:
    text = "Already have an autograd context id for this thread"
    with world_of(2):
        with gw.context():
            with pytest.raises(GradwireError, match=text), gw.context():
                pass
            with pytest.raises(GradwireError, match=text):
                gw.rpc_sync("worker1", open_context)
            gw.rpc_sync("worker1", same, (1,))
        assert gw.rpc_sync("worker1", open_context) >> 48 == 1


def test_unknown_contexts() -> None:
    with world_of(2):
        with gw.context() as ctx:
            x = doubles(3)
            y = gw.rpc_sync("worker1", weigh, (x,)).sum()
            text = f"Could not find autograd context with id: {ctx + 1}"
            with pytest.raises(GradwireError, match=text):
                gw.get_gradients(ctx + 1)
            with pytest.raises(GradwireError, match=text):
                gw.backward(ctx + 1, [y])
            with pytest.raises(GradwireError, match=text):
                gw.grad(ctx + 1, [y], [x])
            with pytest.raises(GradwireError, match=text):
                gw.rpc_sync("worker1", gw.get_gradients, (ctx + 1,))
        text = f"Could not find autograd context with id: {ctx}"
        with pytest.raises(GradwireError, match=text):
            gw.backward(ctx, [y])
        with pytest.raises(GradwireError, match=text):
            gw.get_gradients(ctx)


def test_tensors_of_one_context_are_refused_in_another() -> None:
    with world_of(2):
        with gw.context():
            y = gw.rpc_sync("worker1", weigh, (doubles(3),))
        with gw.context() as ctx:
            with pytest.raises(RuntimeError, match="arrived in context"):
                gw.backward(ctx, [y.sum()])
            assert gw.get_gradients(ctx) == {}


def own_gradient(ctx: int) -> Tensor:
    return gw.get_gradients(ctx)[weights[current_worker().name]]


def test_each_worker_gets_its_gradients() -> None:
    with world_of(3), gw.context() as ctx:
        x = doubles(3)
        y = gw.rpc_sync("worker1", call_on, (x, ["worker2"]))
        gw.backward(ctx, [y.sum()])
        local = called_on(x, ["worker1", "worker2"]).sum()
        leaves = [weights["worker1"], weights["worker2"]]
        expected = torch.autograd.grad(local, leaves)
        for i in (1, 2):
            close(gw.rpc_sync(f"worker{i}", own_gradient, (ctx,)), expected[i - 1])
            found = gw.rpc_sync(f"worker{i}", gw.get_gradients, (ctx,))
            ((leaf, gradient),) = found.items()
            close((leaf.detach(), gradient), (leaves[i - 1].detach(), expected[i - 1]))


# Passes


def test_several_passes_add_up() -> None:
    with world_of(3) as world, gw.context() as ctx:
        x = doubles(3)
        y = gw.rpc_sync("worker1", call_on, (x, ["worker2", "worker0"]))
        for _ in range(3):
            gw.backward(ctx, [y.sum()], retain_graph=True)
        gw.backward(ctx, [(y * x).sum()])
        y = called_on(x, ["worker1", "worker2", "worker0"])
        local = 3 * y.sum() + (y * x).sum()
        own = [[weights[f"worker{i}"]] for i in range(3)]
        see_gradients(world, ctx, local, [[x, *own[0]], own[1], own[2]])


def test_a_graph_that_was_not_retained_cannot_be_used_again() -> None:
    with world_of(2), gw.context() as ctx:
        y = gw.rpc_sync("worker1", weigh, (doubles(3),)).sum()
        gw.backward(ctx, [y], retain_graph=True)
        gw.backward(ctx, [y])
        with pytest.raises(GradwireError, match=r"Error on Node \d: .*second time"):
            gw.backward(ctx, [y])


def test_several_roots() -> None:
    with world_of(3) as world, gw.context() as ctx:
        x = doubles(3)
        a = gw.rpc_sync("worker1", weigh, (x,))
        b = gw.rpc_sync("worker2", weigh, (a,))
        gw.backward(ctx, [a.sum(), b.sum(), (a * b).sum(), (x * 2).sum()])
        a = weighed(x, 1)
        b = weighed(a, 2)
        local = a.sum() + b.sum() + (a * b).sum() + (x * 2).sum()
        own = [[x], [weights["worker1"]], [weights["worker2"]]]
        see_gradients(world, ctx, local, own)


def test_a_root_that_arrived() -> None:
    with world_of(2) as world, gw.context() as ctx:
        x = doubles(3)
        gw.backward(ctx, [gw.rpc_sync("worker1", torch.sum, (x * x,))])
        see_gradients(world, ctx, (x * x).sum(), [[x], []])


def backward_there(ctx: int, x: Tensor) -> None:
    gw.backward(ctx, [weigh(x).sum()])


def test_a_pass_begun_on_another_worker() -> None:
    with world_of(2) as world, gw.context() as ctx:
        x = doubles(3)
        gw.rpc_sync("worker1", backward_there, (ctx, x * 2))
        local = weighed(x * 2, 1).sum()
        see_gradients(world, ctx, local, [[x], [weights["worker1"]]])


def test_a_pass_begun_in_another_thread() -> None:
    with world_of(2) as world, gw.context() as ctx:
        x = doubles(3)
        y = gw.rpc_sync("worker1", weigh, (x,)).sum()
        seen: list[int] = []

        def run() -> None:
            with world.as_worker(0):
                seen.append(current_id())
                gw.backward(ctx, [y])

        with meanwhile(run):
            pass
        assert seen == [0]
        see_gradients(world, ctx, weighed(x, 1).sum(), [[x], [weights["worker1"]]])


def fan_out(x: Tensor) -> list[Tensor]:
    return [weigh(x), torch.exp(x), x * 2, x.detach()]


def waste(x: Tensor) -> Tensor:
    """Makes calls whose results it does not use."""
    gw.rpc_sync("worker2", weigh, (x,))
    gw.rpc_sync("worker0", fan_out, (x,))
    gw.rpc_sync("worker2", same, (0,), {})
    return weigh(x)


def forget(x: Tensor) -> int:
    gw.rpc_sync("worker2", weigh, (weigh(x),))
    return 1


@orders
def test_results_that_are_not_used(seed: int | None) -> None:
    with world_of(3, seed=seed) as world, gw.context() as ctx:
        x = doubles(3)
        gw.rpc_sync("worker1", weigh, (x,))
        gw.rpc_sync("worker2", fan_out, (x * 2,))
        a, b, *_ = gw.rpc_sync("worker1", fan_out, (x * 3,))
        c = gw.rpc_sync("worker1", waste, (a,))
        gw.rpc_sync("worker2", forget, (b,))
        gw.rpc_sync("worker1", forget, (c,))
        gw.remote("worker1", weigh, (c,))
        gw.backward(ctx, [(c * x).sum()])
        local = (weighed(weighed(x * 3, 1), 1) * x).sum()
        see_gradients(world, ctx, local, [[x], [weights["worker1"]], []])


def test_a_pass_that_needs_nobody_else() -> None:
    with world_of(2) as world, gw.context() as ctx:
        x = doubles(3)
        gw.rpc_sync("worker1", weigh, (x,))
        gw.backward(ctx, [(x * x).sum()])
        see_gradients(world, ctx, (x * x).sum(), [[x], []])


def test_a_pass_while_a_call_is_under_way() -> None:
    with world_of(3) as world, gw.context() as ctx, holding() as hold:
        x = doubles(3)
        h = x * 2
        y = gw.rpc_sync("worker1", weigh, (h,))
        future = gw.rpc_async("worker1", weigh_held, (y,))
        gw.backward(ctx, [y.sum()], retain_graph=True)
        hold.release.set()
        gw.backward(ctx, [future.wait().sum()], retain_graph=True)
        y = weighed(x * 2, 1)
        local = y.sum() + weighed(weighed(y, 2), 1).sum()
        own = [[x], [weights["worker1"]], [weights["worker2"]]]
        see_gradients(world, ctx, local, own)


# Calls that fail


def fail_after_a_call(x: Tensor) -> None:
    gw.rpc_sync("worker2", weigh, (x,))
    boom()


def unsendable(x: Tensor) -> Any:
    return x * 2, threading.Lock()


async def boom_async(x: Tensor) -> None:
    await gw.rpc_async("worker2", weigh, (x,))
    boom()


@orders
@two_ways
def test_a_pass_after_calls_that_failed(call: Way, seed: int | None) -> None:
    with world_of(3, seed=seed) as world, gw.context() as ctx:
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
        y = call("worker1", weigh, (h,))
        gw.backward(ctx, [(y * h).sum()])
        local = (weighed(2 * x, 1) * 2 * x).sum()
        see_gradients(world, ctx, local, [[x], [weights["worker1"]], []])


def weigh_held(x: Tensor) -> Tensor:
    held()
    return weigh(gw.rpc_sync("worker2", weigh, (x,)))


@pytest.mark.parametrize("ends", ["before", "after", "during"])
def test_a_pass_after_a_call_that_timed_out(ends: str) -> None:
    with world_of(3) as world, gw.context() as ctx, holding() as hold:
        x = doubles(3)
        h = x * 2
        with pytest.raises(CallTimeout):
            gw.rpc_sync("worker1", weigh_held, (h,), timeout=0.05)
        y = gw.rpc_sync("worker1", weigh, (h,))
        if ends == "before":
            hold.release.set()
            until(lambda: len(world[1].autograd.contexts.get(ctx).sends) == 3)
        if ends == "during":
            y.register_hook(lambda _: hold.release.set())
        gw.backward(ctx, [(y * h).sum()], retain_graph=True)
        hold.release.set()
        until(lambda: len(world[1].autograd.contexts.get(ctx).sends) == 3)
        gw.backward(ctx, [(y * h).sum()])
        local = 2 * (weighed(2 * x, 1) * 2 * x).sum()
        see_gradients(world, ctx, local, [[x], [weights["worker1"]], []])


def weigh_and_raise(x: Tensor, path: list[str]) -> Tensor:
    h = weigh(x)
    if not path:
        return Raises.apply(h)
    result: Tensor = weigh(gw.rpc_sync(path[0], weigh_and_raise, (h, path[1:])))
    return result


@orders
@pytest.mark.parametrize("path", ["1", "12", "120", "0"])
def test_an_error_in_a_backward_and_then_none(path: str, seed: int | None) -> None:
    with world_of(3, seed=seed) as world, gw.context() as ctx:
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
        until(lambda: not any(context.parts for context in known(world, ctx)))
        Raises.is_on = False
        forget_gradients(world, ctx)
        gw.backward(ctx, [(y * x).sum()])
        local = (weigh_and_raise_here(x, path) * x).sum()
        leaves = [[x], [], []]
        for digit in path:
            leaves[int(digit)].append(weights[f"worker{digit}"])
        see_gradients(world, ctx, local, leaves)


def weigh_and_raise_here(x: Tensor, path: str) -> Tensor:
    h = weighed(x, int(path[0]))
    if len(path) == 1:
        return h
    return weighed(weigh_and_raise_here(h, path[1:]), int(path[0]))


def test_a_worker_that_died_is_missed_where_it_has_tensors_only() -> None:
    with World(3) as world, world.as_worker(0):
        with gw.context() as ctx:
            x = doubles(3)
            gw.rpc_sync("worker2", same, (1,))
            y = gw.rpc_sync("worker1", weigh, (x,))
            world.kill(2)
            until(lambda: len(gw.get_worker_infos()) == 2)
            gw.backward(ctx, [y.sum()])
            leaves = [[x], [weights["worker1"]], []]
            see_gradients(world, ctx, weighed(x, 1).sum(), leaves)
        with gw.context() as ctx:
            y = gw.rpc_sync("worker1", call_on, (x, ["worker0"]))
            world.kill(1)
            until(lambda: len(gw.get_worker_infos()) == 1)
            began = time.monotonic()
            with pytest.raises(WorkerLostError, match="worker1"):
                gw.backward(ctx, [y.sum()])
            assert time.monotonic() - began < 2
        see_nothing_left(world)


def test_a_worker_that_dies_in_a_pass() -> None:
    with World(3) as world, world.as_worker(0):
        with gw.context() as ctx:
            x = doubles(3)
            y = gw.rpc_sync("worker1", weigh, (x,))
            z = gw.rpc_sync("worker2", weigh_hooked, (y,))
            killer = threading.Thread(target=lambda: _hooked.wait() and world.kill(2))
            killer.start()
            with pytest.raises(WorkerLostError, match="worker2"):
                gw.backward(ctx, [(z * y).sum()])
            _resume.set()
            killer.join()
        see_nothing_left(world)


def weigh_hooked(x: Tensor) -> Tensor:
    def hook(gradient: Tensor) -> None:
        _hooked.set()
        _resume.wait(ENOUGH)

    result = weigh(x)
    result.register_hook(hook)
    return result


def test_a_worker_whose_caller_died_forgets_its_context() -> None:
    with World(3) as world, world.as_worker(1):
        with world.as_worker(0), gw.context():
            gw.rpc_sync("worker1", call_on, (doubles(3), ["worker2"]))
            world.kill(0)
        see_nothing_left(world)


# Many at once


@orders
def test_threads_with_contexts_of_their_own(seed: int | None) -> None:
    with world_of(3, seed=seed) as world:

        def train(number: int) -> Callable[[], None]:
            def body() -> None:
                with world.as_worker(number % 3):
                    for _ in range(3):
                        x = doubles(3)
                        with gw.context() as ctx:
                            path = [f"worker{(number + i) % 3}" for i in (1, 2, 3)]
                            y = gw.rpc_sync(path[0], call_on, (x, path[1:]))
                            gw.backward(ctx, [(y * x).sum()])
                            found = gw.get_gradients(ctx)
                            local = (called_on(x, path) * x).sum()
                            close(found[x], torch.autograd.grad(local, [x])[0])

            return body

        with meanwhile(*map(train, range(8))):
            pass


def test_threads_that_share_a_context() -> None:
    with world_of(3) as world, gw.context() as ctx:
        context = world[0].autograd.contexts.get(ctx)
        leaves = [doubles(3) for _ in range(6)]
        results: list[Tensor] = []

        def train(x: Tensor) -> Callable[[], None]:
            def body() -> None:
                contexts = world[0].autograd.contexts
                with world.as_worker(0), contexts.entered(context):
                    y = gw.rpc_sync("worker1", call_on, (x, ["worker2"]))
                    results.append(y)

            return body

        with meanwhile(*map(train, leaves)):
            pass
        gw.backward(ctx, [y.sum() for y in results])
        local = torch.stack([called_on(x, ["worker1", "worker2"]) for x in leaves])
        own = [leaves, [weights["worker1"]], [weights["worker2"]]]
        see_gradients(world, ctx, local.sum(), own)


# Beyond torch


def test_gradients_also_added_to_grad_everywhere() -> None:
    with world_of(3), gw.context() as ctx:
        x = doubles(3)
        y = gw.rpc_sync("worker1", call_on, (x, ["worker2"]))
        for _ in range(2):
            gw.backward(ctx, [y.sum()], retain_graph=True, accumulate=True)
        found = [x.grad, weights["worker1"].grad, weights["worker2"].grad]
        local = 2 * called_on(x, ["worker1", "worker2"]).sum()
        leaves = [x, weights["worker1"], weights["worker2"]]
        close(found, list(torch.autograd.grad(local, leaves)))
        close(gw.get_gradients(ctx)[x], x.grad)


@pytest.mark.parametrize("to", [0, 1])
@two_ways
def test_second_derivatives_through_calls(call: Way, to: int) -> None:
    with world_of(2) as world, gw.context() as ctx:
        x, w = doubles(3), weights[f"worker{to}"]
        y = (call(f"worker{to}", weigh, (x**3,)) * x).sum()
        (slope,) = gw.grad(ctx, [y], [x], create_graph=True)
        assert slope is not None
        gw.backward(ctx, [(slope**2).sum()])
        local = (weighed(x**3, to) * x).sum()
        (local_slope,) = torch.autograd.grad(local, [x], create_graph=True)
        close(slope, local_slope)
        leaves = [[x], [w]] if to else [[x, w], []]
        see_gradients(world, ctx, (local_slope**2).sum(), leaves)


def test_second_derivatives_through_nested_calls() -> None:
    with world_of(3) as world, gw.context() as ctx:
        x = doubles(3)
        path = ["worker1", "worker2", "worker0"]
        y = gw.rpc_sync(path[0], call_on, (x, path[1:])).sum()
        gw.backward(ctx, [y], create_graph=True)
        slope = gw.get_gradients(ctx)[x]
        close(slope, torch.autograd.grad(called_on(x, path).sum(), [x])[0])
        forget_gradients(world, ctx)
        gw.backward(ctx, [(slope**2).sum()])
        local = called_on(x, path).sum()
        (local_slope,) = torch.autograd.grad(local, [x], create_graph=True)
        own = [[weights[f"worker{i}"]] for i in range(3)]
        leaves = [[x, *own[0]], own[1], own[2]]
        see_gradients(world, ctx, (local_slope**2).sum(), leaves)


# A model over three workers


layers: dict[str, nn.Module] = {}


def run_layer(x: Tensor) -> Tensor:
    result: Tensor = layers[current_worker().name](x)
    return result


def run_layer_at(rref: gw.RRef[Tensor]) -> Tensor:
    return run_layer(rref.to_here())


def update(ctx: int, rate: float) -> None:
    """One step of gradient descent with the gradients of this worker."""
    found = gw.get_gradients(ctx)
    with torch.no_grad():
        for parameter in layers[current_worker().name].parameters():
            parameter -= rate * found[parameter]


@orders
@pytest.mark.parametrize("chained", [False, True])
def test_a_model_over_three_workers_trains_as_it_does_locally(
    chained: bool, seed: int | None
) -> None:
    torch.manual_seed(0)
    first, second = nn.Linear(4, 8).double(), nn.Linear(8, 2).double()
    layers.update(worker1=nn.Sequential(first, nn.Tanh()), worker2=second)
    local = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    for mine, theirs in zip(local, (first, None, second), strict=True):
        if theirs is not None:
            mine.load_state_dict(theirs.state_dict())
    optimizer = torch.optim.SGD(local.parameters(), lr=0.1)
    with world_of(3, seed=seed):
        for _ in range(5):
            x, target = torch.rand(6, 4).double(), torch.rand(6, 2).double()
            with gw.context() as ctx:
                if chained:
                    rref = gw.remote("worker1", run_layer, (x,))
                    y = gw.remote("worker2", run_layer_at, (rref,)).to_here()
                else:
                    h = gw.rpc_sync("worker1", run_layer, (x,))
                    y = gw.rpc_sync("worker2", run_layer, (h,))
                loss = nn.functional.mse_loss(y, target)
                gw.backward(ctx, [loss])
                for worker in ("worker1", "worker2"):
                    gw.rpc_sync(worker, update, (ctx, 0.1))
            optimizer.zero_grad()
            local_loss = nn.functional.mse_loss(local(x), target)
            local_loss.backward()
            optimizer.step()
            close(loss.detach(), local_loss.detach())
        ours = [*first.parameters(), *second.parameters()]
        close([p.detach() for p in ours], [p.detach() for p in local.parameters()])
