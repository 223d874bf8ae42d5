"""Checkpoints: one layout writes, any other reads, and the one before stays whole."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import gradwire as gw
from gradwire.checkpoint import shards
from gradwire.checkpoint.layout import new_save
from gradwire.testing import World
from tests.training import (
    assert_same,
    batches,
    local_model,
    local_step,
    spread_model,
    spread_step,
)
from tests.worlds import three_workers

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*TypedStorage is deprecated:UserWarning",  # torch's readers about themselves
    "ignore:torch.distributed is disabled:UserWarning",
)


class Counts(nn.Module):
    """Has a buffer, a buffer that is not saved, and state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)
        self.words = ["none"]

    def get_extra_state(self) -> dict[str, Any]:
        return {"words": self.words}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.words = state["words"]


def note(module: nn.Module) -> None:
    assert isinstance(module, Counts)
    module.seen += 5
    module.words = ["some"]


def check_noted(module: nn.Module) -> None:
    assert isinstance(module, Counts)
    assert module.words == ["some"]
    assert (module.seen == 5).all()


def adam(model: nn.Module, **settings: Any) -> gw.DistributedOptimizer:
    named = gw.nn.named_remote_parameters(model)
    groups = [{"params": named[:2]}, {"params": named[2:], "lr": 0.05}]
    return gw.DistributedOptimizer(torch.optim.Adam, groups, **settings)


@pytest.mark.parametrize(
    "layout", [("", "", ""), ("worker1", "worker1", "worker0"), ("", "worker1", "")]
)
def test_training_goes_on_in_another_layout(
    tmp_path: Path, layout: tuple[str, ...]
) -> None:
    local = local_model()
    here = torch.optim.Adam(
        [
            {"params": list(local.parameters())[:2]},
            {"params": list(local.parameters())[2:], "lr": 0.05},
        ],
        lr=0.01,
    )
    steps = list(batches(6))
    for number, (x, y) in enumerate(steps):
        local_step(local, here, x, y)
        if number == 2:
            here.param_groups[0]["lr"] = 0.02
    with three_workers():
        model = spread_model("", "worker1", "worker2")
        optimizer = adam(model, lr=0.01)
        for x, y in steps[:3]:
            spread_step(model, optimizer, x, y)
        optimizer.param_groups[0]["lr"] = 0.02
        extra = {"epoch": 3, "noise": torch.ones(2)}
        gw.save(tmp_path / "point", model, optimizer, extra=extra)
    with World(2) as world, world.as_worker(0):
        model = spread_model(*layout)
        model.apply(scramble)
        optimizer = adam(model, lr=0.5)
        extra = gw.load(tmp_path / "point", model, optimizer)
        assert extra["epoch"] == 3
        assert torch.equal(extra["noise"], torch.ones(2))
        for x, y in steps[3:]:
            spread_step(model, optimizer, x, y)
        assert_same(model, local)


@torch.no_grad()
def scramble(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        parameter.fill_(9.0)


def test_torchs_own_tools_read_it(tmp_path: Path) -> None:
    with three_workers():
        model = spread_model("", "worker1", "worker2")
        optimizer = adam(model, lr=0.01)
        spread_step(model, optimizer, *next(batches(1)))
        gw.save(tmp_path / "point", model, optimizer)
        state, states = model.state_dict(), optimizer.state_dict()["state"]
    local = local_model()
    into = {"model": local.state_dict()}
    dcp.load(into, checkpoint_id=tmp_path / "point")
    for name, value in state.items():
        assert torch.equal(local.state_dict()[name], value)
    dcp_to_torch_save(tmp_path / "point", tmp_path / "point.pt")
    whole = torch.load(tmp_path / "point.pt", weights_only=True)
    assert whole["model"].keys() == state.keys()
    first = whole["optim"]["state"]["0.0.weight"]["exp_avg"]
    assert torch.equal(first, states[0]["exp_avg"])
    assert whole["optim"]["param_groups"][0]["params"] == ["0.0.weight", "0.0.bias"]


def test_buffers_and_state_that_is_no_tensor_are_kept(tmp_path: Path) -> None:
    with three_workers():
        model = nn.Sequential(gw.RemoteModule("worker1", Counts), Counts())
        model.apply(lambda module: note(module) if isinstance(module, Counts) else None)
        gw.save(tmp_path, model)
        new = nn.Sequential(Counts(), gw.RemoteModule("worker2", Counts))
        assert gw.load(tmp_path, new) == {}
        check_noted(new[0])
        new[1].apply(check_noted)


def test_the_names_have_to_be_the_same_unless_told_otherwise(tmp_path: Path) -> None:
    with three_workers():
        model = spread_model("", "worker1", "worker2")
        gw.save(tmp_path, model)
        less = nn.Sequential(model[0], model[1])
        more = nn.Sequential(*model, nn.Linear(1, 1))
        with pytest.raises(ValueError, match=r"also has \['2.0.bias', '2.0.weight'\]"):
            gw.load(tmp_path, less)
        with pytest.raises(ValueError, match=r"lacks \['3.bias', '3.weight'\]"):
            gw.load(tmp_path, more)
        model.apply(scramble)
        gw.load(tmp_path, more, strict=False)
        assert_same(model, local_model())


def test_a_shape_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    with three_workers():
        gw.save(tmp_path, nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)]))
        other = nn.ModuleList(
            [
                gw.RemoteModule("worker1", nn.Linear, (1, 1)),
                gw.RemoteModule("worker2", nn.Linear, (2, 1)),
            ]
        )
        other.apply(scramble)
        with pytest.raises(ValueError, match=r"[Ss]ize mismatch.*model.1.weight"):
            gw.load(tmp_path, other)
        assert all((v == 9).all() for v in other.state_dict().values())


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    with three_workers():
        model = spread_model("", "worker1", "worker2")
        optimizer = adam(model, lr=0.01)
        with pytest.raises(FileNotFoundError):
            gw.load(tmp_path / "nothing", model)
        gw.save(tmp_path, model)
        with pytest.raises(ValueError, match="has no optimizer"):
            gw.load(tmp_path, model, optimizer)
        gw.save(tmp_path, model, optimizer)
        params = gw.nn.remote_parameters(model)
        other = gw.DistributedOptimizer(torch.optim.Adam, params)
        with pytest.raises(ValueError, match="has the groups"):
            gw.load(tmp_path, model, other)
        with pytest.raises(gw.OwnersError, match=r"not in the model, .* \[\(8, 6\)"):
            gw.save(tmp_path, model[1], optimizer)
        with pytest.raises(TypeError, match="only plain data and tensors"):
            gw.save(tmp_path, model, extra={"what": Counts()})


def test_a_save_that_fails_leaves_the_one_before_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with three_workers():
        model = spread_model("", "worker1", "worker2")
        gw.save(tmp_path, model, extra={"save": 1})
        files = sorted(tmp_path.rglob("*"))
        model.apply(scramble)

        def fail(*_: object) -> None:
            raise OSError("the disk is full")

        with monkeypatch.context() as patch:
            patch.setattr(shards.OwnedShard, "write", fail)
            with pytest.raises(gw.OwnersError, match="the disk is full"):
                gw.save(tmp_path, model, extra={"save": 2})
        assert sorted(tmp_path.rglob("*")) == files
        assert gw.load(tmp_path, model) == {"save": 1}
        assert_same(model, local_model())
        gw.save(tmp_path, model, extra={"save": 3})
        assert len(list(tmp_path.glob("save-*"))) == 1


def test_two_saves_to_one_folder_at_a_time_are_refused(tmp_path: Path) -> None:
    with World(1) as world, world.as_worker(0), new_save(tmp_path) as made:
        with pytest.raises(gw.GradwireError, match="under way"):
            gw.save(tmp_path, nn.Linear(1, 1))
        (made / ".metadata").touch()


KILLED = """
import os, sys
import torch
from torch import nn
import gradwire as gw
from gradwire.checkpoint import layout, shards
from gradwire.testing import World

def die(*_):
    os.kill(os.getpid(), 9)

with World(1) as world, world.as_worker(0):
    model = nn.Linear(2, 2)
    nn.init.ones_(model.weight)
    gw.save(sys.argv[1], model)
    nn.init.zeros_(model.weight)
    if sys.argv[2] == "writing":
        shards.OwnedShard.write = die
    else:
        layout.Path.replace = die
    gw.save(sys.argv[1], model)
"""


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["writing", "at the end"])
def test_a_save_that_is_killed_leaves_the_one_before(
    tmp_path: Path, moment: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", KILLED, str(tmp_path), moment],
        timeout=50,
        check=False,
        capture_output=True,
    )
    assert done.returncode == -9, done.stderr
    assert len(list(tmp_path.glob("save-*"))) == 2
    with World(1) as world, world.as_worker(0):
        model = nn.Linear(2, 2)
        gw.load(tmp_path, model)
        assert (model.weight == 1).all()
        gw.save(tmp_path, model)
        assert len(list(tmp_path.glob("save-*"))) == 1
