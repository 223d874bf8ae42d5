"""Scripts by torch's names: what PyTorch's own tests of them (`make conformance`) leave out."""

from pathlib import Path

import pytest

from tests.compat.running import WORLD, run

pytestmark = pytest.mark.slow

RESULTS = """
from torch import Tensor
from torch.distributed.rpc import RRef

class Pair(NamedTuple):
    first: Tensor
    second: int

@torch.jit.script
def twice(x: Tensor) -> Tensor:
    return x * 2

@torch.jit.script
def references(x: Tensor) -> List[RRef[Tensor]]:
    return [rpc.remote("worker0", twice, (x,))]

@torch.jit.script
def named_references(x: Tensor) -> Dict[str, RRef[Tensor]]:
    return {"a": rpc.remote("worker0", twice, (x,))}

@torch.jit.script
def pairs(x: Tensor) -> List[Pair]:
    return [Pair(x, 1)]

@torch.jit.script
def mixed(x: Tensor) -> List[Any]:
    return [x, "word", 1]

@torch.jit.script
def empty_inside(x: Tensor) -> Dict[str, List[int]]:
    nothing: List[int] = []
    return {"nothing": nothing}

@torch.jit.script
def tensors(x: Tensor) -> List[Tensor]:
    return [x, x]

@torch.jit.script
def call(x: Tensor, to: str) -> Tensor:
    first = rpc.rpc_sync(to, references, (x,))[0].to_here()
    second = rpc.rpc_async(to, named_references, (x,)).wait()["a"].to_here()
    third = rpc.remote(to, pairs, (x,)).to_here()[0]
    return first + second + third.first * third.second

def main(rank, path):
    join(rank, 2, path)
    if rank == 0:
        for to in ("worker0", "worker1"):
            x = torch.ones(1)
            print(call(x, to).item())
            for function in (pairs, mixed, empty_inside, tensors):
                print(rpc.rpc_sync(to, function, (x,)))
    rpc.shutdown()

if __name__ == "__main__":
    mp.spawn(main, (sys.argv[1],), nprocs=2)
"""


def test_lists_and_dicts_of_all_sorts_are_returned(tmp_path: Path) -> None:
    program = "from typing import *\n" + WORLD + RESULTS
    done = run(program, tmp_path, str(tmp_path / "store"))
    assert done.stdout.splitlines() == 2 * [
        "5.0",
        "[Pair(first=tensor([1.]), second=1)]",
        "[tensor([1.]), 'word', 1]",
        "{'nothing': []}",
        "[tensor([1.]), tensor([1.])]",
    ], done.stderr
