"""The command: `gradwire launch -n 4 train.py [args]`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from ..errors import GradwireError
from .plan import Plan


def main(arguments: Sequence[str]) -> int:
    """Run a world; the exit status of its first failure, or 0."""
    parser = _parser()
    given = parser.parse_args(arguments)
    plan = _plan(parser, given)
    address = _address(parser, given.rdzv)
    from .launcher import launch  # imports torch, and help need not wait for it

    try:
        return launch(plan, address, given.timeout)
    except GradwireError as error:
        parser.error(f"--rdzv {given.rdzv}: {error}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gradwire launch",
        description="Start the workers of a world: the same program in several processes. "
        "gradwire.init_rpc() finds its rank in the environment (env://).",
        epilog="example: gradwire launch -n 4 --timeout 600 train.py --lr 0.1",
    )
    add = parser.add_argument
    add("-n", "--workers", type=_count, default=1, metavar="COUNT",
        help="number of workers on this machine (default: %(default)s)")  # fmt: skip
    add("-m", "--module", action="store_true",
        help="the program is a module (default: a script)")  # fmt: skip
    add("--env", action="append", default=[], metavar="NAME=VALUE", type=_variable,
        help="set an environment variable for all workers; may be repeated (default: only "
        "the variables for env://)")  # fmt: skip
    add("--timeout", type=_seconds, metavar="SECONDS",
        help="stop all workers after this time, and print stacks (default: never)")  # fmt: skip
    add("--nnodes", type=_count, default=1, metavar="COUNT",
        help="number of machines, each with as many workers (default: %(default)s)")  # fmt: skip
    add("--node-rank", type=int, default=0, metavar="NUMBER",
        help="rank of this machine, from 0 (default: %(default)s)")  # fmt: skip
    add("--rdzv", metavar="HOST:PORT",
        help="address of machine 0 (default: any free port of this machine)")  # fmt: skip
    add("--attach", metavar="WORKER",
        help="connect the terminal to this worker, for breakpoint(); its output is shown "
        "without its name (default: no worker)")  # fmt: skip
    add("--max-restarts", type=_restarts, default=0, metavar="COUNT",
        help="restart a failed worker up to this often, while the others keep running, in an "
        "elastic world (default: %(default)s, one failure stops all)")  # fmt: skip
    add("--min-workers", type=_count, metavar="COUNT",
        help="continue with this many once others have failed for good (default: all)")  # fmt: skip
    add("program", help="a script, or a module with --module")
    add("arguments", nargs=argparse.REMAINDER, help="arguments of the program")
    return parser


def _plan(parser: argparse.ArgumentParser, given: argparse.Namespace) -> Plan:
    if not 0 <= given.node_rank < given.nnodes:
        parser.error(f"--node-rank {given.node_rank}: must be in 0..{given.nnodes - 1}")
    if given.nnodes > 1 and given.rdzv is None:
        parser.error(f"--nnodes {given.nnodes} needs --rdzv HOST:PORT, of machine 0")
    if given.min_workers is not None and given.nnodes > 1:
        parser.error("--min-workers: on one machine only, so leave out --nnodes")
    if given.min_workers is not None and given.min_workers > given.workers:
        parser.error(f"--min-workers {given.min_workers}: at most --workers")
    if not given.module and not os.path.exists(given.program):
        parser.error(f"there is no file {given.program!r}; for a module add --module")
    plan = Plan(
        program=(given.program, *given.arguments),
        is_module=given.module,
        size=given.workers,
        nodes=given.nnodes,
        node=given.node_rank,
        settings=dict(given.env),
        attached=given.attach,
        restarts=given.max_restarts,
        needed=given.min_workers,
    )
    if given.attach not in (None, *plan.names()):
        here = ", ".join(plan.names())
        parser.error(f"--attach {given.attach}: the workers of this machine are {here}")
    return plan


def _address(parser: argparse.ArgumentParser, text: str | None) -> tuple[str, int]:
    host, _, port = (text or "127.0.0.1:0").rpartition(":")
    if not host or not port.isdigit():
        parser.error(f"--rdzv {text}: give HOST:PORT, such as 10.0.0.1:29500")
    return host, int(port)


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number, at least 1")
    return int(text)


def _restarts(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number, at least 0")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number above 0")
    return seconds


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r}: give NAME=VALUE")
    return name, value
