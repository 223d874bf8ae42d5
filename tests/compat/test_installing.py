"""Gradwire in the place of torch's modules: what is replaced, where, and what is said if not.

All in processes of their own: this one keeps torch's modules.
"""

import sys
import time
from pathlib import Path

import pytest

from tests.compat.running import WORLD, python, run

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


def test_processes_that_are_forked_or_started_have_it_too(tmp_path: Path) -> None:
    code = """
    import multiprocessing, subprocess, sys, threading
    import torch.distributed.rpc as rpc

    def tell(name):
        import torch.distributed.autograd, torch.distributed.nn, torch.distributed.optim
        kinds = (rpc.RRef, torch.distributed.autograd.context,
                 torch.distributed.optim.DistributedOptimizer,
                 torch.distributed.nn.RemoteModule)
        print(name, *{kind.__module__.split(".")[0] for kind in kinds}, flush=True)

    if __name__ == "__main__":
        tell("here")
        assert threading.active_count() == 1
        for method in ("fork", "spawn"):
            process = multiprocessing.get_context(method).Process(target=tell, args=(method,))
            process.start()
            process.join()
        print("anew", subprocess.check_output([sys.executable, "-c",
            "from torch.distributed.rpc import RRef; print(RRef.__module__)"], text=True))
        print(sys.argv[1:])
    """
    done = run(code, tmp_path, "--some", "argument")
    assert done.stdout.split("\n")[:4] == [
        "here gradwire",
        "fork gradwire",
        "spawn gradwire",
        "anew gradwire.compat.rpc.references",
    ], done.stderr
    assert "['--some', 'argument']" in done.stdout


def test_who_imported_torchs_modules_before_is_named() -> None:
    late = "import torch.distributed.rpc as rpc, gradwire.compat as c; c.install()"
    done = python("-c", late)
    assert "'__main__' has imported torch.distributed.rpc" in done.stderr


def test_a_program_that_is_not_there_is_said() -> None:
    done = python("-m", "gradwire", "run", "no_such_program.py")
    assert (done.returncode, done.stderr) == (
        2,
        "gradwire run: there is no 'no_such_program.py'\n",
    )


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("rpc._set_profiler_node_id(0)", "rpc._set_profiler_node_id is not available"),
        ("import torch.distributed.rpc.rref_proxy", "rref_proxy is not available"),
        ("rpc.rpc_sync('worker1', max)", "RPC has not been initialized"),
        ("rpc.RRef(1)", "Current RPC agent is not set"),
    ],
)
def test_what_is_not_there_is_said_at_that_line(
    line: str, error: str, tmp_path: Path
) -> None:
    done = run(f"import torch.distributed.rpc as rpc\n{line}\n", tmp_path)
    assert error in done.stderr
    assert "line 2, in <module>" in done.stderr


def test_a_result_that_is_not_used_does_not_stop_backward(tmp_path: Path) -> None:
    """PyTorch's `test_backward_unused_send_function` asserts that it does."""
    code = (
        WORLD
        + f"""
def main(rank):
    join(rank, 2, {str(tmp_path / "store")!r})
    if rank == 0:
        a, b = (torch.rand(3, 3, requires_grad=True) for _ in "ab")
        with dist_autograd.context() as context_id:
            unused = rpc.rpc_sync("worker1", torch.mul, args=(a, b))
            used = rpc.rpc_sync("worker1", torch.mul, args=(a, b))
            dist_autograd.backward(context_id, [used.sum()])
            found = dist_autograd.get_gradients(context_id)
            print(torch.equal(found[a], b), torch.equal(found[b], a), len(found))
    rpc.shutdown()

if __name__ == "__main__":
    mp.spawn(main, nprocs=2)
"""
    )
    done = run(code, tmp_path)
    assert done.stdout == "True True 2\n", done.stderr


def test_shutdown_does_not_wait_for_who_is_gone(tmp_path: Path) -> None:
    code = (
        WORLD
        + f"""
def main(rank):
    join(rank, 2, {str(tmp_path / "store")!r})
    if rank == 1:
        os._exit(0)
    try:
        rpc.shutdown()
    except RuntimeError as error:
        print(error)

if __name__ == "__main__":
    mp.spawn(main, nprocs=2)
"""
    )
    began = time.monotonic()
    done = run(code, tmp_path)
    assert "worker1" in done.stdout, done.stderr
    assert time.monotonic() - began < 30


def test_every_miss_has_its_reason_in_the_docs() -> None:
    sys.path.insert(0, str(ROOT / "tests" / "conformance"))
    try:
        from misses import MISSES, REASONS
    finally:
        sys.path.pop(0)
    page = (ROOT / "docs" / "compat.md").read_text()
    reasons = list(MISSES.values())
    for reason in REASONS.values():
        assert f"| {reasons.count(reason)} | {reason} |" in page
