"""DistributedDataParallel inside a context: its reducer runs, `.grad` stays as it was."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from autograd_world import autograds
from gradwire.autograd import replicas

close = torch.testing.assert_close


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    """Of one; gloo keeps some descriptors for the life of the process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_a_replicated_module_behind_a_call() -> None:
    module = torch.nn.Linear(3, 2).double()
    expected = torch.nn.Linear(3, 2).double()
    expected.load_state_dict(module.state_dict())
    parallel = DistributedDataParallel(module)
    reduced: list[int] = []

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        reduced.append(bucket.index())
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    parallel.register_comm_hook(None, hook)
    x = torch.rand(4, 3, dtype=torch.float64, requires_grad=True)
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


def test_nothing_is_looked_for_without_a_process_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(replicas, "_search", lambda: pytest.fail("searched"))
    parameter = torch.nn.Parameter(torch.ones(3))
    edge = torch.autograd.graph.get_gradient_edge(parameter)
    assert replicas.replicated([edge.node]) == []
