"""DistributedDataParallel inside a context: its reducer runs, `.grad` stays as it was."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from gradwire._autograd import ddp
from gradwire.api import current_worker, enter
from tests.autograd.functions import Gate
from tests.processes import Processes
from tests.worlds import LIMIT, autograds, meanwhile

close = torch.testing.assert_close


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    """Of one; gloo keeps some descriptors for the life of the process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def twins() -> tuple[nn.Linear, nn.Linear]:
    one, other = nn.Linear(3, 2).double(), nn.Linear(3, 2).double()
    other.load_state_dict(one.state_dict())
    return one, other


def counting(parallel: DistributedDataParallel) -> list[int]:
    """How often its reducer has run."""
    reduced: list[int] = []

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        reduced.append(bucket.index())
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    parallel.register_comm_hook(None, hook)
    return reduced


def sample() -> Tensor:
    return torch.rand(4, 3, dtype=torch.float64, requires_grad=True)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("views", [False, True])
def test_a_replicated_module_behind_a_call(views: bool) -> None:
    module, expected = twins()
    parallel = DistributedDataParallel(module, gradient_as_bucket_view=views)
    reduced = counting(parallel)
    x = sample()
    with autograds(2) as world, world[0].context() as context:
        for _ in range(2):
            (there,) = world.transfer(0, 1, context, [x * 2])
            (back,) = world.transfer(1, 0, context, [parallel(there)])
            world[0].backward(context, [(back**2).sum()])
        assert reduced == [0, 0]
        loss = (expected(x * 2) ** 2).sum()
        wanted = torch.autograd.grad(loss, [x, *expected.parameters()])
        found = world[1].get_gradients(context)
        for parameter, gradient in zip(module.parameters(), wanted[1:], strict=True):
            close(found[parameter], 2 * gradient)
            assert parameter.grad is None
        close(world[0].get_gradients(context), {x: 2 * wanted[0]})


@pytest.mark.usefixtures("group")
def test_a_module_called_twice_is_reduced_once() -> None:
    module, expected = twins()
    parallel = DistributedDataParallel(module)
    reduced = counting(parallel)
    x = sample()
    with autograds(2) as world, world[0].context() as context:
        results = []
        for scale in (2, 3):
            (there,) = world.transfer(0, 1, context, [x * scale])
            results += world.transfer(1, 0, context, [parallel(there)])
        world[0].backward(context, [(results[0] * results[1]).sum()])
        assert reduced == [0]
        loss = (expected(x * 2) * expected(x * 3)).sum()
        wanted = torch.autograd.grad(loss, list(expected.parameters()))
        found = world[1].get_gradients(context)
        close([found[p] for p in module.parameters()], list(wanted))


@pytest.mark.usefixtures("group")
def test_a_module_whose_halves_are_reached_by_two_runs_is_reduced_once() -> None:
    """The reducer runs in the second, and then sets the gradients of both."""
    whole = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).double()
    twin = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).double()
    twin.load_state_dict(whole.state_dict())
    x = sample().detach()
    with autograds(2) as world, world[0].context() as context:

        class Detour(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.halves = whole

            def forward(self, x: Tensor) -> Tensor:
                (there,) = world.transfer(0, 1, context, [self.halves[0](x)])
                (back,) = world.transfer(1, 0, context, [there * 2])
                return self.halves[1](back)

        parallel = DistributedDataParallel(Detour())
        reduced = counting(parallel)
        world[0].backward(context, [parallel(x).square().sum()])
        assert reduced == [0]
        loss = twin[1](twin[0](x) * 2).square().sum()
        wanted = torch.autograd.grad(loss, list(twin.parameters()))
        found = world[0].get_gradients(context)
        close([found[p] for p in whole.parameters()], list(wanted))


@pytest.mark.usefixtures("group")
def test_modules_of_several_workers_in_one_pass() -> None:
    """Their runs wait for each other, so none may keep the other out."""
    modules = [twins() for _ in range(2)]
    parallels = [DistributedDataParallel(module) for module, _ in modules]
    x = torch.rand(4, 2, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(2, 3, dtype=torch.float64)
    with autograds(3) as world, world[0].context() as context:
        value, local = x, x
        for at in (1, 2, 1):
            (there,) = world.transfer(0, at, context, [value @ weight])
            (back,) = world.transfer(at, 0, context, [parallels[at - 1](there)])
            value = back * value
            local = modules[at - 1][1](local @ weight) * local
        world[0].backward(context, [value.sum()])
        for at, (module, twin) in enumerate(modules, 1):
            wanted = torch.autograd.grad(
                local.sum(), list(twin.parameters()), retain_graph=True
            )
            found = world[at].get_gradients(context)
            close([found[p] for p in module.parameters()], list(wanted))


class Halves(nn.Module):
    """Two modules that get the same."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(twins())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        one, other = self.parts
        return one(x), other(x)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("accumulates", [False, True])
def test_pieces_that_share_a_module_or_a_leaf_with_one(accumulates: bool) -> None:
    """One waits for what the other yields, so they have to be run together."""
    halves = Halves()
    parallel = DistributedDataParallel(halves)
    leaf = torch.rand(4, 2, dtype=torch.float64, requires_grad=True)
    x, k = sample(), torch.rand(4, 2, dtype=torch.float64, requires_grad=True)
    with autograds(3) as world, world[0].context() as context:
        u, v = parallel(x.detach())
        (a,) = world.transfer(1, 0, context, [u.sin()])
        (there,) = world.transfer(0, 1, context, [k])
        (b,) = world.transfer(1, 0, context, [u.cos() * there * leaf])
        (there,) = world.transfer(0, 1, context, [a])
        (c,) = world.transfer(1, 0, context, [v * there])
        (there,) = world.transfer(0, 1, context, [c])
        (d,) = world.transfer(1, 0, context, [there * leaf])
        world[0].backward(context, [(b + d).sum()], accumulate=accumulates)
        u, v = halves(x.detach())
        local = (u.cos() * k * leaf + v * u.sin() * leaf).sum()
        leaves = [leaf, *halves.parameters()]
        wanted = list(torch.autograd.grad(local, leaves))
        found = world[1].get_gradients(context)
        close([found[one] for one in leaves], wanted)
        if accumulates:
            close([one.grad for one in leaves], wanted)


@pytest.mark.usefixtures("group")
def test_a_leaf_that_is_shared_by_way_of_another() -> None:
    """It would be overwritten by the run of the module, while others add to it."""
    parallel, gate = DistributedDataParallel(twins()[0]), Gate()
    first, second = sample(), sample()
    with autograds(3) as world, world[0].context() as context:
        (a,) = world.transfer(1, 0, context, [parallel(gate(first * 1))])
        (b,) = world.transfer(1, 0, context, [first * second])
        (there,) = world.transfer(1, 2, context, [second * 3])
        (c,) = world.transfer(2, 0, context, [there * 1])

        def let_go() -> None:
            assert gate.entered.wait(LIMIT)
            known, waited = world[1].contexts.get(context), 0
            while second not in known.gradients and waited < 200:  # or they are one run
                time.sleep(0.001)
                waited += 1
            gate.open.set()

        with meanwhile(let_go):
            world[0].backward(context, [a.sum() + b.sum() + c.sum()])
        close(world[1].get_gradients(context)[second], first.detach() + 3)


@pytest.mark.usefixtures("group")
def test_a_module_that_another_pass_does_not_let_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ddp, "_PATIENCE", 0.1)
    parallel, gate = DistributedDataParallel(twins()[0]), Gate()
    with autograds(1) as world:

        def work() -> None:
            with world[0].context() as context:
                world[0].backward(context, [gate(parallel(sample())).sum()])

        with meanwhile(work):
            assert gate.entered.wait(LIMIT)
            with world[0].context() as context:
                loss = parallel(sample()).sum()
                with pytest.raises(gw.GradwireError, match="used by another backward"):
                    world[0].backward(context, [loss])
            gate.open.set()


@pytest.mark.usefixtures("group")
def test_grad_is_filled_too_where_asked_for() -> None:
    module, expected = twins()
    parallel = DistributedDataParallel(module)
    x = sample()
    with autograds(2) as world, world[0].context() as context:
        for _ in range(2):
            (there,) = world.transfer(0, 1, context, [x * 2])
            (back,) = world.transfer(1, 0, context, [parallel(there)])
            world[0].backward(context, [(back**2).sum()], accumulate=True)
        (2 * (expected(x * 2) ** 2).sum()).backward()
        found = world[1].get_gradients(context)
        for one, other in zip(module.parameters(), expected.parameters(), strict=True):
            assert one.grad is not None
            assert one.grad.data_ptr() != found[one].data_ptr()
            close(one.grad, other.grad)
            close(found[one], other.grad)


@pytest.mark.usefixtures("group")
def test_a_module_that_is_replicated_after_its_first_pass() -> None:
    module, _ = twins()
    with autograds(1) as world, world[0].context() as context:
        world[0].backward(context, [module(sample()).sum()])
        reduced = counting(parallel := DistributedDataParallel(module))
        world[0].backward(context, [parallel(sample()).sum()])
        assert reduced == [0]


@pytest.mark.usefixtures("group")
def test_an_error_leaves_grad_as_it_was() -> None:
    module, _ = twins()
    parallel = DistributedDataParallel(module)
    with autograds(1) as world, world[0].context() as context:
        y = parallel(sample())
        y.register_hook(lambda gradient: 1 / 0)
        module.bias.grad = torch.ones(2).double()
        with pytest.raises(gw.GradwireError, match="Error on Node 0: division by zero"):
            world[0].backward(context, [y.sum()])
        close(module.bias.grad, torch.ones(2).double())
        assert module.weight.grad is None
        assert world[0].get_gradients(context) == {}


def test_nothing_is_looked_for_without_a_process_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(ddp, "_watchers", 0)
    monkeypatch.setattr(ddp.gc, "get_objects", lambda: pytest.fail("searched"))
    parameter = nn.Parameter(torch.ones(3))
    edge = torch.autograd.graph.get_gradient_edge(parameter)
    ddp.watch()
    assert ddp.replicated([edge.node]) == []
    ddp.unwatch()


@pytest.mark.usefixtures("group")
def test_a_module_that_is_older_than_the_first_worker_is_found() -> None:
    parallel = DistributedDataParallel(nn.Linear(3, 2))
    edge = torch.autograd.graph.get_gradient_edge(parallel.module.bias)
    assert len(ddp.replicated([edge.node])) == 0
    with autograds(1):
        assert len(ddp.replicated([edge.node])) == 1


def test_the_last_worker_leaves_nothing_in_torch() -> None:
    left = nn.modules.module._global_module_registration_hooks
    with autograds(1), autograds(2):
        assert len(left) == 1
    assert not left


# Several replicas, each in its own process

_trainers: dict[str, Any] = {}


def start_group(path: str, rank: int, size: int) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{path}", rank=rank, world_size=size
    )
    torch.manual_seed(0)  # the same at all
    module = nn.Linear(3, 2).double()
    _trainers.update(module=module, parallel=DistributedDataParallel(module))


def end_group() -> None:
    _trainers.clear()
    dist.destroy_process_group()


scale = torch.full((2,), 3.0, dtype=torch.float64, requires_grad=True)


def apply_weight(y: Tensor) -> Tensor:
    return torch.sin(y) * scale


def train(x: Tensor, *, accumulate: bool) -> dict[str, Any]:
    """A pass from this replica, through another worker that both use."""
    module, parallel = _trainers["module"], _trainers["parallel"]
    h = x * 2
    with gw.context() as ctx:
        y = gw.rpc_sync("worker0", apply_weight, (parallel(h),))
        z = gw.rpc_sync(
            "worker0", apply_weight, (parallel(y @ torch.ones(2, 3).double()),)
        )
        gw.backward(ctx, [(z * y).sum()], accumulate=accumulate)
        found = gw.get_gradients(ctx)
    return {
        "gradients": [found[p] for p in module.parameters()],
        "grads": [p.grad for p in module.parameters()],
    }


def locally(module: nn.Module, x: Tensor) -> list[Tensor]:
    y = apply_weight(module(x * 2))
    z = apply_weight(module(y @ torch.ones(2, 3).double()))
    return list(torch.autograd.grad((z * y).sum(), list(module.parameters())))


@pytest.mark.slow
def test_replicas_in_several_processes(tmp_path: Path) -> None:
    processes = Processes(tmp_path)
    try:
        for rank in (1, 2):
            processes.serve(rank, 3)
        with processes.world(3) as worker:
            before = enter(worker)
            try:
                check_replicas(tmp_path)
            finally:
                enter(before)
    finally:
        processes.close()


def check_replicas(folder: Path) -> None:
    trainers = ["worker1", "worker2"]
    both(trainers, start_group, lambda i: (f"{folder}/group", i, 2))
    torch.manual_seed(0)
    module = nn.Linear(3, 2).double()
    xs = [torch.rand(4, 3, dtype=torch.float64) for _ in trainers]
    each = [locally(module, x) for x in xs]
    mean = [(a + b) / 2 for a, b in zip(*each, strict=True)]
    for accumulate in (False, True, True):
        found = both(trainers, train, lambda i: (xs[i],), accumulate=accumulate)
        for one in found:
            close(one["gradients"], mean)
            if not accumulate:
                assert one["grads"] == [None, None]
    close(found[0]["grads"], [2 * gradient for gradient in mean])
    scale.grad = None  # of both, here
    both(trainers, end_group, lambda i: ())


def both(to: list[str], func: Any, args: Any, **kwargs: Any) -> list[Any]:
    """Call it on all at the same time."""
    futures = [
        current_worker().rpc_async(name, func, args(i), kwargs)
        for i, name in enumerate(to)
    ]
    return [future.wait() for future in futures]
