"""Training that goes back to its last checkpoint: it ends as if nothing had happened."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed import HashStore, Store

import gradwire as gw
from gradwire._transport.stores import Place
from gradwire.api import enter
from gradwire.testing import World
from gradwire.training_loop import Step, comes_of_a_loss
from gradwire.worker import Worker
from tests.worlds import LIMIT, join_world, vanish

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*TypedStorage is deprecated:UserWarning",  # torch's readers about themselves
    "ignore:torch.distributed is disabled:UserWarning",
)

STEPS = 12


def build() -> tuple[nn.Module, gw.DistributedOptimizer]:
    remote = gw.RemoteModule("server", nn.Linear, (2, 4))
    model = nn.Sequential(remote, nn.Tanh(), nn.Linear(4, 1))
    set_parameters(model[2])
    gw.rpc_sync("server", fill, (remote.module_rref,))
    torch.manual_seed(5)
    parameters = gw.nn.remote_parameters(model)
    return model, gw.DistributedOptimizer(torch.optim.Adam, parameters, lr=0.1)


def set_parameters(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))


def fill(module: gw.RRef[nn.Module]) -> None:
    set_parameters(module.local_value())


def learn(step: Step) -> float:
    """One step, on data that is drawn at random."""
    with gw.context() as ctx:
        x = torch.rand(8, 2)
        loss = (step.model(x) - x.sum(1, keepdim=True)).square().mean()
        gw.backward(ctx, [loss])
        step.optimizer.step(ctx)
    return loss.item()


@pytest.fixture
def store() -> Store:
    return HashStore()


def join(name: str, store: Store, **options: float) -> Worker:
    return join_world(name, Place(store, None, None, None), **options)


@pytest.fixture
def trainer(store: Store) -> Iterator[Worker]:
    with join("trainer", store) as worker:
        before = enter(worker)
        try:
            yield worker
        finally:
            enter(before)


@pytest.fixture
def undisturbed(tmp_path: Path) -> list[float]:
    """The losses of a training in which nothing happens."""
    calm = HashStore()
    with join("server", calm), join("trainer", calm) as worker:
        before = enter(worker)
        losses = []
        for step in gw.resumable(STEPS, build, path=tmp_path / "calm", save_every=5):
            with step:
                losses.append(learn(step))
        enter(before)
    assert losses[-1] < losses[0]
    return losses


class Server:
    """A worker that can be lost, and come back without what it had."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.come()

    def come(self) -> None:
        self.worker = join("server", self._store)

    def replace(self) -> None:
        vanish(self.worker)
        self.come()


@pytest.fixture
def server(trainer: Worker, store: Store) -> Iterator[Server]:
    server = Server(store)
    yield server
    server.worker.shutdown()


def test_a_training_that_lost_workers_ends_as_one_that_did_not(
    server: Server, tmp_path: Path, undisturbed: list[float]
) -> None:
    losses: dict[int, float] = {}
    done: list[int] = []
    kills = [3, 5, 7, 11]
    for step in gw.resumable(STEPS, build, path=tmp_path / "save", save_every=5):
        with step:
            if step in kills:
                kills.remove(step)
                server.replace()
            losses[step] = learn(step)
            done.append(int(step))
    assert [losses[number] for number in range(STEPS)] == undisturbed
    # Each time from the last checkpoint: of 0, 5 and 10.
    assert done == [*range(3), *range(5), *range(5, 7), *range(5, 11), 10, 11]


def test_a_training_waits_for_a_worker_to_come_back(
    server: Server, tmp_path: Path
) -> None:
    losses = []
    for step in gw.resumable(2, build, path=tmp_path / "save", patience=LIMIT):
        with step:
            if step == 1 and len(losses) == 1:
                vanish(server.worker)
                comer = threading.Timer(0.05, server.come)
                comer.start()
            losses.append(learn(step))
    comer.join()
    assert len(losses) == 3


def train(path: Path, body: Callable[[Step], object]) -> None:
    for step in gw.resumable(2, build, path=path, patience=0.05):
        with step:
            body(step)


def test_who_does_not_come_back_in_time_ends_the_training(
    server: Server, tmp_path: Path
) -> None:
    def lose(step: Step) -> None:
        vanish(server.worker)
        learn(step)

    with pytest.raises(gw.WorkerLostError, match="server"):
        train(tmp_path / "save", lose)


def test_another_error_is_the_users(server: Server, tmp_path: Path) -> None:
    def fail(step: Step) -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        train(tmp_path / "save", fail)


def test_a_loss_while_saving_goes_back_too(server: Server, tmp_path: Path) -> None:
    done = []
    for step in gw.resumable(2, build, path=tmp_path / "save", save_every=1):
        with step:
            learn(step)
            done.append(int(step))
            if done == [0, 1]:
                server.replace()
    assert done == [0, 1, 1]


def test_a_new_process_goes_on_where_the_old_one_saved(
    server: Server, tmp_path: Path, undisturbed: list[float]
) -> None:
    losses = []
    for step in gw.resumable(STEPS, build, path=tmp_path / "save", save_every=5):
        with step:
            losses.append(learn(step))
        if step == 7:
            break
    assert losses == undisturbed[:8]
    torch.manual_seed(77)
    again = gw.resumable(STEPS, build, path=tmp_path / "save", save_every=5)
    for step in again:
        with step:
            assert learn(step) == undisturbed[step]
    assert step == STEPS - 1
    assert list(gw.resumable(STEPS, build, path=tmp_path / "save")) == []


def test_a_checkpoint_after_no_step_is_refused() -> None:
    with pytest.raises(ValueError, match="save_every=0"):
        next(gw.resumable(1, build, path="unused", save_every=0))


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (gw.WorkerLostError("a", "gone"), True),
        (gw.StaleReferenceError("gone"), True),
        (
            caused(gw.GradwireError("Error on Node 1"), gw.WorkerLostError("a", "")),
            True,
        ),
        (gw.OwnersError({"a": ValueError(), "b": gw.WorkerLostError("b", "")}), True),
        (gw.OwnersError({"a": ValueError(), "b": KeyError()}), False),
        (caused(ValueError(), KeyError()), False),
        (gw.CallTimeout("f", "a", 1), False),
    ],
)
def test_what_comes_of_a_loss(error: Exception, expected: bool) -> None:
    assert comes_of_a_loss(error) is expected


def test_a_pass_that_lost_a_worker_comes_of_it() -> None:
    with World(2) as world, world.as_worker(0), gw.context() as ctx:
        x = torch.ones(2, requires_grad=True)
        loss = gw.rpc_sync("worker1", torch.mul, args=(x, 2)).sum()
        world.kill(1)
        with pytest.raises(gw.GradwireError) as caught:
            gw.backward(ctx, [loss])
    assert comes_of_a_loss(caught.value)
