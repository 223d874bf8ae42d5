"""Sends that wait in graphs on several devices: entered when all else is done, on every queue."""

import random
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import gradwire as gw
from gradwire._autograd import device_queues
from gradwire.testing import World
from tests.autograd.functions import Raises
from tests.autograd.programs import check, draw
from tests.worlds import LIMIT, autograds

close = torch.testing.assert_close
CPU = torch.device("cpu")
has_cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device"
)


@pytest.fixture(scope="module", autouse=True)
def _cuda() -> None:
    """Opens descriptors on first use, and keeps them for the life of the process."""
    if torch.cuda.is_available():
        mixed(torch.ones(3, requires_grad=True), "cuda", 1).sum().backward()


@pytest.fixture
def two_rounds(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if there was a device, whose queue is the CPU's own."""
    monkeypatch.setattr(device_queues, "are_needed", lambda: True)
    monkeypatch.setattr(device_queues, "_survey", lambda sources: ([CPU], 2))
    Raises.is_on = False
    yield
    Raises.is_on = True


@pytest.mark.usefixtures("two_rounds")
@pytest.mark.parametrize("seed", range(3))
def test_programs_are_exact_behind_gates(seed: int) -> None:
    chance = random.Random(seed)
    with autograds(4, seed=seed) as world:
        for _ in range(30):
            check(draw(chance.randrange, most_workers=4), world, passes=2)
        assert world.passes() == 0


def test_a_graph_on_the_cpu_needs_no_gates() -> None:
    x = torch.ones(3, requires_grad=True)
    assert device_queues._survey([(x * 2).sum().grad_fn]) == ([], 0)


def mixed(y: Tensor, device: str, times: int) -> Tensor:
    """To a device and back."""
    for _ in range(times):
        z = y.to(device)
        for _ in range(20):
            z = z * 1.01
        y = torch.sin(z.cpu())
    return y


@has_cuda
def test_the_ways_between_queues_are_counted() -> None:
    x = torch.ones(3, requires_grad=True)
    loss = mixed(x * 2, "cuda", 3).sum()
    devices, crossings = device_queues._survey([loss.grad_fn])
    assert devices == [torch.device("cuda", torch.cuda.current_device())]
    assert crossings == 6


@has_cuda
@pytest.mark.parametrize("times", [1, 3])
def test_a_residual_path_over_devices_does_not_hang(times: int) -> None:
    x = torch.rand(3, dtype=torch.float64, requires_grad=True)
    with World(2) as world, world.as_worker(0):
        for _ in range(10):
            with gw.context() as ctx:
                h = x * 2
                y = gw.rpc_sync("worker1", torch.sin, (h,))
                z = gw.rpc_sync("worker1", torch.cos, (mixed(y, "cuda", times) * h,))
                loss = (mixed(z, "cuda", times) * h).sum()
                thread = threading.Thread(
                    target=world[0].autograd.backward, args=(ctx, [loss]), daemon=True
                )
                thread.start()
                thread.join(LIMIT)
                assert not thread.is_alive()
                h = x * 2
                z = torch.cos(mixed(torch.sin(h), "cpu", times) * h)
                local = (mixed(z, "cpu", times) * h).sum()
                close(gw.get_gradients(ctx)[x], torch.autograd.grad(local, [x])[0])


@has_cuda
def test_an_error_on_a_device_ends_the_pass() -> None:
    x = torch.rand(3, requires_grad=True)
    with World(2) as world, world.as_worker(0), gw.context() as ctx:
        h = x * 2
        y = gw.rpc_sync("worker1", torch.sin, (h,))
        loss = (Raises.apply(y.cuda() * 2).cpu() * h).sum()
        with pytest.raises(gw.GradwireError, match="this backward fails"):
            gw.backward(ctx, [loss])
