"""Runs whole programs: contenders in turn, round by round, each in processes of its own."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import groupby

from .group import FailedError, Group
from .program import Program
from .program_report import Sample, Samples


def measure_programs(
    programs: Sequence[Program],
    ways: Sequence[str],
    rounds: int,
    threads: str,
    progress: Callable[[], None],
) -> Samples:
    """Samples of all of them. A contender that fails a program sits out its other rounds."""
    samples: Samples = {p.name: {way: [] for way in ways} for p in programs}
    by_group = sorted(programs, key=lambda program: program.processes)
    for _, group in groupby(by_group, key=lambda program: program.processes):
        contenders = {way: _Contender(way, threads) for way in ways}
        try:
            for program in group:
                for _ in range(rounds):
                    for way in random.sample(list(ways), len(ways)):
                        sample = contenders[way].measure(program)
                        samples[program.name][way].append(sample)
                        progress()
        finally:
            for contender in contenders.values():
                contender.close()
    return samples


class _Contender:
    """One way to run the programs of a group. Its processes are replaced after a failure."""

    def __init__(self, way: str, threads: str) -> None:
        self._way = way
        self._threads = threads
        self._group: Group | None = None
        self._failed: dict[str, str] = {}

    def measure(self, program: Program) -> Sample | str:
        if program.name in self._failed:
            return self._failed[program.name]
        try:
            if self._group is None:
                self._group = Group(self._way, program.workers, self._threads)
            return self._group.measure(program)
        except FailedError as error:
            self.close()
            self._failed[program.name] = str(error)
            return str(error)

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None
