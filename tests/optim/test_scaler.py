"""Loss scaling: all owners step, or none."""

import pytest
import torch
from torch import nn

import gradwire as gw
from tests.training import (
    assert_same,
    batches,
    local_model,
    local_step,
    loss_of,
    spread_model,
)
from tests.worlds import three_workers


class Overflows(nn.Module):
    """Passes its input on, with a gradient for its weight that is not finite while switched on."""

    is_on = False

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight * (float("inf") if Overflows.is_on else 0.0)


@pytest.fixture(autouse=True)
def switched_off() -> None:
    Overflows.is_on = False


def test_scaled_training_gives_the_same_numbers() -> None:
    local = local_model()
    here = torch.optim.Adam(local.parameters(), lr=0.01)
    scaler = gw.GradScaler(init_scale=1024.0, growth_interval=2)
    with three_workers():
        model = spread_model("", "worker1", "worker2")
        params = gw.nn.remote_parameters(model)
        there = gw.DistributedOptimizer(torch.optim.Adam, params, lr=0.01)
        for x, y in batches(4):
            local_step(local, here, x, y)
            with gw.context() as ctx:
                gw.backward(ctx, [scaler.scale(loss_of(model, x, y))])
                scaler.step(there, ctx)
            scaler.update()
        assert_same(model, local)
        assert scaler.get_scale() == 4096.0


def test_infinity_on_one_owner_keeps_all_from_stepping() -> None:
    scaler = gw.GradScaler(init_scale=8.0)
    with three_workers():
        model = nn.Sequential(
            nn.Linear(2, 2),
            gw.RemoteModule("worker1", nn.Linear, (2, 2)),
            gw.RemoteModule("worker2", Overflows),
        )
        params = gw.nn.remote_parameters(model)
        optimizer = gw.DistributedOptimizer(torch.optim.SGD, params, lr=0.1)
        before = {k: v.clone() for k, v in model.state_dict().items()}
        Overflows.is_on = True
        for is_on in (True, False):
            Overflows.is_on = is_on
            with gw.context() as ctx:
                loss = model(torch.ones(1, 2)).nan_to_num().sum()
                gw.backward(ctx, [scaler.scale(loss)])
                scaler.step(optimizer, ctx)
            scaler.update()
            after = model.state_dict()
            assert torch.equal(after["0.weight"], before["0.weight"]) is is_on
            assert torch.equal(after["1.weight"], before["1.weight"]) is is_on
            assert scaler.get_scale() == 4.0


def test_gradients_are_unscaled_once_before_they_are_clipped() -> None:
    scaler = gw.GradScaler(init_scale=64.0)
    x, y = next(batches(1))
    local = local_model()
    loss_of(local, x, y).backward()
    norm = nn.utils.get_total_norm([p.grad for p in local.parameters()])  # type: ignore[misc]
    with three_workers():
        model = spread_model("", "worker1", "worker2")
        params = gw.nn.remote_parameters(model)
        optimizer = gw.DistributedOptimizer(torch.optim.SGD, params, lr=0.1)
        with pytest.raises(RuntimeError, match="step first"):
            scaler.update()
        with gw.context() as ctx:
            gw.backward(ctx, [scaler.scale(loss_of(model, x, y))])
            scaler.unscale_(optimizer, ctx)
            torch.testing.assert_close(optimizer.clip_grad_norm(ctx, 10.0), norm)
            with pytest.raises(RuntimeError, match="since the last update"):
                scaler.unscale_(optimizer, ctx)
            scaler.step(optimizer, ctx)
            scaler.update()


def test_half_precision_gradients_are_refused() -> None:
    scaler = gw.GradScaler()
    with three_workers():
        layer = gw.RemoteModule("worker1", nn.Linear, (2, 2))
        layer.half()
        optimizer = gw.DistributedOptimizer(
            torch.optim.SGD, layer.remote_parameters(), lr=0.1
        )
        with gw.context() as ctx:
            loss = layer(torch.ones(1, 2, dtype=torch.float16)).sum()
            gw.backward(ctx, [loss.float()])
            with pytest.raises(ValueError, match="FP16"):
                scaler.step(optimizer, ctx)


def test_its_state_is_that_of_torchs_scaler() -> None:
    scaler = gw.GradScaler(init_scale=512.0, growth_interval=7)
    twin = torch.amp.GradScaler("cpu")
    twin.load_state_dict(scaler.state_dict())
    assert twin.get_scale() == 512.0
    other = gw.GradScaler()
    other.load_state_dict(twin.state_dict())
    assert other.state_dict() == scaler.state_dict()
    with pytest.raises(RuntimeError, match="empty"):
        other.load_state_dict({})
    with pytest.raises(ValueError, match="growth_factor=1"):
        gw.GradScaler(growth_factor=1.0)


def test_one_that_is_not_enabled_does_nothing() -> None:
    scaler = gw.GradScaler(enabled=False)
    with three_workers():
        model = spread_model("", "worker1", "worker2")
        params = gw.nn.remote_parameters(model)
        optimizer = gw.DistributedOptimizer(torch.optim.SGD, params, lr=0.1)
        with gw.context() as ctx:
            loss = loss_of(model, *next(batches(1)))
            assert scaler.scale(loss) is loss
            gw.backward(ctx, [loss])
            scaler.step(optimizer, ctx)
            scaler.update()
    assert scaler.state_dict() == {}
    assert scaler.get_scale() == 1.0
