"""Tensors, passes and training with parameters on a GPU. Only where there is one."""

import threading

import pytest
import torch
from torch import Tensor, nn

import gradwire as gw
from gradwire.testing import World
from tests.worlds import autograds, socket_world

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="there is no GPU here"
)


@pytest.fixture(autouse=True, scope="module")
def awake() -> None:
    """The GPU is opened before what is left behind is looked for."""
    torch.ones(1, device="cuda", requires_grad=True).sum().backward()


def cuda(*shape: int) -> Tensor:
    return torch.rand(*shape, dtype=torch.float64, device="cuda", requires_grad=True)


def double_there(x: Tensor) -> Tensor:
    return (x.cuda() * 2).cpu()


def test_a_pass_goes_through_a_gpu_on_another_worker() -> None:
    with socket_world(2) as workers, workers[0].autograd.context() as context:
        x = torch.rand(3, dtype=torch.float64, requires_grad=True)
        y = workers[0].rpc_sync("worker1", double_there, args=(x,))
        workers[0].autograd.backward(context, [y.sum()])
        gradients = workers[0].autograd.get_gradients(context)
    torch.testing.assert_close(gradients[x], torch.full_like(x, 2))


def test_tensors_of_a_gpu_are_recorded_where_they_leave_and_arrive() -> None:
    with socket_world(2) as workers, workers[0].autograd.context() as context:
        x = cuda(3)
        y = workers[0].rpc_sync("worker1", torch.mul, args=(x, 3))
        workers[0].autograd.backward(context, [y.sum()])
        gradient = workers[0].autograd.get_gradients(context)[x]
    assert gradient.device == x.device
    torch.testing.assert_close(gradient.cpu(), torch.full((3,), 3.0).double())


def test_sends_that_wait_in_the_engine_get_their_gradients() -> None:
    """A residual path: what was sent is also used here, so the run has to wait for the rest."""
    with autograds(2) as world, world[0].context() as context:
        x = cuda(4)
        h = x * 2
        (there,) = world.transfer(0, 1, context, [h])
        (back,) = world.transfer(1, 0, context, [there * 3])
        world[0].backward(context, [(h + back).sum()])
        gradient = world[0].get_gradients(context)[x]
    torch.testing.assert_close(gradient, torch.full_like(gradient, 8))


def test_passes_that_wait_do_not_hold_each_other_up() -> None:
    """The engine has one thread for a device: two passes meet in it."""
    with autograds(2) as world:
        done: list[bool] = []

        def run() -> None:
            with world[0].context() as context:
                x = cuda(4)
                h = x * 2
                for _ in range(5):
                    (there,) = world.transfer(0, 1, context, [h])
                    (back,) = world.transfer(1, 0, context, [there * 3])
                    h = h + back
                world[0].backward(context, [h.sum()])
                gradient = world[0].get_gradients(context)[x]
                done.append(bool((gradient == 2 * 4**5).all()))

        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(40)
        assert done == [True] * 4


def test_a_model_on_a_gpu_of_another_worker_is_trained() -> None:
    with World(2) as world, world.as_worker(0):
        torch.manual_seed(0)
        layer = gw.RemoteModule("worker1/cuda:0", nn.Linear, (4, 1))
        optimizer = gw.DistributedOptimizer(
            torch.optim.Adam, layer.remote_parameters(), lr=0.1
        )
        x, y = torch.rand(16, 4), torch.rand(16, 1)
        losses = []
        for _ in range(30):
            with gw.context() as context:
                loss = nn.functional.mse_loss(layer(x), y)
                losses.append(loss.item())
                gw.backward(context, [loss])
                optimizer.step(context)
        assert losses[-1] < losses[0] / 2
        (weight, _) = layer.remote_parameters()
        assert weight.to_here().is_cuda
