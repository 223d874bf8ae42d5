"""Modules on other workers, used as if they were here."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradwire as gw
from gradwire.nn.device import parse_device
from gradwire.testing import World
from tests.training import assert_same, batches, local_model, spread_model
from tests.worlds import three_workers


class Talks(nn.Module):
    """Takes and returns all sorts of things."""

    def __init__(self, first: int, second: int = -1) -> None:
        super().__init__()
        self.given = (first, second)
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, tensor: Tensor, number: int, word: str = "default") -> Any:
        return word, number, tensor


class Holds(nn.Module):
    """Has a module elsewhere in turn."""

    def __init__(self, worker: str) -> None:
        super().__init__()
        self.own = nn.Linear(2, 2)
        self.inner = gw.RemoteModule(worker, nn.Linear, (2, 2))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(self.own(x))
        return result


class NoModule:
    pass


def use(module: gw.RemoteModule, x: Tensor) -> tuple[Any, bool]:
    return module(x), module.training


def is_training(rref: gw.RRef[nn.Module]) -> bool:
    return rref.local_value().training


def test_calls_with_all_sorts_of_arguments() -> None:
    with three_workers():
        module = gw.RemoteModule("worker1/cpu", Talks, (1,), {"second": 2})
        x = torch.ones(1)
        assert module(x, 2) == ("default", 2, x)
        assert module.forward(x, 2, word="3") == ("3", 2, x)
        assert module.forward_async(x, 2, "3").wait() == ("3", 2, x)
        assert module.get_module_rref() is module.module_rref
        assert module.module_rref.to_here().given == (1, 2)
        (parameter,) = module.remote_parameters()
        assert parameter.owner_name() == "worker1"
        assert torch.equal(parameter.to_here(), torch.ones(2))
        assert gw.RemoteModule("rank:2", Talks, (1,)).module_rref.owner().id == 2


def test_what_goes_wrong_in_making_it_is_raised_by_its_use() -> None:
    with three_workers():
        with pytest.raises(
            ValueError, match=r"Expect `module_cls\(\*args, \*\*kwargs\)`"
        ):
            gw.RemoteModule("worker1", NoModule)()  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="first"):
            gw.RemoteModule("worker1", Talks).train()
        with pytest.raises(ValueError, match="no worker 'nobody'"):
            gw.RemoteModule("nobody", Talks)


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("worker1", ("worker1", "cpu")),
        ("worker1/cuda:1", ("worker1", "cuda:1")),
        ("rank:12/meta", (12, "meta")),
    ],
)
def test_devices_are_understood(text: str, parsed: tuple[str | int, str]) -> None:
    assert parse_device(text) == parsed


@pytest.mark.parametrize(
    "text", ["", "/", "/cuda:0", "w/cuda:0/cuda:1", "w:1", "rank:x"]
)
def test_devices_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="Could not parse remote_device: "):
        parse_device(text)


@pytest.mark.parametrize("device", ["foo", "cpu2", ""])
def test_devices_that_torch_does_not_know_are_refused(device: str) -> None:
    with pytest.raises(RuntimeError, match=r"[Dd]evice"):
        parse_device(f"worker1/{device}")
    with pytest.raises(TypeError, match="is not a string"):
        parse_device(7)  # type: ignore[arg-type]


def test_train_and_eval_reach_the_module() -> None:
    with three_workers():
        module = gw.RemoteModule("worker1", nn.Dropout)
        for mode in (False, True):
            assert module.train(mode) is module
            assert module.training is mode
            rref = module.get_module_rref()
            assert gw.rpc_sync("worker1", is_training, args=(rref,)) is mode
        assert module.eval() is module
        assert torch.equal(module(torch.ones(9)), torch.ones(9))


@pytest.mark.filterwarnings("ignore::gradwire.LostGradientWarning")
def test_another_worker_uses_the_same_module() -> None:
    with three_workers():
        module = gw.RemoteModule("worker1", nn.Linear, (2, 2)).eval()
        x = torch.ones(1, 2)
        y, training = gw.rpc_sync("worker2", use, args=(module, x))
        assert torch.equal(y, module(x))
        assert training is False
        twin = gw.RemoteModule.from_module_rref(module.get_module_rref())
        assert torch.equal(twin(x), y)
        twin = gw.RemoteModule.init_from_module_rref("worker2", module.module_rref)
        assert torch.equal(twin(x), y)
        with pytest.raises(TypeError, match="only be sent in calls"):
            torch.save(module, io.BytesIO())
        with pytest.raises(TypeError, match="only be sent in calls"):
            pickle.dumps(module)


@pytest.mark.filterwarnings("ignore::gradwire.LostGradientWarning")
def test_a_model_with_remote_children_behaves_like_one() -> None:
    local = local_model()
    with three_workers():
        model = spread_model("worker1", "", "worker2")
        assert_same(model, local)
        x, _ = next(batches(1))
        torch.testing.assert_close(model(x), local(x))
        text = repr(model)
        assert "RemoteModule(on 'worker1', device cpu)" in text
        assert "Linear(in_features=8" in text
        model.eval()
        rref = model[2].get_module_rref()
        assert not gw.rpc_sync("worker2", is_training, args=(rref,))
        assert len(list(model.parameters())) == 2  # those that are here
        assert len(list(model.modules())) == 6
        names = [name for name, _ in gw.nn.named_remote_parameters(model)]
        assert names == [name for name, _ in local.named_parameters()]


def test_state_dicts_go_in_and_out() -> None:
    local = local_model()
    with torch.no_grad():
        for parameter in local.parameters():
            parameter.mul_(2)
    with three_workers():
        model = spread_model("worker1", "", "worker2")
        model.load_state_dict(local.state_dict())
        assert_same(model, local)
        state = local.state_dict()
        bad = {**state, "0.0.weight": torch.ones(1), "2.1.more": torch.ones(1)}
        del bad["2.0.bias"]
        with pytest.raises(RuntimeError) as info:
            model.load_state_dict(bad)
        for part in ('"2.0.bias"', '"2.1.more"', "size mismatch for 0.weight"):
            assert part in str(info.value)
        keys = model.load_state_dict({"2.0.bias": state["2.0.bias"]}, strict=False)
        assert "1.0.weight" in keys.missing_keys
        assert_same(model[0], local[0])
        model[0].load_state_dict(local[0].state_dict())
        with pytest.raises(ValueError, match="keep_vars"):
            model.state_dict(keep_vars=True)


def test_conversions_of_a_model_reach_its_remote_children() -> None:
    with three_workers():
        model = spread_model("worker1", "", "worker2")
        model.to(torch.float32)
        assert {v.dtype for v in model.state_dict().values()} == {torch.float32}
        model.double().half().bfloat16()
        assert {v.dtype for v in model.state_dict().values()} == {torch.bfloat16}
        model.apply(zero)
        assert not any(v.any() for v in model.state_dict().values())
        model[0].requires_grad_(False)
        model[0].zero_grad()
        assert not model[0].remote_parameters()[0].to_here().requires_grad


def zero(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.zeros_(parameter)


def test_inputs_go_to_the_modules_device_and_results_come_back() -> None:
    with three_workers():
        module = gw.RemoteModule("worker1/meta", nn.Linear, (2, 2))
        assert module.remote_parameters()[0].rpc_sync().is_contiguous()
        with pytest.raises(NotImplementedError, match="meta"):
            module(torch.ones(1, 2))  # it ran there; numbers there are none to bring
        module.to_empty(device="cpu")
        assert module.device == "cpu"
        assert module(torch.ones(1, 2)).shape == (1, 2)


@pytest.mark.filterwarnings("ignore::gradwire.LostGradientWarning")
def test_remote_modules_may_hold_remote_modules() -> None:
    with three_workers():
        model = gw.RemoteModule("worker1", Holds, ("worker2",))
        names = [name for name, _ in gw.nn.named_remote_parameters(model)]
        assert names == ["own.weight", "own.bias", "inner.weight", "inner.bias"]
        owners = [rref.owner_name() for rref in gw.nn.remote_parameters(model)]
        assert owners == ["worker1"] * 2 + ["worker2"] * 2
        assert [r.owner_name() for r in model.remote_parameters()] == owners
        assert model.remote_parameters(recurse=False) == []
        state = {name: torch.full_like(v, 3) for name, v in model.state_dict().items()}
        assert list(state) == names
        model.load_state_dict(state)
        torch.testing.assert_close(model(torch.ones(1, 2)), torch.full((1, 2), 57.0))


@pytest.mark.parametrize(
    ("method", "args", "remedy"),
    [
        ("parameters", (), "Please use ``remote_parameters`` instead"),
        ("named_parameters", (), "named_remote_parameters"),
        ("buffers", (), "state_dict"),
        ("named_buffers", (), "state_dict"),
        ("register_parameter", ("x", None), "apply"),
        ("register_buffer", ("x", None), "apply"),
        ("add_module", ("x", None), "an ordinary module around"),
    ],
)
def test_methods_that_cannot_work_say_what_to_use(
    method: str, args: tuple[Any, ...], remedy: str
) -> None:
    with World(1) as world, world.as_worker(0):
        module = gw.RemoteModule("worker0", nn.Linear, (1, 1))
        start = f"Method ``{method}`` not supported for RemoteModule"
        with pytest.raises(ValueError, match=remedy) as info:
            getattr(module, method)(*args)
        assert str(info.value).startswith(start)
        with pytest.raises(ValueError, match="register_parameter"):
            module.weight = nn.Parameter(torch.ones(1))


def test_gradients_flow_through_it_and_its_hooks_run() -> None:
    with three_workers():
        module = gw.RemoteModule("worker1", nn.Linear, (2, 2))
        module.apply(hook)
        seen = []
        module.register_forward_hook(lambda *given: seen.append(given[0]))
        x = torch.ones(1, 2, requires_grad=True)
        with gw.context() as ctx:
            gw.backward(ctx, [module(x).sum()])
            gradient = gw.get_gradients(ctx)[x]
        weight = module.state_dict()["weight"]
        torch.testing.assert_close(gradient, 2 * weight.sum(0, keepdim=True))
        assert seen == [module]


def hook(module: nn.Module) -> None:
    module.register_forward_hook(lambda module, given, result: 2 * result)


def test_copies_are_refused_with_the_reason() -> None:
    with three_workers():
        module = gw.RemoteModule("worker1", nn.Linear, (2, 2))
        with pytest.raises(ValueError, match="load_state_dict"):
            copy.deepcopy(nn.Sequential(module))
