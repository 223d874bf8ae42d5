"""`torch.compile` of functions that make calls by torch's names."""

from pathlib import Path

import pytest

from tests.compat.running import WORLD, run

pytestmark = pytest.mark.slow

COMPILED = """
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # torch 2.6 starts processes to compile in

def fuse(x, y):
    return torch.tanh(x * y + x)

def call(layer, x):
    return layer.local_value()(x)

def step(x, w, layer):
    h = torch.sigmoid(x * w)
    r = rpc.rpc_sync("worker1", fuse, args=(h, w))
    z = (r * w).exp() + h
    future = rpc.rpc_async("worker1", torch.mul, args=(z, w))
    rref = rpc.remote("worker1", fuse, args=(future.wait(), w))
    q = rpc.rpc_sync(layer.owner(), call, args=(layer, z))
    return (rref.to_here() * z * q).sum()

def gradients(function, x, w, layer):
    with dist_autograd.context() as context_id:
        loss = function(x, w, layer)
        dist_autograd.backward(context_id, [loss])
        found = dist_autograd.get_gradients(context_id)
        return loss, found[x], found[w]

def whole(x, w, layer):
    return gradients(step, x, w, layer)

def check(backend, layer):
    import torch._dynamo as dynamo
    for name, reference in (("step", step), ("whole", whole)):
        dynamo.reset()
        dynamo.utils.counters.clear()
        compiled = torch.compile(reference, backend=backend)
        for _ in range(2):
            x, w = (torch.rand(4, requires_grad=True) for _ in range(2))
            expected = gradients(step, x, w, layer)
            found = compiled(x, w, layer) if name == "whole" else gradients(compiled, x, w, layer)
            torch.testing.assert_close(found, expected)
        graphs = dynamo.utils.counters["stats"]["unique_graphs"]
        print(backend, name, graphs if name == "step" else graphs >= 3)

def main(rank, path):
    join(rank, 2, path)
    if rank == 0:
        layer = rpc.remote("worker1", torch.nn.Linear, args=(4, 4))
        for backend in ("eager", "aot_eager"):
            check(backend, layer)
    rpc.shutdown()

if __name__ == "__main__":
    mp.spawn(main, (sys.argv[1],), nprocs=2)
"""


def test_calls_end_graphs_and_backward_is_exact(tmp_path: Path) -> None:
    done = run(WORLD + COMPILED, tmp_path, str(tmp_path / "store"))
    assert done.stdout.splitlines() == [
        "eager step 3",
        "eager whole True",
        "aot_eager step 3",
        "aot_eager whole True",
    ], done.stderr
