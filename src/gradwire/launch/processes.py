"""The processes of one node: started, read from, and ended with all their children.

Each worker leads its own session, so that a signal also reaches its children, and leftovers can be
killed after it. Every event is put into one queue.

One of them may be attached: it inherits the launcher's standard input and output, as a debugger
needs. A terminal requires no more of a process outside of its session.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any, NamedTuple

from .plan import Recruit

_LEASH = [
    sys.executable,
    "-I",
    "-S",
    str(Path(__file__).with_name("die_with_parent.py")),
]
_DRAIN = 2.0  # seconds for the last output, which a child that ran away may hold open


class Printed(NamedTuple):
    """A worker printed a line."""

    worker: int
    line: str
    is_error: bool


class Ended(NamedTuple):
    """A worker has ended, and all its output has been read."""

    worker: int
    status: int


class WorkerProcesses:
    """The processes of the workers, by number."""

    def __init__(self, recruits: Iterable[Recruit], events: SimpleQueue[Any]) -> None:
        self._events = events
        self._processes: list[subprocess.Popen[bytes]] = []
        self._threads: list[threading.Thread] = []
        try:
            for recruit in recruits:
                self._processes.append(_start(recruit))
        except BaseException:
            self.close()
            raise
        for worker in range(len(self._processes)):
            self._follow(worker)

    def restart(self, worker: int, recruit: Recruit) -> None:
        """Start a worker that has ended again."""
        self._processes[worker] = _start(recruit)
        self._follow(worker)

    def _follow(self, worker: int) -> None:
        process = self._processes[worker]
        readers = [
            self._thread(self._read, worker, pipe, pipe is process.stderr)
            for pipe in (process.stdout, process.stderr)
            if pipe is not None
        ]
        self._threads.append(self._thread(self._wait, worker, process, readers))

    def signal(self, number: int, workers: Iterable[int]) -> None:
        """Send a signal to these workers and their children."""
        for worker in workers:
            if number == signal.SIGABRT:
                _forbid_core(self._processes[worker].pid)
            _signal(self._processes[worker].pid, number)

    def close(self) -> None:
        """End everything now."""
        for process in self._processes:
            if process.returncode is None:
                _signal(process.pid, signal.SIGKILL)
        for process in self._processes:
            process.wait()
        for thread in self._threads:
            thread.join()

    def _thread(self, work: Any, *args: Any) -> threading.Thread:
        thread = threading.Thread(target=work, args=args, daemon=True)
        thread.start()
        return thread

    def _read(self, worker: int, pipe: IO[bytes], is_error: bool) -> None:
        with pipe:
            for line in pipe:
                # A progress bar goes back to the start of its line: only its last state counts.
                shown = line.rstrip(b"\r\n").rpartition(b"\r")[2]
                text = shown.decode(errors="replace")
                self._events.put(Printed(worker, text, is_error))

    def _wait(
        self,
        worker: int,
        process: subprocess.Popen[bytes],
        readers: list[threading.Thread],
    ) -> None:
        status = process.wait()
        _signal(process.pid, signal.SIGKILL)  # its children
        for reader in readers:
            reader.join(_DRAIN)
        self._events.put(Ended(worker, status if status >= 0 else 128 - status))


def _start(recruit: Recruit) -> subprocess.Popen[bytes]:
    leash = [*_LEASH, str(os.getpid())] if sys.platform == "linux" else []
    return subprocess.Popen(
        [*leash, *recruit.command],
        env=recruit.environment,
        stdin=None if recruit.is_attached else subprocess.DEVNULL,
        stdout=None if recruit.is_attached else subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def _forbid_core(pid: int) -> None:
    """SIGABRT is for the stacks; a core file of each worker would take long and fill the disk."""
    if sys.platform == "linux":
        try:
            _, hard = resource.prlimit(pid, resource.RLIMIT_CORE)
            # Not 0: the kernel gives a core to a program (systemd's, say) even then.
            resource.prlimit(pid, resource.RLIMIT_CORE, (int(hard != 0), hard))
        except (ProcessLookupError, PermissionError):
            pass  # gone


def _signal(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except (
        ProcessLookupError,
        PermissionError,
    ):  # gone; on macOS: all of it are zombies
        pass
