"""Run PyTorch's own test bodies for RPC and distributed autograd.

    python tests/conformance                          all of them, against Gradwire
    python tests/conformance '*DistAutograd*'         those that fit a pattern
    python tests/conformance --torch '*test_add'      against torch itself
    python tests/conformance --table docs/compat.md   put the table into that page

Ends with 0 if exactly those fail that `misses.py` lists. Nothing is tried twice.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bodies import Outcome

HERE = Path(__file__).parent
SETTINGS = {
    "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
    "OMP_NUM_THREADS": "1",
    # Else one rank may be called by another before its init_process_group is over.
    "TORCH_DIST_INIT_BARRIER": "1",
    "TP_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("patterns", nargs="*", metavar="SUITE.TEST")
    parser.add_argument("--torch", action="store_true", help="against torch itself")
    parser.add_argument("--jobs", type=int, default=2, help="tests at a time")
    parser.add_argument("--limit", type=float, default=60, help="seconds for a test")
    parser.add_argument("--repeat", type=int, default=1, help="so many full runs")
    parser.add_argument("--logs", type=Path, help="folder for what the tests print")
    parser.add_argument("--table", type=Path, help="page to put the table into")
    parser.add_argument("--list", action="store_true", help="only name the tests")
    return parser.parse_args()


def run(tests: list[tuple[str, str]], options: argparse.Namespace) -> list[Outcome]:
    """How these tests end."""
    from bodies import Running

    waiting, running, ended = list(reversed(tests)), [], []
    while waiting or running:
        while waiting and len(running) < options.jobs:
            suite, test = waiting.pop()
            running.append(Running(suite, test, options.logs, options.limit))
        for one in list(running):
            outcome = one.poll()
            if outcome is not None:
                running.remove(one)
                ended.append(outcome)
                tell(len(ended), len(tests), outcome)
        time.sleep(0.01)
    return ended


def tell(number: int, of: int, outcome: Outcome) -> None:
    suite, test, status, seconds, why = outcome
    line = f"[{number}/{of}] {status:7} {seconds:5.1f} s  {suite}.{test}  {why}"
    print(line.rstrip(), flush=True)


def main() -> int:
    options = parse()
    os.environ.update(SETTINGS)
    if not options.torch:
        from gradwire.compat import install

        install()
    sys.path.insert(0, str(HERE))
    import report
    import suites

    tests = suites.select(options.patterns)
    if options.list:
        print("\n".join(f"{suite}.{test}" for suite, test in tests))
        return 0
    codes = []
    with tempfile.TemporaryDirectory(prefix="conformance-") as scratch:
        os.environ["TMPDIR"] = scratch  # PyTorch's tests leave files behind
        tempfile.tempdir = scratch
        options.logs = options.logs or Path(scratch)
        options.logs.mkdir(parents=True, exist_ok=True)
        for _ in range(options.repeat):
            ended = run(tests, options)
            print(report.table(ended))
            codes.append(report.judge(ended, known=not options.torch))
            if options.table:
                report.put_into(options.table, ended)
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
