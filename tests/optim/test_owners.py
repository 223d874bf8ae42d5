"""What happens on the owners of parameters: concurrent trainers, errors, deaths, bad input."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradwire as gw
from gradwire.testing import World
from tests.training import (
    batches,
    local_model,
    local_step,
    loss_of,
    spread_model,
    spread_step,
)
from tests.worlds import three_workers

SGD = torch.optim.SGD
SHARED: dict[str, gw.RemoteModule] = {}


class Vector(nn.Module):
    """Its gradient does not depend on its weight, so trainers cannot disturb each other's."""

    def __init__(self, size: int = 50) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size, dtype=torch.float64))
        self.unused = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


class Fails(torch.optim.SGD):
    """Fails in a step, while switched on."""

    is_on = True
    gate: threading.Event | None = None
    entered: threading.Event | None = None

    def step(self, closure: Any = None) -> Any:
        if Fails.entered is not None:
            Fails.entered.set()
        if Fails.gate is not None:
            assert Fails.gate.wait(20)
        if Fails.is_on:
            raise ValueError("Error running optimizer.")
        return super().step(closure)


class CannotBeMade(torch.optim.SGD):
    def __init__(self, params: Any) -> None:
        raise ValueError("Error creating optimizer.")


@pytest.fixture(autouse=True)
def switched_on() -> None:
    Fails.is_on, Fails.gate, Fails.entered = True, None, None


def shared_model() -> gw.RemoteModule:
    return SHARED["model"]


def params_on(*workers: str) -> list[gw.RRef[Any]]:
    modules = [gw.RemoteModule(worker, Vector) for worker in workers]
    return [module.remote_parameters()[0] for module in modules]


# Trainers that share parameters


def test_concurrent_trainers_lose_no_update() -> None:
    steps, trainers = 30, 3

    def train(worker: gw.Worker) -> None:
        model = gw.rpc_sync("worker0", shared_model)
        own = gw.DistributedOptimizer(SGD, model.remote_parameters(), lr=1.0)
        for number in range(steps):
            with gw.context() as ctx:
                x = torch.full((50,), float(worker.id + number), dtype=torch.float64)
                gw.backward(ctx, [model(x)])
                own.step(ctx)

    with World(trainers) as world, world.as_worker(0):
        model = SHARED["model"] = gw.RemoteModule("worker1", Vector)
        world.run(train)
        total = -sum(i + n for i in range(trainers) for n in range(steps))
        weight = model.state_dict()["weight"]
        assert torch.equal(weight, torch.full_like(weight, total))
        SHARED.clear()


def test_threads_may_share_one_optimizer() -> None:
    with three_workers() as world:
        model = gw.RemoteModule("worker1", Vector)
        optimizer = gw.DistributedOptimizer(SGD, model.remote_parameters(), lr=1.0)

        def train() -> None:
            with world.as_worker(0):
                for _ in range(20):
                    with gw.context() as ctx:
                        gw.backward(ctx, [model(torch.ones(50, dtype=torch.float64))])
                        optimizer.step(ctx)

        threads = [threading.Thread(target=train) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert torch.equal(
            model.state_dict()["weight"], torch.full((50,), -80.0, dtype=torch.float64)
        )


def test_a_step_holds_neither_other_calls_nor_other_parameters() -> None:
    with three_workers() as world:
        Fails.is_on, Fails.gate, Fails.entered = (
            False,
            threading.Event(),
            threading.Event(),
        )
        slow = gw.DistributedOptimizer(Fails, params_on("worker1"), lr=0.1)
        quick = gw.DistributedOptimizer(SGD, params_on("worker1"), lr=0.1)

        def step() -> None:
            with world.as_worker(0), gw.context() as ctx:
                slow.step(ctx)

        thread = threading.Thread(target=step)
        thread.start()
        try:
            assert Fails.entered is not None
            assert Fails.entered.wait(20)
            assert gw.rpc_sync("worker1", max, args=(1, 2)) == 2
            with gw.context() as ctx:
                quick.step(ctx)
        finally:
            Fails.gate.set()
            thread.join()


def test_parameters_without_gradient_are_left_alone_and_so_is_grad() -> None:
    with three_workers():
        model = gw.RemoteModule("worker1", Vector)
        model.apply(leave_gradients)
        optimizer = gw.DistributedOptimizer(
            torch.optim.AdamW, model.remote_parameters(), lr=0.1, weight_decay=0.5
        )
        with gw.context() as ctx:
            gw.backward(ctx, [model(torch.ones(50, dtype=torch.float64))])
            optimizer.step(ctx)
        state = model.state_dict()
        assert (state["weight"] != 0).all()
        assert torch.equal(state["unused"], torch.ones(1))
        model.apply(check_gradients)
        assert list(optimizer.state_dict()["state"]) == [0]


def leave_gradients(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)


def check_gradients(module: nn.Module) -> None:
    for parameter in module.parameters():
        assert parameter.grad is not None
        assert (parameter.grad == 7.0).all()


def test_an_owner_that_the_context_never_reached_has_nothing_to_do() -> None:
    with three_workers():
        optimizer = gw.DistributedOptimizer(SGD, params_on("worker1", "worker2"), lr=1)
        with gw.context() as ctx:
            optimizer.step(ctx)


def test_sparse_gradients_are_clipped_and_applied() -> None:
    local = nn.EmbeddingBag(5, 3, sparse=True, dtype=torch.float64)
    here = torch.optim.SGD(local.parameters(), lr=0.1)
    with three_workers():
        model = gw.RemoteModule("worker1", nn.EmbeddingBag, (5, 3), {"sparse": True})
        model.double().load_state_dict(local.state_dict())
        there = gw.DistributedOptimizer(SGD, model.remote_parameters(), lr=0.1)
        bags = torch.tensor([[1, 2, 2], [4, 2, 1]])
        local_step(local, here, bags, torch.ones(2, 3))
        with gw.context() as ctx:
            gw.backward(ctx, [loss_of(model, bags, torch.ones(2, 3))])
            gradient = local.weight.grad
            assert gradient is not None
            norm = gradient.coalesce().values().norm()
            torch.testing.assert_close(there.clip_grad_norm(ctx, 10.0), norm)
            there.step(ctx)
        torch.testing.assert_close(model.state_dict(), dict(local.state_dict()))


@pytest.mark.parametrize("order", [1.0, 2.0, float("inf")])
def test_norms_of_any_order(order: float) -> None:
    local = local_model()
    x, y = next(batches(1))
    loss_of(local, x, y).backward()
    norm = nn.utils.clip_grad_norm_(local.parameters(), 0.01, order)
    with three_workers():
        model = spread_model("", "worker1", "worker2")
        optimizer = gw.DistributedOptimizer(SGD, gw.nn.remote_parameters(model), lr=1)
        with gw.context() as ctx:
            gw.backward(ctx, [loss_of(model, x, y)])
            found = optimizer.clip_grad_norm(ctx, 0.01, order)
            torch.testing.assert_close(found, norm)
            here = gw.get_gradients(ctx)
            for parameter, twin in zip(
                model.parameters(), local[0].parameters(), strict=True
            ):
                torch.testing.assert_close(here[parameter], twin.grad)


def test_a_norm_that_is_not_finite_is_an_error_if_asked_for() -> None:
    with three_workers():
        model = gw.RemoteModule("worker1", Vector)
        optimizer = gw.DistributedOptimizer(SGD, model.remote_parameters(), lr=1)
        with gw.context() as ctx:
            bad = torch.full((50,), float("nan"), dtype=torch.float64)
            gw.backward(ctx, [model(bad)])
            with pytest.raises(RuntimeError, match="worker1"):
                optimizer.clip_grad_norm(ctx, 1.0, error_if_nonfinite=True)
            assert optimizer.clip_grad_norm(ctx, 1.0).isnan()


# What goes wrong


def test_errors_of_all_owners_come_together() -> None:
    with three_workers():
        optimizer = gw.DistributedOptimizer(
            Fails, params_on("worker1", "worker2", "worker0"), lr=0.1
        )
        with gw.context() as ctx:
            with pytest.raises(gw.OwnersError, match="Error running optimizer") as info:
                optimizer.step(ctx)
            assert list(info.value.errors) == ["worker1", "worker2", "worker0"]
            assert {type(e) for e in info.value.errors.values()} == {ValueError}
            Fails.is_on = False
            optimizer.step(ctx)


def test_the_error_of_one_owner_keeps_its_type() -> None:
    with three_workers():
        optimizer = gw.DistributedOptimizer(Fails, params_on("worker2"), lr=0.1)
        with gw.context() as ctx, pytest.raises(ValueError, match="Error") as info:
            optimizer.step(ctx)
        assert "worker2" in str(info.value.__cause__)


def test_a_class_that_cannot_be_made_says_why() -> None:
    with three_workers():
        with pytest.raises(ValueError, match=r"Error creating optimizer\."):
            gw.DistributedOptimizer(CannotBeMade, params_on("worker1"))
        with pytest.raises(
            gw.OwnersError, match=r"worker2: ValueError: Error creating"
        ):
            gw.DistributedOptimizer(CannotBeMade, params_on("worker1", "worker2"))
        with pytest.raises(ValueError, match="Invalid learning rate: -1"):
            gw.DistributedOptimizer(SGD, params_on("worker1"), lr=-1)


def test_a_group_that_one_owner_refuses_is_taken_by_none() -> None:
    with three_workers():
        first, second = params_on("worker1", "worker2")
        optimizer = gw.DistributedOptimizer(SGD, [first, second], lr=0.1)
        more = params_on("worker1")
        again = gw.rpc_sync("worker2", another_reference, args=(second,))
        with pytest.raises(ValueError, match="more than one parameter group"):
            optimizer.add_param_group({"params": [*more, again]})
        assert len(optimizer.param_groups) == 1
        state = optimizer.state_dict()
        assert [group["params"] for group in state["param_groups"]] == [[0, 1]]
        optimizer.add_param_group({"params": more, "lr": 0.5})
        with gw.context() as ctx:
            optimizer.step(ctx)


def another_reference(rref: gw.RRef[Any]) -> gw.RRef[Any]:
    return gw.RRef(rref.local_value())


def test_bad_input_is_refused_at_the_caller() -> None:
    with three_workers():
        (param,) = params_on("worker1")
        with pytest.raises(ValueError, match="empty parameter list"):
            gw.DistributedOptimizer(SGD, [], lr=0.1)
        with pytest.raises(TypeError, match=r"Parameter instead of a reference.*RRef"):
            gw.DistributedOptimizer(SGD, nn.Linear(1, 1).parameters(), lr=0.1)
        with pytest.raises(ValueError, match="more than one"):
            gw.DistributedOptimizer(SGD, [{"params": [param]}, {"params": param}], lr=1)
        with pytest.raises(ValueError, match='under "params"'):
            gw.DistributedOptimizer(SGD, [{"lr": 0.1}])
        optimizer = gw.DistributedOptimizer(SGD, [param], lr=0.1)
        with pytest.raises(TypeError, match="is a dict"):
            optimizer.add_param_group([param])  # type: ignore[arg-type]
        with pytest.raises(gw.GradwireError, match="autograd context with id: 77"):
            optimizer.step(77)
        with pytest.raises(ValueError, match=r"groups of \[2\] parameters"):
            optimizer.load_state_dict(
                {"state": {}, "param_groups": [{"params": [0, 1]}]}
            )


def test_the_death_of_an_owner_in_a_step_is_an_error_and_others_stay_usable() -> None:
    with World(3) as world, world.as_worker(0):
        Fails.is_on, Fails.gate, Fails.entered = (
            False,
            threading.Event(),
            threading.Event(),
        )
        doomed, safe = params_on("worker1", "worker2")
        optimizer = gw.DistributedOptimizer(Fails, [doomed], lr=0.1)
        others = gw.DistributedOptimizer(SGD, [safe], lr=0.1)
        errors: list[BaseException] = []

        def step() -> None:
            with world.as_worker(0), gw.context() as ctx:
                try:
                    optimizer.step(ctx)
                except Exception as error:  # noqa: BLE001 it is looked at below
                    errors.append(error)

        thread = threading.Thread(target=step)
        thread.start()
        assert Fails.entered is not None
        assert Fails.entered.wait(20)
        killer = threading.Thread(target=world.kill, args=(1,))
        killer.start()  # it waits for the function that still runs there
        thread.join(20)
        Fails.gate.set()
        killer.join()
        (error,) = errors
        assert isinstance(error, gw.WorkerLostError)
        assert error.worker == "worker1"
        with gw.context() as ctx:
            others.step(ctx)
            with pytest.raises(gw.WorkerLostError):
                optimizer.step(ctx)


def test_two_of_three_owners_step_when_the_third_is_gone() -> None:
    with World(3) as world, world.as_worker(0):
        local = local_model()
        model = spread_model("", "worker1", "worker2")
        optimizer = gw.DistributedOptimizer(SGD, gw.nn.remote_parameters(model), lr=0.1)
        x, y = next(batches(1))
        with gw.context() as ctx:
            gw.backward(ctx, [loss_of(model, x, y)])
            world.kill(2)
            with pytest.raises(gw.WorkerLostError, match="worker2"):
                optimizer.step(ctx)
        local_step(local, torch.optim.SGD(local.parameters(), lr=0.1), x, y)
        for index in (0, 1):
            torch.testing.assert_close(
                dict(model[index].state_dict()), dict(local[index].state_dict())
            )


def test_references_to_an_optimizer_go_with_it() -> None:
    with three_workers() as world:
        model = spread_model("worker1", "worker2", "")
        optimizer = gw.DistributedOptimizer(SGD, gw.nn.remote_parameters(model), lr=0.1)
        spread_step(model, optimizer, *next(batches(1)))
        del model, optimizer
        world[0].references.wait_quiet()
        assert world[1].debug_info()["owned"] == []
