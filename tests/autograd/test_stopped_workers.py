"""A worker is stopped in the middle of a pass, which ends by itself and says who that was."""

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

import gradwire as gw
from gradwire._autograd.messages import PassRequest, read_request
from gradwire._autograd.pass_state import Step
from gradwire.api import enter
from tests.autograd.functions import doubles
from tests.processes import Process, Processes
from tests.worlds import SOON

pytestmark = pytest.mark.slow

BEAT = 1.0


class Stops(Function):
    """Stops its process in the backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        signal.raise_signal(signal.SIGSTOP)  # of this thread: it does not go on
        return gradients[0]


def stopping(x: Tensor) -> Tensor:
    made: Tensor = Stops.apply(x)
    return made


def residual(x: Tensor, to: str, func: Callable[[Tensor], Tensor]) -> Tensor:
    """Whoever runs this waits in a pass for the gradients that come back from there."""
    h = x * 2
    y: Tensor = gw.rpc_sync(to, func, (h,))
    return y * h


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[Process]]:
    """The test is worker 0; these are 1 and 2."""
    processes = Processes(tmp_path)
    try:
        started = [processes.serve(r, 3, host_heartbeat=BEAT) for r in (1, 2)]
        with processes.world(3, host_heartbeat=BEAT) as worker:
            before = enter(worker)
            try:
                yield started
            finally:
                enter(before)
                for server in started:
                    server.kill()
    finally:
        processes.close()


def see_it_lost(context: int, loss: Tensor, name: str) -> None:
    begun = time.monotonic()
    with pytest.raises(gw.WorkerLostError, match=f"{name}.* it is stopped") as caught:
        gw.backward(context, [loss])
    assert caught.value.worker == name
    assert time.monotonic() - begun < SOON


def test_one_of_two_that_are_asked_at_once(servers: list[Process]) -> None:
    with gw.context() as context:
        x = doubles(3)
        y, z = (gw.rpc_sync(f"worker{i}", torch.mul, (x * i, 2)) for i in (1, 2))
        servers[1].stop()
        see_it_lost(context, (y + z).sum(), "worker2")


def test_one_that_is_waited_for_inside_the_engine(servers: list[Process]) -> None:
    with gw.context() as context:
        loss = residual(doubles(3), "worker1", stopping).sum()
        see_it_lost(context, loss, "worker1")


def test_one_that_another_worker_waits_for_inside_the_engine(
    servers: list[Process],
) -> None:
    with gw.context() as context:
        x = doubles(3)
        y = gw.rpc_sync("worker1", residual, (x * 1, "worker2", stopping))
        see_it_lost(context, y.sum(), "worker2")


@pytest.mark.parametrize("step", [Step.ANNOUNCE, Step.REST])
def test_one_that_is_asked_in_a_later_step(
    servers: list[Process], step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    autograd = gw.api.current_worker().autograd

    def stopping_first(send: Callable[..., Any]) -> Callable[..., Any]:
        def sending(to: int, message: Any, *others: Any) -> Any:
            if type(message) is PassRequest:
                asked = read_request(message)[0].step
                if to == 1 and asked == step:
                    servers[0].stop()
            return send(to, message, *others)

        return sending

    for name in ("ask", "request"):
        monkeypatch.setattr(autograd, name, stopping_first(getattr(autograd, name)))
    with gw.context() as context:
        loss = residual(doubles(3), "worker1", torch.sin).sum()
        see_it_lost(context, loss, "worker1")
