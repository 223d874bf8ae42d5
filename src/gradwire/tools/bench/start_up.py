"""How long a world of many workers takes to start: `gradwire bench --start-up 64`.

The workers are processes of this machine, forked from one that has imported torch, whose import
takes longer than all the rest. All of them take each step together, and a step lasts until the last
one is done. What a worker has open is counted when each has called each.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import gradwire as gw

from ... import api, worker  # noqa: F401 loaded before it is measured
from ...cores import usable_cores
from .group import free_port

torch.optim.SGD([torch.zeros(())])  # loads much of torch once, before the fork
_LIMIT = 300.0  # seconds for a step
_BROADCAST = 1 << 18  # numbers: 1 MB


class _Member:
    """What a worker does, one step at a time."""

    def __init__(self, rank: int, size: int, port: int) -> None:
        self._rank, self._size, self._port = rank, size, port
        self._before = _descriptors()

    def join(self) -> None:
        self._worker = gw.init_rpc(
            rank=self._rank,
            world_size=self._size,
            init_method=f"tcp://127.0.0.1:{self._port}",
        )

    def call_all(self) -> None:
        """Call every other worker, the next ones first: not all call the same at a time."""
        others = [(self._rank + i) % self._size for i in range(1, self._size)]
        for call in [gw.rpc_async(other, _nothing) for other in others]:
            call.wait()

    def count(self) -> tuple[int, int]:
        """Descriptors more than before, and threads."""
        return _descriptors() - self._before, threading.active_count()

    def meet(self) -> None:
        self._worker.barrier()

    def broadcast(self) -> None:
        """The first worker sends a tensor of 1 MB to all others."""
        if self._rank == 0:
            x = torch.ones(_BROADCAST)
            for call in [gw.rpc_async(i, _take, (x,)) for i in range(1, self._size)]:
                call.wait()

    def build(self) -> None:
        """A model with a layer on each of the other workers, side by side."""
        if self._rank == 0:
            others = range(1, self._size)
            layers = [gw.RemoteModule(f"worker{i}", nn.Linear, (8, 8)) for i in others]
            parameters = gw.nn.remote_parameters(nn.ModuleList(layers))
            self._layers = layers
            self._optimizer = gw.DistributedOptimizer(torch.optim.SGD, parameters)

    def train(self) -> None:
        """One step: forward, backward and optimizer."""
        if self._rank == 0:
            with gw.context() as ctx:
                x = torch.ones(8, 8)
                results = [layer.forward_async(x) for layer in self._layers]
                loss = torch.stack([result.wait() for result in results]).sum()
                gw.backward(ctx, [loss])
                self._optimizer.step(ctx)

    def leave(self) -> None:
        if self._rank == 0:
            del self._layers, self._optimizer
        self._worker.shutdown()


COUNT = "count"

STEPS: dict[str, Callable[[_Member], Any]] = {
    "join": _Member.join,
    "barrier": _Member.meet,
    "broadcast of 1 MB": _Member.broadcast,
    "a layer on each worker": _Member.build,
    "training step": _Member.train,
    "training step again": _Member.train,
    "each calls each": _Member.call_all,
    "each calls each again": _Member.call_all,
    COUNT: _Member.count,
    "leave": _Member.leave,
}


def _nothing() -> None:
    pass


def _take(x: torch.Tensor) -> None:
    pass


def _descriptors() -> int:
    folder = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
    return len(os.listdir(folder))


def _serve(rank: int, size: int, port: int, talk: Connection) -> None:
    """Take the steps that the parent names; answer with the result and CPU seconds so far."""
    gc.freeze()  # else each collection would copy the pages shared with the parent
    torch.set_num_threads(1)
    member = _Member(rank, size, port)
    talk.send((None, time.process_time()))
    while (step := talk.recv()) is not None:
        talk.send((STEPS[step](member), time.process_time()))


def measure(size: int) -> dict[str, Any]:
    """Of each step the seconds, and the CPU seconds of all workers; what the most have open."""
    found: dict[str, Any] = {}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    port = free_port()
    with ExitStack() as stack:
        talks: list[Connection] = []
        for rank in range(size):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, size, port, theirs), daemon=True
            )
            process.start()
            theirs.close()
            stack.callback(process.join)
            stack.callback(process.terminate)
            talks.append(stack.enter_context(mine))
        _, before = _answers(talks)
        for step in STEPS:
            begin = time.perf_counter()
            for talk in talks:
                talk.send(step)
            answers, cpu = _answers(talks)
            if step == COUNT:
                found["descriptors"] = max(opened for opened, _ in answers)
                found["threads"] = max(threads for _, threads in answers)
            else:
                taken = time.perf_counter() - begin
                found[step] = {"seconds": taken, "cpu": cpu - before}
            before = cpu
        for talk in talks:
            talk.send(None)
    return found


def _answers(talks: list[Connection]) -> tuple[list[Any], float]:
    """The results of all, and their CPU seconds together."""
    deadline = time.monotonic() + _LIMIT
    for rank, talk in enumerate(talks):
        if not talk.poll(max(0.0, deadline - time.monotonic())):
            raise TimeoutError(f"worker{rank} did not answer within {_LIMIT:g} s")
    answers = [talk.recv() for talk in talks]
    return [result for result, _ in answers], sum(cpu for _, cpu in answers)


def report(size: int, path: Path) -> int:
    """Measure, show and write down."""
    found = measure(size)
    path.write_text(json.dumps({"start-up": {size: found}}, indent=1))
    cores = len(usable_cores())
    table = Table(title=f"a world of {size} workers on {cores} cores")
    for column in ("", "seconds", "CPU seconds, all workers"):
        table.add_column(column, justify="right" if column else "left")
    for name, value in found.items():
        if isinstance(value, dict):
            table.add_row(name, f"{value['seconds']:.2f}", f"{value['cpu']:.1f}")
    console = Console()
    console.print(table)
    console.print(
        f"the most of a worker, connected to {size - 1} others: "
        f"{found['descriptors']} descriptors, {found['threads']} threads"
    )
    console.print(f"figures: {path}")
    return 0
