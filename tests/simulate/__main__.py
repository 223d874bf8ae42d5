"""Simulates many worlds, each decided by a seed: `python -m tests.simulate --help`."""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor

from .parts import PARTS, Case, failures, keep
from .simulation import Wrong

_CHUNK = 500
_USUAL = 100_000


def main() -> int:
    arguments = parse()
    parts = [arguments.part] if arguments.part else list(PARTS)
    if arguments.curves:
        from .curves import draw  # matplotlib takes its time

        draw(arguments.curves)
        return 0
    if arguments.seed is not None:
        return max(replay(Case(p, arguments.seed, arguments.crash_at)) for p in parts)
    return search(parts, arguments.seeds, arguments.first)


def parse() -> argparse.Namespace:
    usual = round(_USUAL * float(os.environ.get("GRADWIRE_FUZZ", "1")))
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulate",
        description="Simulate worlds of workers, each decided by a seed. What goes wrong is "
        "added to tests/simulate/corpus.txt, which `make test` runs.",
    )
    parser.add_argument("--seeds", type=int, default=usual, help="how many worlds")
    parser.add_argument("--first", type=int, help="the first seed; by default, any")
    parser.add_argument("--part", choices=PARTS, help="simulate only this")
    parser.add_argument(
        "--seed", type=int, help="replay this one and show what happens"
    )
    parser.add_argument("--crash-at", type=int, help="with a crash at this step")
    parser.add_argument(
        "--curves", metavar="PNG", help="draw what passes cost, instead"
    )
    return parser.parse_args()


def replay(case: Case) -> int:
    """Show what happens in a world; 1 if something is wrong."""
    world, wrong = case.build(), None
    trace = world.simulation.trace = []
    try:
        world.run()
    except Wrong as error:
        wrong = error
    print("\n".join(trace))
    print(f"{case}: {wrong or 'all is well'}, {world.simulation.steps} steps")
    return int(wrong is not None)


def search(parts: list[str], seeds: int, first: int | None) -> int:
    """Simulate so many worlds of each part; 1 if something is wrong with any."""
    began = time.monotonic()
    if first is None:  # CI fails for the change at hand only
        is_ci = os.environ.get("CI") == "true"
        first = 0 if is_ci else random.SystemRandom().randrange(2**32)
    chunks = [
        (part, start, min(start + _CHUNK, first + seeds))
        for start in range(first, first + seeds, _CHUNK)
        for part in parts
    ]
    failed = 0
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), context) as pool:
        for case, wrong in itertools.chain.from_iterable(pool.map(failures, chunks)):
            failed += 1
            keep(case, wrong)
            print(f"{case}: {wrong}", flush=True)
    print(
        f"{seeds} seeds from {first} on of {', '.join(parts)}: {failed} failed, "
        f"{time.monotonic() - began:.1f} s"
    )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
