"""`python -m gradwire run script.py ...`: run a program for torch.distributed.rpc unmodified."""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m gradwire", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser(
        "run",
        help="run a program with Gradwire behind torch.distributed.rpc and its kin",
    )
    run.add_argument("-m", action="store_true", help="it is a module, as for python -m")
    run.add_argument("program", help="the script, or the module")
    run.add_argument("arguments", nargs=argparse.REMAINDER, help="what it is given")
    return parser.parse_args(arguments)


def _run(program: str, arguments: list[str], *, is_module: bool) -> None:
    from .compat import install

    install()
    sys.argv[:] = [program, *arguments]
    if is_module:
        sys.path.insert(0, "")
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    elif not Path(program).exists():
        sys.exit(f"python -m gradwire run: there is no {program!r}")
    else:
        sys.path.insert(0, str(Path(program).resolve().parent))
        runpy.run_path(program, run_name="__main__")


def main() -> None:
    """Do what the command line says."""
    given = _parse(sys.argv[1:])
    _run(given.program, given.arguments, is_module=given.m)


if __name__ == "__main__":
    main()
