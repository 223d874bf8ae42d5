"""Scripts that make calls, saved and loaded: also by a process that has never made such a call."""

import io
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import Tensor

import gradwire as gw
from gradwire.testing import World
from tests.script import functions as here
from tests.script.functions import add, mixed, script

ROOT = Path(__file__).parents[2]


class Calls(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((2,), 2.0))

    def forward(self, x: Tensor, to: str) -> tuple[Tensor, int]:
        first = gw.rpc_async(to, mixed, (x, "a", 3))
        rref = gw.remote(to, add, (x, self.weight))
        done = first.wait()
        return gw.rpc_sync(rref.owner(), add, (done[0], rref.to_here())), done[2]


class Steps(torch.nn.Module):
    def forward(self, ctx: int, loss: Tensor) -> dict[Tensor, Tensor]:
        gw.backward(ctx, [loss])
        return gw.get_gradients(ctx)


def saved(module: torch.nn.Module) -> io.BytesIO:
    file = io.BytesIO()
    torch.jit.save(script(module), file)
    file.seek(0)
    return file


def test_a_module_that_makes_calls(world: World) -> None:
    loaded = torch.jit.load(saved(Calls()))
    with gw.context() as ctx:
        total, number = loaded(torch.ones(2), "worker1")
        gw.backward(ctx, [total.sum()])
        assert gw.get_gradients(ctx)[loaded.weight].tolist() == [1, 1]
    assert (total.tolist(), number) == ([6, 6], 3)


def test_backward_and_gradients(world: World) -> None:
    loaded = torch.jit.load(saved(Steps()))
    w = torch.ones(2, requires_grad=True)
    with gw.context() as ctx:
        loss = gw.rpc_sync("worker1", torch.mul, (w, 3)).sum()
        assert loaded(ctx, loss)[w].tolist() == [3, 3]


class Takes(torch.nn.Module):
    """Its calls return what no operator of torch's can: references and named tuples."""

    def forward(self, x: Tensor, to: str) -> tuple[Tensor, here.Kept]:
        found = gw.rpc_sync(to, here.returns_references, (x,))["a"][0].to_here()
        kept, none = gw.remote(to, here.returns_kept, (x,)).to_here()
        pair = gw.rpc_async(to, here.returns_pair, (x,)).wait()
        assert none is None
        return found + kept.rref.to_here() + pair.first * kept.pairs[0].second, kept


def test_results_with_references_and_named_tuples_in_them(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for function in (here.returns_references, here.returns_kept):  # which make calls
        monkeypatch.setattr(here, function.__name__, script(function))
    for to in ("worker0", "worker1"):
        total, kept = torch.jit.load(saved(Takes()))(torch.ones(2), to)
        assert total.tolist() == [6, 6]
        assert (kept.rref.owner_name(), kept.pairs[0].second) == ("worker0", 2)


@pytest.mark.filterwarnings("ignore::gradwire.LostGradientWarning")
@pytest.mark.parametrize("kind", ["path", "name", "stream"])
def test_files_of_all_sorts(world: World, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "calls.pt"
    path.write_bytes(saved(Calls()).getvalue())
    if kind == "stream":
        with path.open("rb") as stream:
            loaded = torch.jit.load(stream)
    else:
        loaded = torch.jit.load(path if kind == "path" else str(path))
    assert loaded(torch.ones(2), "worker1")[1] == 3


def test_a_file_that_there_is_not(world: World, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        torch.jit.load(tmp_path / "none.pt")


@pytest.mark.slow
def test_a_new_process_loads_it(world: World, tmp_path: Path) -> None:
    path = tmp_path / "calls.pt"
    path.write_bytes(saved(Calls()).getvalue())
    code = f"""
    import sys, torch, warnings
    warnings.simplefilter("ignore")
    sys.path.insert(0, {str(ROOT / "tests")!r})
    import gradwire as gw
    from gradwire.testing import World
    gw.script.enable()
    loaded = torch.jit.load({str(path)!r})
    with World(2) as world, world.as_worker(0):
        total, number = loaded(torch.ones(2), "worker1")
        print(total.tolist(), number)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.stdout == "[6.0, 6.0] 3\n", done.stderr
