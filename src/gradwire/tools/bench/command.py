"""The command: `gradwire bench [--rounds N] [--only WORD ...] [--start-up WORKERS] ...`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path


def main(given: Sequence[str]) -> int:
    """Measure, show and write down."""
    parser = argparse.ArgumentParser(
        prog="gradwire bench",
        description="Compare calls, backward passes and whole programs with torch RPC.",
        epilog="example: gradwire bench --rounds 2 --only hops --ways torch gradwire",
    )
    add = parser.add_argument
    add("--rounds", type=int, default=5, metavar="COUNT",
        help="how often to measure each contender in each row (default: %(default)s)")  # fmt: skip
    add("--only", nargs="+", default=[""], metavar="WORD",
        help="only rows whose names contain one of these words; 'loops' or 'programs' "
        "for all of a kind (default: all)")  # fmt: skip
    add("--threads", choices=["default", "one", "both"], default="both",
        help="torch's threads in programs: torch's default number, one, or both "
        "in turn (default: %(default)s)")  # fmt: skip
    add("--ways", nargs="+", metavar="WAY",
        help="the contenders, such as torch, gradwire or 'gradwire, NAME=VALUE' with "
        "an environment variable (default: all; for programs the first two)")  # fmt: skip
    add("--json", type=Path, default=Path("bench.json"), metavar="FILE",
        help="file for the figures (default: %(default)s)")  # fmt: skip
    add("--png", type=Path, default=Path("bench.png"), metavar="FILE",
        help="file for the chart (default: %(default)s)")  # fmt: skip
    add("--markdown", type=Path, metavar="FILE",
        help="file for the tables, in Markdown (default: none)")  # fmt: skip
    add("--start-up", type=int, metavar="WORKERS",
        help="instead measure how a world of this many workers starts on this machine "
        "(default: off)")  # fmt: skip
    arguments = parser.parse_args(given)
    if arguments.start_up is not None:
        if arguments.start_up < 2:
            parser.error(f"--start-up {arguments.start_up}: at least 2")
        from .start_up import report

        return report(arguments.start_up, arguments.json)
    from .comparison import compare  # imports torch, and help need not wait for it

    return compare(arguments, parser.error)
