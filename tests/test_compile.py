"""`torch.compile` of functions that make calls: graphs end at the calls, and results are exact."""

import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradwire as gw
from gradwire.testing import World

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

ROOT = Path(__file__).parents[1]
WHY = r"outside of the graph|torch\._dynamo\.disable\(\) wrapped function"
"""Why a graph ends. torch 2.6 does not show our reason, but what is left out."""
Step = Callable[[Tensor, Tensor], Tensor]


def fuse(x: Tensor, y: Tensor) -> Tensor:
    return torch.tanh(x * y + x)


def step(x: Tensor, w: Tensor) -> Tensor:
    """Five calls of ours, with three pieces of local work around them."""
    h = torch.sigmoid(x * w)
    r = gw.rpc_sync("worker1", fuse, (h, w))
    z = (r * w).exp() + h
    future = gw.rpc_async("worker1", torch.mul, args=(z, w))
    waited = future.wait()
    rref = gw.remote("worker1", fuse, args=(waited, w))
    return (rref.to_here() * z).sum()


def gradients(function: Step, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    with gw.context() as ctx:
        loss = function(x, w)
        gw.backward(ctx, [loss])
        found = gw.get_gradients(ctx)
        return loss, found[x], found[w]


def assert_exact(compiled: Step) -> None:
    torch.manual_seed(0)
    for _ in range(3):
        x, w = (torch.rand(4, requires_grad=True) for _ in range(2))
        torch.testing.assert_close(gradients(compiled, x, w), gradients(step, x, w))


@pytest.fixture
def counters(monkeypatch: pytest.MonkeyPatch) -> Any:
    # torch 2.6 starts processes to compile in, also for backends that do not compile.
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    dynamo: Any = pytest.importorskip("torch._dynamo")
    dynamo.reset()
    dynamo.utils.counters.clear()
    yield dynamo.utils.counters
    dynamo.reset()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_graph_ends_at_each_call_and_nothing_of_ours_is_compiled(
    backend: str, counters: Any
) -> None:
    with World(2) as world, world.as_worker(0):
        assert_exact(torch.compile(step, backend=backend))
        assert len(world) == 2
    assert sum(counters["graph_break"].values()) == 5
    assert counters["stats"]["unique_graphs"] == 3
    assert all(re.search(WHY, why) for why in counters["graph_break"])


class Split(nn.Module):
    """Its middle is on another worker."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.middle = gw.RemoteModule("worker1", nn.Linear, (4, 4))
        self.last = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        return torch.tanh(self.last(self.middle(hidden))).sum()


def trained(call: Callable[[Tensor], Tensor], model: Split) -> list[Tensor]:
    """The gradients by all parameters, here and there."""
    here = [*model.first.parameters(), *model.last.parameters()]
    with gw.context() as ctx:
        gw.backward(ctx, [call(torch.ones(4))])
        found = gw.get_gradients(ctx)
        there = gw.rpc_sync("worker1", gw.get_gradients, (ctx,))
    by_size = sorted(there.values(), key=lambda gradient: gradient.dim())
    return [found[parameter] for parameter in here] + by_size


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_model_with_a_part_elsewhere(backend: str, counters: Any) -> None:
    builder = sys.modules["torch._dynamo.variables.builder"]
    if not hasattr(builder, "og_module_named_parameters_fn_ptr"):
        pytest.skip("torch 2.6 asks all modules for parameters, which these refuse")
    with World(2) as world, world.as_worker(0):
        model = Split()
        compiled: Any = torch.compile(model, backend=backend)
        for _ in range(3):
            expected = trained(model, model)
            torch.testing.assert_close(trained(compiled, model), expected)
        assert len(world) == 2
    assert sum(counters["graph_break"].values()) == 1
    assert counters["stats"]["unique_graphs"] == 2


def test_methods_of_references_and_references_made_here(counters: Any) -> None:
    x = torch.rand(4)
    with World(2) as world, world.as_worker(0):
        layer = gw.remote("worker1", nn.Linear, (4, 4))

        def call(x: Tensor) -> Tensor:
            first = layer.rpc_sync().forward(x * 2)
            second = layer.rpc_async().forward(first.sin()).wait() + x
            return gw.RRef(second.cos()).to_here() * x + gw.get_worker_info().id

        compiled = torch.compile(call, backend="eager")
        for _ in range(3):
            torch.testing.assert_close(compiled(x), call(x))
        assert len(world) == 2
    assert counters["stats"]["unique_graphs"] >= 3
    assert all(re.search(WHY, why) for why in counters["graph_break"])


def run_compiled(x: Tensor, y: Tensor) -> Tensor:
    return torch.compile(fuse, backend="eager")(x, y)


def test_a_compiled_function_that_is_called_stays_compiled(counters: Any) -> None:
    x = torch.ones(2)
    with World(1) as world, world.as_worker(0):
        found = gw.rpc_sync("worker0", run_compiled, (x, x))
        assert len(world) == 1
    torch.testing.assert_close(found, fuse(x, x))
    assert counters["stats"]["unique_graphs"] == 1


def test_a_graph_that_must_be_whole_is_refused(counters: Any) -> None:
    def call(x: Tensor) -> Tensor:
        result: Tensor = gw.rpc_sync("worker1", torch.add, (x, 1))
        return result

    with World(2) as world, world.as_worker(0):
        with pytest.raises(Exception, match=WHY):
            torch.compile(call, backend="eager", fullgraph=True)(torch.ones(2))
        assert len(world) == 2


@pytest.mark.timeout(180)  # of which the C++ compiler may take most
def test_the_default_backend(tmp_path: Path) -> None:
    code = f"""
    import shutil, sys, warnings
    warnings.simplefilter("ignore")
    sys.path.insert(0, {str(ROOT)!r})
    import torch
    from gradwire.testing import World
    from tests.test_compile import assert_exact, step
    if not any(map(shutil.which, ("g++", "clang++", "c++"))):
        print("no compiler")
    else:
        with World(2) as world, world.as_worker(0):
            assert_exact(torch.compile(step))
        print("exact")
    """
    # torch gives its own folder to the compiler, and a space in that name makes two of it.
    (tmp_path / "python").symlink_to(sys.prefix)
    python = str(tmp_path / "python" / "bin" / "python")
    done = subprocess.run(
        [python if " " in sys.prefix else sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    if done.stdout == "no compiler\n":
        pytest.skip("the default backend needs a C++ compiler")
    assert done.stdout == "exact\n", done.stderr
