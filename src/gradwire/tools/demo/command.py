"""The command: `gradwire demo [--epochs N] [--out FOLDER]`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path


def main(given: Sequence[str]) -> int:
    """Train twice, compare and draw; 0 if both runs agree."""
    parser = argparse.ArgumentParser(
        prog="gradwire demo",
        description="Train a network spread over four workers to read handwritten digits, "
        "then the same in one process, and compare.",
        epilog="example: gradwire demo --epochs 3 --out pictures",
    )
    add = parser.add_argument
    add("--epochs", type=int, default=12, metavar="COUNT",
        help="number of passes over the data (default: %(default)s)")  # fmt: skip
    add("--out", type=Path, default=Path(), metavar="FOLDER",
        help="folder for the pictures (default: this folder)")  # fmt: skip
    arguments = parser.parse_args(given)
    if arguments.epochs < 1:
        parser.error(f"--epochs {arguments.epochs}: must be at least 1")
    from .comparison import compare  # imports torch, and help need not wait for it

    return compare(arguments.epochs, arguments.out)
