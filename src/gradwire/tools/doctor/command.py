"""The command: `gradwire doctor [--quick]`. Its exit status is 1 if something is wrong."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ...options import Options

if TYPE_CHECKING:
    from .checks import Finding


def main(given: Sequence[str]) -> int:
    """Print what is there and how well it works."""
    parser = argparse.ArgumentParser(
        prog="gradwire doctor",
        description="Check what this machine offers and what Gradwire uses, with a self-test.",
        epilog="example: gradwire doctor --quick",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="skip the self-test (default: run it)",
    )
    arguments = parser.parse_args(given)
    from . import checks  # imports torch, and help need not wait for it
    from .selftest import self_test

    try:
        options = Options()
    except ValueError as error:
        print(f"invalid environment: {error}")
        return 1
    bad = _show("versions", checks.versions())
    bad += _show("transports", checks.transports(options))
    bad += _show("exposure", checks.exposure(options))
    bad += _show("devices", checks.devices())
    bad += _show("limits", checks.limits())
    bad += _show("environment", checks.settings())
    if not arguments.quick:
        bad += _show("self-test", self_test(unix_sockets=options.unix_sockets))
        if options.unix_sockets:
            bad += _show("self-test over TCP", self_test(unix_sockets=False))
    print("\nno problems found" if not bad else f"\n{bad} problems, marked with !")
    return 1 if bad else 0


def _show(title: str, lines: Iterable[Finding]) -> int:
    """Print findings as they come; how many are bad."""
    print(f"\n{title}")
    bad = 0
    for line in lines:
        mark = "!" if line.is_bad else " "
        print(
            f" {mark} {line.what:<26} {line.found:<28} {line.so}".rstrip(), flush=True
        )
        bad += line.is_bad
    return bad
