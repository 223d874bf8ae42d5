"""The `gradwire` command, also `python -m gradwire`: picks the subcommand.

Subcommands are imported on use, and their modules named `command` import torch only when there is
something to do: help and complaints come at once.
"""

from __future__ import annotations

import sys
from importlib import import_module

from . import __version__

_USAGE = """\
usage: gradwire COMMAND [options]

  launch   start the workers of a world: gradwire launch -n 4 train.py [args]
  run      run a program for torch.distributed.rpc: gradwire run train.py [args]
  key      create the key of a world on several machines: gradwire key world.key
  doctor   check what this machine offers and what is used, with a self-test
  demo     train a network spread over four workers, and compare with one process
  bench    compare calls and backward passes with torch RPC

gradwire COMMAND --help prints a command's options, their defaults and an example.
gradwire --version prints the version."""

_MODULES = {
    "launch": "launch.command",
    "run": "compat.command",
    "key": "tools.key",
    "doctor": "tools.doctor.command",
    "demo": "tools.demo.command",
    "bench": "tools.bench.command",
}
_EXTRAS = ("demo", "bench")
"""Commands that need an extra, which has their name."""


def main() -> int:
    """Run the subcommand; its exit status."""
    name, arguments = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("", [])
    if name in ("", "-h", "--help"):
        print(_USAGE)
        return 0
    if name == "--version":
        print(f"gradwire {__version__}")
        return 0
    if name not in _MODULES:
        print(f"gradwire: no command {name!r}\n\n{_USAGE}", file=sys.stderr)
        return 2
    command = import_module(f".{_MODULES[name]}", __package__)
    try:
        status: int = command.main(arguments)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if name not in _EXTRAS or package in ("", __package__):
            raise
        print(
            f"gradwire {name} needs {package}, which is not installed; to install it:\n"
            f"  {sys.executable} -m pip install 'gradwire[{name}]'",
            file=sys.stderr,
        )
        return 1
    return status


if __name__ == "__main__":
    sys.exit(main())
