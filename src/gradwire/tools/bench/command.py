"""The command: `gradwire bench [--rounds N] [--only WORD ...] [--start-up WORKERS] ...`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path


def main(given: Sequence[str]) -> int:
    """Measure, show and write down."""
    parser = argparse.ArgumentParser(
        prog="gradwire bench",
        description="Measure calls, backward passes and whole programs beside torch RPC.",
        epilog="example: gradwire bench --rounds 2 --only hops --ways torch gradwire",
    )
    add = parser.add_argument
    add("--rounds", type=int, default=5, metavar="COUNT",
        help="how often each way takes its turn at each row (default: %(default)s)")  # fmt: skip
    add("--only", nargs="+", default=[""], metavar="WORD",
        help="rows with one of these words in their names; 'loops' or 'programs' "
        "for all of these (default: all)")  # fmt: skip
    add("--threads", choices=["default", "one", "both"], default="both",
        help="of torch, in programs: as many as it takes by default, one, or both "
        "in turn (default: %(default)s)")  # fmt: skip
    add("--ways", nargs="+", metavar="WAY",
        help="who takes part, such as torch, gradwire or 'gradwire, NAME=VALUE' with "
        "an environment variable (default: all there are; of programs the first two)")  # fmt: skip
    add("--json", type=Path, default=Path("bench.json"), metavar="FILE",
        help="where to put the figures (default: %(default)s)")  # fmt: skip
    add("--png", type=Path, default=Path("bench.png"), metavar="FILE",
        help="where to put the picture (default: %(default)s)")  # fmt: skip
    add("--markdown", type=Path, metavar="FILE",
        help="where to put the table for a page (default: nowhere)")  # fmt: skip
    add("--start-up", type=int, metavar="WORKERS",
        help="measure instead how a world of so many workers starts on this machine "
        "(default: the rows above)")  # fmt: skip
    arguments = parser.parse_args(given)
    if arguments.start_up is not None:
        if arguments.start_up < 2:
            parser.error(f"--start-up {arguments.start_up}: at least 2")
        from .start_up import report

        return report(arguments.start_up, arguments.json)
    from .comparison import compare  # imports torch, and help need not wait for it

    return compare(arguments, parser.error)
