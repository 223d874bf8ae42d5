"""A pair of processes that measure one way of calling, and the talk with them.

    python -m gradwire.tools.bench.contender WAY RANK PORT

A pair is stopped while it is not measured: idle workers of torch RPC poll without pause, one core
each, which would slow down everyone else. Rank 1 serves; rank 0 reads a task's name from each
line of its input and prints the sample as JSON.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from typing import Any

import torch

from . import functions
from .tasks import TASKS, Caller, Sample

_ANSWER = "@"  # begins a line that is ours: torch may print others
_LIMIT = 120.0

WAYS = {
    "torch": {},
    "torch, huge pages": {"THP_MEM_ALLOC_ENABLE": "1"},
    "gradwire": {},
    "gradwire, TCP": {"GRADWIRE_UNIX_SOCKETS": "0"},
}


class Contender:
    """The parent's end of a pair."""

    def __init__(self, way: str, port: int) -> None:
        self.way = way
        env = {**os.environ, **WAYS[way]}
        command = [sys.executable, "-W", "ignore", "-m", __spec__.name, way]
        self._server = subprocess.Popen([*command, "1", str(port)], env=env)
        self._client = subprocess.Popen(
            [*command, "0", str(port)],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()
        self._signal(signal.SIGSTOP)

    def measure(self, task: str) -> Sample:
        """A sample of a task, while the other contenders stand still."""
        assert self._client.stdin is not None
        self._signal(signal.SIGCONT)
        self._client.stdin.write(task + "\n")
        self._client.stdin.flush()
        sample = self._answer()
        self._signal(signal.SIGSTOP)
        return sample

    def close(self) -> None:
        for process in (self._client, self._server):
            process.kill()
            process.wait()
        for pipe in (self._client.stdin, self._client.stdout):
            if pipe is not None:
                pipe.close()

    def _signal(self, number: int) -> None:
        for process in (self._server, self._client):
            process.send_signal(number)

    def _answer(self) -> Sample:
        out = self._client.stdout
        assert out is not None
        while True:
            if not select.select([out], [], [], _LIMIT)[0]:
                raise TimeoutError(f"{self.way}: no answer within {_LIMIT:g} s")
            line = out.readline()
            if not line:
                raise RuntimeError(f"{self.way}: the process has ended")
            if line.startswith(_ANSWER):
                sample: Sample = json.loads(line[1:])
                return sample


def _answers(caller: Caller) -> None:
    caller.sync(functions.nothing, ())
    print(_ANSWER + "{}", flush=True)
    tasks = {task.name: task for task in TASKS}
    for line in sys.stdin:
        print(_ANSWER + json.dumps(tasks[line.strip()].run(caller)), flush=True)


def _main(way: str, rank: int, port: int) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    name = f"worker{rank}"
    if way.startswith("gradwire"):
        from ... import autograd, optim, rpc
    else:
        rpc, autograd, optim = _torch()
    functions.call = rpc.rpc_sync
    rpc.init_rpc(name, rank=rank, world_size=2)
    if rank == 0:
        _answers(
            Caller(
                sync=lambda func, args: rpc.rpc_sync("worker1", func, args=args),
                start=lambda func, args: rpc.rpc_async("worker1", func, args=args),
                remote=lambda func, args: rpc.remote("worker1", func, args=args),
                autograd=autograd,
                own=rpc.RRef,
                optimizer=optim.DistributedOptimizer,
            )
        )
    rpc.shutdown()


def _torch() -> tuple[Any, Any, Any]:
    from torch.distributed import autograd, optim, rpc

    return rpc, autograd, optim


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
