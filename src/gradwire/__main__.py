"""The `gradwire` command, also `python -m gradwire`: picks the subcommand."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

_USAGE = """\
usage: gradwire COMMAND [options]

  run      run a program for torch.distributed.rpc: gradwire run train.py [args]
  launch   start the workers of a world: gradwire launch -n 4 train.py [args]
  doctor   what this machine offers, what is used of it, and a self test
  demo     train a network spread over four workers, and the same in one process
  bench    measure calls and backward passes beside torch RPC

gradwire COMMAND --help tells more."""


def _run(arguments: Sequence[str]) -> int:
    from .compat.command import main

    return main(arguments)


def _launch(arguments: Sequence[str]) -> int:
    from .launch.command import main

    return main(arguments)


def _doctor(arguments: Sequence[str]) -> int:
    from .tools.doctor.command import main

    return main(arguments)


def _demo(arguments: Sequence[str]) -> int:
    from .tools.demo.command import main

    return main(arguments)


def _bench(arguments: Sequence[str]) -> int:
    from .tools.bench.command import main

    return main(arguments)


# Imported on use: launch should start quickly, bench needs an extra.
COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "run": _run,
    "launch": _launch,
    "doctor": _doctor,
    "demo": _demo,
    "bench": _bench,
}


def main() -> int:
    """Run the subcommand; its exit status."""
    name, arguments = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("", [])
    if name in ("-h", "--help"):
        print(_USAGE)
        return 0
    if name not in COMMANDS:
        print(f"gradwire: no command {name!r}\n\n{_USAGE}", file=sys.stderr)
        return 2
    return COMMANDS[name](arguments)


if __name__ == "__main__":
    sys.exit(main())
