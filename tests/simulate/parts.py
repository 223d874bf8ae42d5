"""What is simulated, and how a seed is run, shown and kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from . import ledger, passes, reader
from .simulation import Simulation, Wrong

CORPUS = Path(__file__).with_name("corpus.txt")


class World(Protocol):
    """Something that a seed decides."""

    simulation: Simulation

    def run(self) -> None:
        """Until nothing more happens.

        Raises:
            Wrong: something happened that must not.
        """


Build = Callable[[int, "int | None"], World]
"""A world from a seed, and perhaps the step at which something breaks."""


PARTS: dict[str, Build] = {
    "passes": passes.Pass,
    "ledger": ledger.TimedWorld,
    "reader": reader.World,
}


class Case(NamedTuple):
    """One world."""

    part: str
    seed: int
    crash_at: int | None = None

    def __str__(self) -> str:
        crash = "" if self.crash_at is None else f" @{self.crash_at}"
        return f"{self.part} {self.seed}{crash}"

    @classmethod
    def parse(cls, line: str) -> Case:
        part, seed, *crash = line.partition("#")[0].split()
        return cls(part, int(seed), int(crash[0].lstrip("@")) if crash else None)

    def build(self) -> World:
        return PARTS[self.part](self.seed, self.crash_at)

    def run(self) -> str | None:
        """What is wrong with it."""
        try:
            self.build().run()
        except Wrong as wrong:
            return str(wrong)
        except Exception as error:  # noqa: BLE001 whatever the code under test raises
            return f"{type(error).__name__}: {error}"
        return None


def corpus() -> Iterator[Case]:
    for line in CORPUS.read_text().splitlines():
        if not line.startswith("#"):
            yield Case.parse(line)


def keep(case: Case, wrong: str) -> None:
    """Add a case to the corpus."""
    if case not in corpus():
        with CORPUS.open("a") as file:
            print(f"{case!s:<15} # {' '.join(wrong.split())}", file=file)


def failures(chunk: tuple[str, int, int]) -> list[tuple[Case, str]]:
    """What is wrong in worlds of one part, from one seed on to before another."""
    part, start, end = chunk
    found = [(Case(part, seed), Case(part, seed).run()) for seed in range(start, end)]
    return [(case, wrong) for case, wrong in found if wrong is not None]
