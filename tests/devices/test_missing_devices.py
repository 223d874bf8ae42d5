"""Tensors of devices that the worker they are sent to does not have."""

import logging
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import gradwire as gw
from gradwire._wire import tensor_kinds
from gradwire.api import current_worker
from gradwire.errors import ClosedError
from tests.devices import pretended
from tests.devices.test_maps import FIRST, SECOND, THIRD, device_of, double, on
from tests.worlds import socket_world

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def only_the_first_there(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The second worker has the first of these devices, and no others."""

    def is_hidden(device: torch.device) -> bool:
        try:
            return current_worker().id == 1 and device != FIRST
        except ClosedError:
            return False  # a thread of nobody's

    monkeypatch.setattr(pretended, "is_hidden", is_hidden)
    monkeypatch.setattr(tensor_kinds, "_missed", set())
    return


@pytest.fixture
def worker() -> Iterator[gw.Worker]:
    """The first one, over sockets: within a process all have the same devices."""
    with socket_world(2) as workers:
        yield workers[0]


def both(x: Tensor, y: Tensor) -> tuple[str, Tensor]:
    return f"{x.device} {y.device}", x.cpu() * 2 + y.cpu()


def test_they_arrive_on_the_cpu_and_it_is_said_once(
    worker: gw.Worker, caplog: pytest.LogCaptureFixture
) -> None:
    assert worker.rpc_sync("worker1", device_of, (on(FIRST, 1),)) == "lazy:1"
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert worker.rpc_sync("worker1", device_of, (on(SECOND, 1),)) == "cpu"
        x = on(SECOND, 1, 2).detach()
        result = worker.rpc_sync("worker1", double, (x,))
    assert (result.device, result.tolist()) == (CPU, [2, 4])
    (message,) = (text for text in caplog.messages if "arrive on" in text)
    assert message.startswith(
        "tensors that leave from lazy:2 arrive on cpu here: there"
    )


def test_or_on_the_device_that_is_current_there(
    worker: gw.Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_kinds, "_current_device", lambda: FIRST)
    assert worker.rpc_sync("worker1", device_of, (on(SECOND, 1),)) == "lazy:1"


def test_quantized_tensors_do_so_too() -> None:
    tensor = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    recipe = tensor_kinds.take_apart(tensor)
    assert recipe is not None
    name, (_, stored, *how) = recipe
    for device in ("lazy:9", "no such device:0"):
        parts = ((device, False), stored.tensor, *how)
        assert tensor_kinds.put_together(name, parts).equal(tensor)


def test_gradients_go_back_to_the_device_of_their_tensor(worker: gw.Worker) -> None:
    x, y = on(SECOND, 1, 2), on(THIRD, 3, 4)
    with worker.autograd.context() as ctx:
        devices, result = worker.rpc_sync("worker1", both, (x, y))
        assert (devices, result.device) == ("cpu cpu", CPU)
        worker.autograd.backward(ctx, [result.sum()])
        found = worker.autograd.get_gradients(ctx)
    assert (found[x].device, found[y].device) == (SECOND, THIRD)
    assert (found[x].cpu().tolist(), found[y].cpu().tolist()) == ([2, 2], [1, 1])


def test_so_do_those_of_a_tensor_with_a_history(worker: gw.Worker) -> None:
    x = on(SECOND, 1, 2)
    with worker.autograd.context() as ctx:
        result = worker.rpc_sync("worker1", double, (x * 3,))
        worker.autograd.backward(ctx, [result.sum()])
        gradient = worker.autograd.get_gradients(ctx)[x]
    assert (gradient.device, gradient.cpu().tolist()) == (SECOND, [6, 6])


def test_and_differentiable_ones(worker: gw.Worker) -> None:
    x = on(SECOND, 1, 2)
    with worker.autograd.context() as ctx:
        result = worker.rpc_sync("worker1", torch.square, (x,))
        (first,) = worker.autograd.grad(ctx, [result.sum()], [x], create_graph=True)
        (second,) = worker.autograd.grad(ctx, [first.sum().cpu()], [x])
    assert first is not None
    assert second is not None
    assert (first.device, second.device) == (SECOND, SECOND)
    assert (first.cpu().tolist(), second.cpu().tolist()) == ([2, 4], [2, 2])


def test_a_device_that_a_map_names_has_to_be_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_hidden = pretended.is_hidden
    monkeypatch.setattr(pretended, "is_hidden", lambda _: False)
    apart = {0: {"device_maps": {"worker1": {FIRST: SECOND}}}}
    with socket_world(2, apart=apart) as (worker, _):
        monkeypatch.setattr(pretended, "is_hidden", is_hidden)  # it has gone
        with pytest.raises(RuntimeError, match="map puts a tensor on 'lazy:2' here"):
            worker.rpc_sync("worker1", device_of, (on(FIRST, 1),))


def test_a_failure_that_has_other_reasons_is_not_hidden(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Full(torch.Tensor):
        def to(self, *_: object) -> Tensor:  # type: ignore[override]
            raise failure

    for failure in (
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("device-side assert triggered"),
    ):
        given = torch.ones(1).as_subclass(Full)
        with pytest.raises(type(failure), match=str(failure)):
            tensor_kinds.put_together("device", (("cpu", False), given, False))
