"""`gradwire run`: run a program written for torch.distributed.rpc, unmodified."""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from .installing import install


def main(arguments: Sequence[str]) -> int:
    """Run the program that the arguments name; its exit status is its own."""
    given = _parse(arguments)
    if not given.m and not Path(given.program).exists():
        print(f"gradwire run: there is no {given.program!r}", file=sys.stderr)
        return 2
    install()
    sys.argv[:] = [given.program, *given.arguments]
    if given.m:
        sys.path.insert(0, "")
        runpy.run_module(given.program, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(given.program).resolve().parent))
        runpy.run_path(given.program, run_name="__main__")
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gradwire run",
        description="Run a program with Gradwire behind torch.distributed.rpc, .autograd, "
        ".optim.DistributedOptimizer and .nn.RemoteModule, in all processes that it starts.",
        epilog="example: gradwire run train.py --lr 0.1",
    )
    parser.add_argument(
        "-m", action="store_true", help="run a module (default: a script)"
    )
    parser.add_argument("program", help="the script, or the module")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, help="arguments of the program"
    )
    return parser.parse_args(arguments)
