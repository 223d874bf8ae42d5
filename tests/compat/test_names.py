"""Every name of torch's own modules for RPC and autograd is Gradwire's, or is refused by name."""

import json
import textwrap
from pathlib import Path

import pytest

from tests.compat.test_installing import WORLD, python, run

pytestmark = pytest.mark.slow

CORE = ("torch._C._distributed_rpc", "torch._C._distributed_autograd")

WALK = f"""
import json, sys, types
import torch, torch.distributed.rpc, torch.distributed.autograd
from gradwire import compat

before = {{name: dict(vars(sys.modules[name])) for name in {CORE}}}
compat.install()
from gradwire.compat.rpc.core import Absent

def kind(module, name, theirs):
    ours = getattr(module, name, None)
    if isinstance(ours, Absent):
        try:
            ours()
        except RuntimeError as error:
            return str(error)
    if isinstance(theirs, (int, float, str)):
        return "ours" if ours == theirs else f"torch's is {{theirs!r}}, ours {{ours!r}}"
    made_by = getattr(ours, "__module__", "") or ""
    return "ours" if made_by.split(".")[0] == "gradwire" else f"{{ours!r}} of {{made_by}}"

found = {{}}
for name, theirs in before.items():
    parent, _, child = name.rpartition(".")
    assert sys.modules[name] is getattr(sys.modules[parent], child)
    assert sys.modules[name].__name__.startswith("gradwire")
    found[name] = {{
        one: kind(sys.modules[name], one, value)
        for one, value in theirs.items() if not one.startswith("__")
    }}
print(json.dumps(found))
"""

REFUSED = """
    RemoteProfilerManager _disable_server_process_global_profiler
    _enable_server_process_global_profiler _invoke_remote_builtin _invoke_remote_python_udf
    _invoke_remote_torchscript _invoke_rpc_builtin _invoke_rpc_python_udf
    _invoke_rpc_torchscript _set_profiler_node_id
""".split()


def test_every_name_of_torchs_own_modules_is_ours_or_an_error_that_names_it() -> None:
    done = python("-c", textwrap.dedent(WALK))
    assert not done.returncode, done.stderr
    rpc, autograd = (json.loads(done.stdout)[name] for name in CORE)
    refused = {name: told for name, told in rpc.items() if told != "ours"}
    assert set(autograd.values()) == {"ours"}, autograd
    assert sorted(refused) == sorted(REFUSED)
    for name, told in refused.items():
        assert (
            f"torch._C._distributed_rpc.{name} is not available in Gradwire: " in told
        )


def test_libraries_that_look_into_torchs_own_modules_find_gradwire(
    tmp_path: Path,
) -> None:
    """As torchrl does in its remote replay buffer, PyG in `rpc_is_initialized`, and colossalai."""
    code = (
        WORLD
        + f"""
from functools import wraps
from torch._C._distributed_rpc import _is_current_rpc_agent_set
from torch._C._distributed_rpc import PyRRef as Direct

def accept_remote_rref_invocation(function):
    @wraps(function)
    def unpack(self, *args, **kwargs):
        if isinstance(self, torch._C._distributed_rpc.PyRRef):
            self = self.local_value()
        return function(self, *args, **kwargs)
    return unpack

class Buffer:
    def __init__(self):
        self.items = []

    @accept_remote_rref_invocation
    def extend(self, items):
        self.items.extend(items)
        return len(self.items)

def main(rank):
    before = _is_current_rpc_agent_set()
    join(rank, 2, {str(tmp_path / "store")!r})
    if rank == 0:
        own, theirs = rpc.RRef(1), rpc.remote("worker1", Buffer)
        print(before, _is_current_rpc_agent_set(), rpc.api._all_gather is not None)
        print(*(isinstance(r, k) for r in (own, theirs) for k in (Direct, rpc.PyRRef, rpc.RRef)))
        print(isinstance(1, Direct), isinstance(rpc.get_worker_info(),
              torch._C._distributed_rpc.WorkerInfo))
        for _ in range(2):
            size = rpc.rpc_sync("worker1", Buffer.extend, args=(theirs, [1, 2]))
        print(size)
        with dist_autograd.context() as context_id:
            w = torch.ones(2, requires_grad=True)
            loss = rpc.rpc_sync("worker1", torch.mul, args=(w, 3)).sum()
            torch._C._distributed_autograd.backward(context_id, [loss])
            print(torch._C._distributed_autograd.get_gradients(context_id)[w].tolist())
            print(sorted(dist_autograd._get_debug_info().items()))
    rpc.shutdown()
    if rank == 0:
        print(_is_current_rpc_agent_set())

if __name__ == "__main__":
    mp.spawn(main, nprocs=2)
"""
    )
    done = run(code, tmp_path)
    assert done.stdout.splitlines() == [
        "False True True",
        "True True True True True True",
        "False True",
        "4",
        "[3.0, 3.0]",
        "[('num_autograd_contexts', 1), ('num_current_backward_passes', 0)]",
        "False",
    ], done.stderr
