"""One worker of a program under measurement: obeys the parent's commands, one JSON line each.

    python -m gradwire.tools.bench.member RANK

The world is in the environment. `prepare` sets a program up and runs its first steps, `start`
begins to count CPU seconds, `run` takes the steps and `stop` tells the CPU seconds.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
import warnings
from typing import Any, TextIO

from .library import rpc
from .program import Program, Step
from .programs import PROGRAMS


class Member:
    """What a worker does of one program at a time."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._programs = {program.name: program for program in PROGRAMS}
        self._program: Program = PROGRAMS[0]
        self._step: Step | None = None
        self._results: list[float] = []
        self._cpu = 0.0

    def prepare(self, name: str, warm_up: int) -> None:
        self._program = self._programs[name]
        if self._rank < self._program.clients:
            self._results = []
            self._step = self._program.begin(self._rank)
            self._take(warm_up, math.inf)
        else:
            self._program.serve()

    def start(self) -> None:
        self._cpu = time.process_time()

    def run(self, steps: int, seconds: float) -> dict[str, list[float]]:
        times = self._take(steps, seconds)
        return {"times": times, "results": self._results}

    def stop(self) -> float:
        cpu = time.process_time() - self._cpu
        self._step = None
        return cpu

    def _take(self, count: int, seconds: float) -> list[float]:
        step, pause = self._step, self._program.pause
        assert step is not None
        times: list[float] = []
        deadline = time.perf_counter() + seconds
        while len(times) < count:
            pause()
            begin = time.perf_counter()
            result = step()
            end = time.perf_counter()
            times.append(end - begin)
            self._results.append(result)
            if end > deadline:
                break
        return times


def _obey(member: Member, answers: TextIO) -> None:
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        answer: dict[str, Any]
        try:
            answer = {"value": getattr(member, name)(*arguments)}
        except Exception as error:  # noqa: BLE001 of the program
            answer = {"failure": f"{type(error).__name__}: {error}".splitlines()[0]}
        print(json.dumps(answer), file=answers, flush=True)


def _main(rank: int) -> None:
    # What others print goes to standard error, so that every line is an answer.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    # torch's optimizers switch the filter of warnings on for one of theirs.
    warnings.showwarning = lambda *_, **__: None
    world_size = int(os.environ["WORLD_SIZE"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size)
    print(json.dumps({"value": None}), file=answers, flush=True)
    _obey(Member(rank), answers)


if __name__ == "__main__":
    _main(int(sys.argv[1]))
