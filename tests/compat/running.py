"""Runs programs written for torch by `gradwire run`, in processes of their own."""

import subprocess
import sys
import textwrap
from pathlib import Path


def run(code: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program by `gradwire run`."""
    program = folder / "program.py"
    program.write_text(textwrap.dedent(code))
    return python("-m", "gradwire", "run", str(program), *arguments)


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


WORLD = """
import os, sys, time
import torch, torch.multiprocessing as mp
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc

def join(rank, size, path):
    torch.set_num_threads(1)
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{path}")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size, rpc_backend_options=options)
"""
