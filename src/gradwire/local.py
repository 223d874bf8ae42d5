"""A world of processes on this machine, started from a script, a notebook or the REPL.

The caller is worker0. The others run only what they are asked to: functions defined in the main
module or in a notebook's cells are sent to them by value. A worker process ends with the world, and
with its parent, whose end closes the worker's standard input.
"""

from __future__ import annotations

import os
import pickle
import secrets
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .api import init_rpc
from .worker import Worker

_JOIN = 60.0  # seconds for the processes to start
_END = 10.0  # and to end, when the world has
_PROGRAM = "from gradwire.local import serve; serve()"


@contextmanager
def local_world(workers: int, **options: Any) -> Iterator[Worker]:
    """Start a world of `workers` processes on this machine, with the caller as worker0.

    Further keywords are options of all of them (`Options`). At the end of the block all leave
    together; after an exception, at once.

    Raises:
        ClosedError: this process already has a current worker.
        ValueError, TypeError: `workers` or an option is invalid.

    >>> with local_world(4) as world:                               # doctest: +SKIP
    ...     world.rpc_sync("worker3", lambda x: x + 1, args=(torch.ones(2),))
    tensor([2., 2.])
    """
    if type(workers) is not int or workers < 1:
        raise ValueError(f"workers={workers!r}: give a number, at least 1")
    settings = {"join_timeout": _JOIN, "key": secrets.token_bytes(32), **options}
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="gradwire-") as folder:
        place = {"world_size": workers, "init_method": f"file://{folder}/meet"}
        try:
            for rank in range(1, workers):
                processes.append(_start(rank, {**place, **settings}))
            with init_rpc("worker0", rank=0, **place, **settings) as worker:  # type: ignore[arg-type]
                yield worker
            for process in processes:
                process.wait(_END)
        finally:
            for process in processes:
                _end(process)


def _start(rank: int, settings: dict[str, Any]) -> subprocess.Popen[bytes]:
    """Start the process of one rank, with this process's import path."""
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM],
        stdin=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": paths},
        start_new_session=True,  # Ctrl-C is for the caller, who ends the others
    )
    assert process.stdin is not None
    pickle.dump((rank, settings), process.stdin)
    process.stdin.flush()
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    assert process.stdin is not None
    process.stdin.close()


def serve() -> None:
    """The main function of the other processes: join, and serve until all leave."""
    rank, settings = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with init_rpc(f"worker{rank}", rank=rank, **settings):
        pass


def _end_with_parent() -> None:
    os.read(sys.stdin.fileno(), 1)  # nothing comes: it is closed
    os._exit(1)
