"""Processes that measure one way of calling, and the talk with them.

    python -m gradwire.tools.bench.runner WAY RANK PORT

The processes of a way are stopped while another is measured: idle workers of torch RPC poll without
pause, one core each, which would slow down everyone else. Rank 1 serves; rank 0 reads a task's name
from each line of its input and prints the sample as JSON. Ray and Monarch start their servers
themselves.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys

import psutil
import torch

from . import functions, ray_monarch
from .library import DistributedOptimizer, dist_autograd, rpc
from .tasks import TASKS, Caller, Sample
from .ways import environment

_ANSWER = "@"  # begins a line that is ours: torch may print others
_LIMIT = 120.0
# Seconds: the longest task of a rival takes fifteen, and sometimes one gets stuck.
_RIVAL_LIMIT = 60.0


class Contender:
    """The parent's end of the talk."""

    def __init__(self, way: str, port: int) -> None:
        self.way = way
        self.stuck_in: str | None = None
        """The task at which a rival stopped answering; it is left out from there on."""
        is_rival = way in ray_monarch.installed()
        env = environment(way)
        command = [sys.executable, "-W", "ignore", "-m", __spec__.name, way]
        self._limit = _LIMIT
        self._server = None
        if not is_rival:
            self._server = subprocess.Popen([*command, "1", str(port)], env=env)
        self._client = subprocess.Popen(
            [*command, "0", str(port)],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            self._answer()
        except BaseException:
            self.close()
            raise
        if is_rival:
            self._limit = _RIVAL_LIMIT
        self._signal(signal.SIGSTOP)

    def measure(self, task: str) -> Sample | None:
        """A sample of a task, while the other contenders stand still; None if it cannot do it."""
        if self.stuck_in is not None:
            return None
        assert self._client.stdin is not None
        self._signal(signal.SIGCONT)
        self._client.stdin.write(task + "\n")
        self._client.stdin.flush()
        try:
            sample = self._answer()
        except TimeoutError:
            if self.way not in ray_monarch.installed():
                raise
            self.stuck_in, sample = task, None
        self._signal(signal.SIGSTOP)
        return sample

    def close(self) -> None:
        self._signal(signal.SIGKILL)
        for process in (self._client, self._server):
            if process is not None:
                process.wait()
        for pipe in (self._client.stdin, self._client.stdout):
            if pipe is not None:
                pipe.close()

    def _signal(self, number: int) -> None:
        """Send a signal to all processes of this way."""
        for parent in (self._server, self._client):
            if parent is None or parent.poll() is not None:
                continue
            process = psutil.Process(parent.pid)
            for each in [*process.children(recursive=True), process]:
                try:
                    each.send_signal(number)
                except psutil.NoSuchProcess:
                    pass  # a helper of Ray's came and went

    def _answer(self) -> Sample | None:
        out = self._client.stdout
        assert out is not None
        while True:
            if not select.select([out], [], [], self._limit)[0]:
                raise TimeoutError(f"{self.way}: no answer within {self._limit:g} s")
            line = out.readline()
            if not line:
                raise RuntimeError(f"{self.way}: the process has ended")
            if line.startswith(_ANSWER):
                sample: Sample | None = json.loads(line[1:])
                return sample


def _answers(caller: Caller) -> None:
    caller.sync(functions.nothing, ())
    print(_ANSWER + "{}", flush=True)
    tasks = {task.name: task for task in TASKS}
    for line in sys.stdin:
        task = tasks[line.strip()]
        sample = task.run(caller) if task.can_run(caller) else None
        print(_ANSWER + json.dumps(sample), flush=True)


def _pair(rank: int, port: int) -> None:
    from . import scripted

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    if rank == 0:
        _answers(
            Caller(
                sync=lambda func, args: rpc.rpc_sync("worker1", func, args=args),
                start=lambda func, args: rpc.rpc_async("worker1", func, args=args),
                remote=lambda func, args: rpc.remote("worker1", func, args=args),
                autograd=dist_autograd,
                own=rpc.RRef,
                optimizer=DistributedOptimizer,
                scripted=scripted.call_add,
            )
        )
    rpc.shutdown()


def _main(way: str, rank: int, port: int) -> None:
    torch.set_num_threads(1)
    if way == "Ray":
        _answers(ray_monarch.ray_caller())
    elif way == "Monarch":
        _answers(ray_monarch.monarch_caller())
    else:
        _pair(rank, port)


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
