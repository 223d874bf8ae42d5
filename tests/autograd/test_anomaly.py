"""Anomaly mode of the caller: on all workers an error names the line of the forward behind it."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils.hooks import RemovableHandle

import gradwire as gw
from gradwire._autograd import hooks
from gradwire._rpc import torch_modes
from gradwire.api import enter
from gradwire.testing import World
from tests.autograd.functions import doubles
from tests.processes import Processes
from tests.worlds import together

pytestmark = pytest.mark.filterwarnings("ignore:Error detected in")  # torch's own words


class Breaks(Function):
    """Its backward makes nan, or raises."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, raises: bool) -> Tensor:
        ctx.raises = raises
        return tensor * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        if ctx.raises:
            raise ValueError("this backward fails")
        return gradients[0] * float("nan"), None


def breaks(x: Tensor, path: list[str], raises: bool = False) -> Tensor:
    if path:
        result: Tensor = gw.rpc_sync(path[0], breaks, (x * 2, path[1:], raises))
        return result
    broken = Breaks.apply(torch.sin(x), raises)  # the line to be named
    return broken * 2


LINE = next(
    number
    for number, line in enumerate(Path(__file__).read_text().splitlines(), 1)
    if line.endswith("# the line to be named")
)


def see_line(error: BaseException, node: int) -> None:
    text = str(error)
    assert text.startswith(f"Error on Node {node}: ")
    assert "BreaksBackward was made in the forward here:" in text
    assert f'File "{__file__}", line {LINE}, in breaks' in text
    frames = text.partition("forward here:")[2]
    assert str(Path(gw.__file__).parent) not in frames  # the user's lines only


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("path", ["", "1", "12", "120"])
def test_the_line_of_the_forward_is_named(path: str, seed: int | None) -> None:
    with World(3, seed=seed) as world, world.as_worker(0), gw.context() as ctx:
        with torch.autograd.set_detect_anomaly(True):
            x = doubles(3)
            y = breaks(x, [f"worker{digit}" for digit in path])
            with pytest.raises(gw.GradwireError, match="returned nan values") as caught:
                gw.backward(ctx, [(y * x).sum()])
        see_line(caught.value, int(path[-1:] or 0))
        assert isinstance(caught.value.__cause__, RuntimeError)


def test_the_line_is_named_for_other_errors_too() -> None:
    with World(2) as world, world.as_worker(0), gw.context() as ctx:
        with torch.autograd.set_detect_anomaly(True, check_nan=False):
            y = breaks(doubles(3), ["worker1"], True)
            with pytest.raises(gw.GradwireError, match="this backward fails") as caught:
                gw.backward(ctx, [y.sum()])
        see_line(caught.value, 1)
        assert type(caught.value.__cause__) is ValueError


def test_nan_may_be_let_through() -> None:
    with World(2) as world, world.as_worker(0), gw.context() as ctx:
        x = doubles(3)
        with torch.autograd.set_detect_anomaly(True, check_nan=False):
            gw.backward(ctx, [breaks(x, ["worker1"]).sum()])
        assert gw.get_gradients(ctx)[x].isnan().all()


def test_a_forward_without_anomaly_mode_is_not_known() -> None:
    with World(2) as world, world.as_worker(0), gw.context() as ctx:
        y = breaks(doubles(3), ["worker1"])
        with (
            torch.autograd.set_detect_anomaly(True),
            pytest.raises(gw.GradwireError, match="anomaly mode was not on") as caught,
        ):
            gw.backward(ctx, [y.sum()])
        assert "BreaksBackward" in str(caught.value)


def power(x: Tensor) -> Tensor:
    return x**1.5  # its second derivative at 0 is infinite


def test_a_node_made_in_a_backward_names_the_forward_behind_that() -> None:
    with World(2) as world, world.as_worker(0), gw.context() as ctx:
        x = torch.zeros(3, requires_grad=True)
        with torch.autograd.set_detect_anomaly(True):
            y = gw.rpc_sync("worker1", power, (x,)).sum()
            (slope,) = gw.grad(ctx, [y], [x], create_graph=True)
            assert slope is not None
            with pytest.raises(gw.GradwireError, match="Error on Node 1") as caught:
                gw.backward(ctx, [(slope * 0).sum()])
        made, _, further = str(caught.value).partition("which is a backward; ")
        assert "made in the forward here" in made
        assert "PowBackward0 was made in the forward here" in further
        assert "in power" in further


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    started = Processes(tmp_path)
    yield started
    started.close()


@pytest.mark.slow
def test_the_mode_of_the_caller_reaches_other_processes(processes: Processes) -> None:
    for rank in (1, 2):
        processes.serve(rank, 3)
    with processes.world(3) as worker:
        before = enter(worker)
        try:
            with gw.context() as ctx:
                with torch.autograd.set_detect_anomaly(True):
                    y = breaks(doubles(3), ["worker1", "worker2"])
                    assert gw.rpc_sync("worker2", torch.is_anomaly_enabled)
                    with pytest.raises(gw.GradwireError, match="nan") as caught:
                        gw.backward(ctx, [y.sum()])
                see_line(caught.value, 2)
                assert not gw.rpc_sync("worker2", torch.is_anomaly_enabled)
        finally:
            enter(before)


def test_the_mode_is_on_as_long_as_somebody_needs_it() -> None:
    states: list[bool] = []

    def use(count: int) -> None:
        for _ in range(count):
            with torch_modes.anomaly_mode(check_nan=True):
                states.append(torch.is_anomaly_enabled())

    together(*(lambda: use(200) for _ in range(3)))
    assert all(states)
    assert not torch.is_anomaly_enabled()


def test_who_switched_the_mode_on_switches_it_off() -> None:
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        with torch_modes.anomaly_mode(check_nan=True):
            assert not torch.is_anomaly_check_nan_enabled()
        assert torch.is_anomaly_enabled()


def test_without_the_mode_nothing_is_looked_at() -> None:
    with World(2) as world, world.as_worker(0), gw.context() as ctx:
        x = doubles(3)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            gw.backward(ctx, [breaks(x, ["worker1"]).sum()])
        assert gw.get_gradients(ctx)[x].isnan().all()


def test_what_the_mode_puts_on_nodes_does_not_count_as_hooks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hooks, "on_crossings", [])
    monkeypatch.setattr(hooks, "_not_on_nodes", [RemovableHandle.next_id])
    with World(2) as world, world.as_worker(0), gw.context() as ctx:
        x = doubles(3)
        with torch.autograd.set_detect_anomaly(True):
            gw.backward(ctx, [gw.rpc_sync("worker1", torch.add, (x, x)).sum()])
    assert not hooks.on_crossings
    assert not hooks.were_made()
