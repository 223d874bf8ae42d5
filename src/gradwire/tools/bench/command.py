"""The command: `gradwire bench [--rounds N] [--only WORD ...] [--start-up N] [--floods N] ...`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn


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
    add("--floods", type=int, metavar="COUNT",
        help="instead measure how long calls take while a worker is flooded by this many "
        "connections or requests, such as 10000 (default: off)")  # fmt: skip
    add("--on", choices=["ray"],
        help="instead measure the loops between two nodes of a Ray cluster: that of "
        "RAY_ADDRESS, or one started on this machine (default: off)")  # fmt: skip
    arguments = parser.parse_args(given)
    return _measure(arguments, parser.error)


def _measure(chosen: argparse.Namespace, refuse: Callable[[str], NoReturn]) -> int:
    """Run the benchmark that was chosen. They import torch, and help need not wait for it."""
    if chosen.start_up is not None:
        if chosen.start_up < 2:
            refuse(f"--start-up {chosen.start_up}: at least 2")
        from .start_up import report

        return report(chosen.start_up, chosen.json)
    if chosen.floods is not None:
        if chosen.floods < 1:
            refuse(f"--floods {chosen.floods}: at least 1")
        from .floods import report as report_floods

        return report_floods(chosen.floods, chosen.json)
    from .comparison import compare

    return compare(chosen, refuse)
