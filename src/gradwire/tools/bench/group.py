"""The processes of one program and one contender, and the talk with them.

They are stopped while another contender is measured: idle workers of torch RPC poll without pause,
one core each, which would slow down everyone else.
"""

from __future__ import annotations

import json
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from typing import Any

from .program import Program
from .program_report import Sample, sample_of
from .ways import environment

_START_LIMIT = 120.0
_LIMIT = 60.0
"""Seconds without an answer after which a contender counts as hung."""

THREADS = {"default": {}, "one": {"OMP_NUM_THREADS": "1"}}
"""By setting: what it adds to the environment."""


class FailedError(Exception):
    """A contender hung, ended, raised, or had wrong results."""


class Group:
    """A world of processes that runs the programs of one group, one at a time."""

    def __init__(self, way: str, workers: int, threads: str) -> None:
        command = [sys.executable, "-W", "ignore", "-m", f"{__package__}.member"]
        shared = _environment(way, workers, threads)
        self._processes = [
            subprocess.Popen(
                [*command, str(rank)],
                env=shared,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(workers)
        ]
        try:
            self._answers(range(workers), _START_LIMIT)
        except BaseException:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def measure(self, program: Program) -> Sample:
        """Run it once.

        Raises:
            FailedError: it cannot count; the group must be closed.
        """
        everyone = range(program.workers)
        clients = range(program.clients)
        servers = range(program.clients, program.workers)
        self._signal(signal.SIGCONT)
        for members in servers, clients:
            self._all(members, "prepare", program.name, program.warm_up)
        self._all(everyone, "start")
        answers = self._all(clients, "run", program.steps, program.seconds)
        cpu = sum(self._all(everyone, "stop"))
        self._signal(signal.SIGSTOP)
        for rank, answer in enumerate(answers):
            if wrong := program.check(answer["results"]):
                raise FailedError(f"worker{rank}: wrong result: {wrong}")
        times = [seconds for answer in answers for seconds in answer["times"]]
        return sample_of(times, cpu * program.clients / len(times))

    def close(self) -> None:
        """End the processes; stopped first, they do not complain about each other."""
        self._signal(signal.SIGSTOP)
        self._signal(signal.SIGKILL)
        for process in self._processes:
            process.wait()
            for pipe in process.stdin, process.stdout:
                assert pipe is not None
                try:
                    pipe.close()
                except BrokenPipeError:
                    pass  # a command was not read any more

    def _signal(self, number: int) -> None:
        for process in self._processes:
            process.send_signal(number)  # does nothing once it has ended

    def _all(self, ranks: Iterable[int], *command: Any) -> list[Any]:
        """Give all of them a command, and wait for all answers."""
        members = list(ranks)
        for rank in members:
            pipe = self._processes[rank].stdin
            assert pipe is not None
            try:
                pipe.write(json.dumps(command) + "\n")
                pipe.flush()
            except BrokenPipeError:
                raise FailedError(f"worker{rank} has ended") from None
        return self._answers(members, _LIMIT)

    def _answers(self, ranks: Iterable[int], limit: float) -> list[Any]:
        deadline = time.monotonic() + limit
        return [self._answer(rank, deadline, limit) for rank in ranks]

    def _answer(self, rank: int, deadline: float, limit: float) -> Any:
        pipe = self._processes[rank].stdout
        assert pipe is not None
        left = max(0.0, deadline - time.monotonic())
        if not select.select([pipe], [], [], left)[0]:
            raise FailedError(f"hung: worker{rank} did not answer within {limit:g} s")
        line = pipe.readline()
        if not line:
            raise FailedError(f"worker{rank} has ended")
        answer = json.loads(line)
        if "failure" in answer:
            raise FailedError(f"worker{rank}: {answer['failure']}")
        return answer["value"]


def _environment(way: str, workers: int, threads: str) -> dict[str, str]:
    inherited = environment(way)
    inherited.pop("OMP_NUM_THREADS", None)
    return {
        **inherited,
        **THREADS[threads],
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(workers),
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
