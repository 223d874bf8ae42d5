"""Training over workers gives the numbers of training in one process."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, StepLR

import gradwire as gw
from tests.training import (
    assert_same,
    batches,
    local_model,
    local_step,
    loss_of,
    spread_model,
    spread_step,
)
from tests.worlds import three_workers

MOST = 0.9  # a norm that gradients have now and then
CLASSES = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
]


def groups_of(named: list[tuple[str, Any]]) -> list[dict[str, Any]]:
    """Biases apart, with settings of their own."""
    biases = [pair for pair in named if pair[0].endswith("bias")]
    rest = [pair for pair in named if not pair[0].endswith("bias")]
    return [
        {"params": rest},
        {"params": biases, "weight_decay": 0.0, "lr": 0.03},
    ]


@pytest.mark.parametrize(("kind", "settings"), CLASSES)
def test_fifty_steps_with_all_that_training_has(
    kind: type[torch.optim.Optimizer], settings: dict[str, Any]
) -> None:
    local = local_model()
    here = kind(groups_of(list(local.named_parameters())), **settings)
    schedule = StepLR(here, 10, 0.5)
    norms = []
    for x, y in batches(50):
        here.zero_grad()
        loss_of(local, x, y).backward()
        norms.append(nn.utils.clip_grad_norm_(local.parameters(), MOST))
        here.step()
        schedule.step()
    with three_workers():
        model = spread_model("", "worker1", "worker2")
        named = gw.nn.named_remote_parameters(model)
        there = gw.DistributedOptimizer(kind, groups_of(named), **settings)
        schedule = StepLR(there, 10, 0.5)
        for (x, y), norm in zip(batches(50), norms, strict=True):
            with gw.context() as ctx:
                gw.backward(ctx, [loss_of(model, x, y)])
                torch.testing.assert_close(there.clip_grad_norm(ctx, MOST), norm)
                there.step(ctx)
            schedule.step()
        assert_same(model, local)
        assert min(norms) < MOST < max(norms), (
            "clipping never, or always, did something"
        )


@pytest.mark.parametrize(
    "kind",
    [
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adamax,
        torch.optim.ASGD,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
    ],
)
def test_every_class_of_torch(kind: type[torch.optim.Optimizer]) -> None:
    local = local_model()
    here = kind(local.parameters())
    with three_workers():
        model = spread_model("worker1", "", "worker2")
        there = gw.DistributedOptimizer(kind, gw.nn.remote_parameters(model))
        for x, y in batches(5):
            local_step(local, here, x, y)
            spread_step(model, there, x, y)
        assert_same(model, local)


@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: CosineAnnealingLR(optimizer, 8),
        lambda optimizer: OneCycleLR(optimizer, 0.2, total_steps=10),  # betas, too
    ],
)
def test_schedulers_reach_every_owner(schedule: Any) -> None:
    local = local_model()
    here = torch.optim.AdamW(local.parameters(), lr=0.01)
    with three_workers():
        model = spread_model("", "worker1", "worker2")
        params = gw.nn.remote_parameters(model)
        there = gw.DistributedOptimizer(torch.optim.AdamW, params, lr=0.01)
        schedules = schedule(here), schedule(there)
        for x, y in batches(8):
            local_step(local, here, x, y)
            spread_step(model, there, x, y)
            for each in schedules:
                each.step()
        assert_same(model, local)


def test_a_learning_rate_that_is_a_tensor_reaches_every_owner() -> None:
    local = local_model()
    here = torch.optim.SGD(local.parameters(), lr=torch.tensor(0.1))
    with three_workers():
        model = spread_model("", "worker1", "worker2")
        params = gw.nn.remote_parameters(model)
        rate = torch.tensor(0.1)
        there = gw.DistributedOptimizer(torch.optim.SGD, params, lr=rate)
        for x, y in batches(3):
            local_step(local, here, x, y)
            spread_step(model, there, x, y)
            for optimizer in (here, there):
                optimizer.param_groups[0]["lr"].mul_(0.5)
        assert_same(model, local)


def test_a_group_added_later_is_trained() -> None:
    local = local_model()
    here = torch.optim.Adam(local[0].parameters(), lr=0.01)
    with three_workers():
        model = spread_model("", "worker1", "worker2")
        params = gw.nn.remote_parameters(model)
        there = gw.DistributedOptimizer(torch.optim.Adam, params[:2], lr=0.01)
        for number, (x, y) in enumerate(batches(6)):
            local_step(local, here, x, y)
            spread_step(model, there, x, y)
            if number == 2:  # on worker1, which had none, and on both
                here.add_param_group({"params": local[1].parameters(), "lr": 0.1})
                there.add_param_group({"params": params[2:4], "lr": 0.1})
            if number == 3:
                here.add_param_group({"params": local[2].parameters()})
                there.add_param_group({"params": params[4:]})
        assert_same(model, local)
        assert [group["lr"] for group in there.param_groups] == [0.01, 0.1, 0.01]


def test_gradients_may_add_up_in_grad_over_several_contexts() -> None:
    local = local_model()
    here = torch.optim.SGD(local.parameters(), lr=0.1)
    with three_workers():
        model = spread_model("", "worker1", "worker2")
        params = gw.nn.remote_parameters(model)
        there = gw.DistributedOptimizer(torch.optim.SGD, params, lr=0.1)
        for x, y in batches(4):
            here.zero_grad()
            there.zero_grad()
            for part in range(0, 4, 2):
                some = x[part : part + 2], y[part : part + 2]
                loss_of(local, *some).backward()
                with gw.context() as ctx:
                    gw.backward(ctx, [loss_of(model, *some)], accumulate=True)
            nn.utils.clip_grad_norm_(local.parameters(), 0.05)
            there.clip_grad_norm(None, 0.05)
            here.step()
            there.step()
        assert_same(model, local)


def test_the_state_goes_to_torch_and_back() -> None:
    """Ids of parameters are those of one process, so it fits there."""
    local = local_model()
    here = torch.optim.Adam(groups_of(list(local.named_parameters())), lr=0.02)
    with three_workers():
        model = spread_model("worker2", "worker1", "")
        named = gw.nn.named_remote_parameters(model)
        there = gw.DistributedOptimizer(torch.optim.Adam, groups_of(named), lr=0.02)
        steps = list(batches(9))
        for x, y in steps[:3]:
            spread_step(model, there, x, y)
        local.load_state_dict(model.state_dict())
        here.load_state_dict(there.state_dict())
        for x, y in steps[3:6]:
            local_step(local, here, x, y)
        model.load_state_dict(local.state_dict())
        there.load_state_dict(here.state_dict())
        for x, y in steps[6:]:
            local_step(local, here, x, y)
            spread_step(model, there, x, y)
        assert_same(model, local)
        state, twin = there.state_dict(), here.state_dict()
        assert state.keys() == twin.keys()
        assert list(state["state"]) == list(twin["state"])
        assert state["param_groups"] == twin["param_groups"]


def test_hooks_around_a_step_are_called() -> None:
    with three_workers():
        model = spread_model("worker1", "worker2", "")
        params = gw.nn.remote_parameters(model)
        optimizer = gw.DistributedOptimizer(torch.optim.SGD, params, lr=0.1)
        called: list[str] = []
        optimizer.register_step_pre_hook(lambda *_: called.append("before"))
        optimizer.register_step_post_hook(lambda *_: called.append("after"))
        spread_step(model, optimizer, *next(batches(1)))
        assert called == ["before", "after"]


def test_it_shows_its_settings_and_owners() -> None:
    with three_workers():
        params = gw.nn.remote_parameters(spread_model("worker1", "worker2", ""))
        text = repr(gw.DistributedOptimizer(torch.optim.SGD, params, lr=0.25))
        assert "lr: 0.25" in text
        assert "SGD" in text
        assert "{'worker1': 2, 'worker2': 2, 'worker0': 2}" in text
