"""Processes for tests: Python scripts that are started, listened to, and ended for sure.

The test itself can be one of the workers: `serve` starts others that join its world and
wait. They can import the tests' own functions.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import gradwire
from gradwire._transport.faulty import Faults
from gradwire._transport.stores import find_place
from gradwire.api import enter
from gradwire.worker import Worker
from tests.worlds import LIMIT, close_world, join_world, wait_until

ROOT = Path(__file__).parents[1]
PATHS = [ROOT / "tests" / "startup", Path(gradwire.__file__).parents[1], ROOT]

SERVER = """
import json, sys
from tests.processes import join
with join(*json.loads(sys.argv[1])):
    print("ready", flush=True)
    sys.stdin.read()  # until told to end
"""


def join(name: str, rank: int, size: int, url: str, options: dict[str, Any]) -> Worker:
    """Join a world as users do; or over a transport with `faults`, by a `seed`."""
    if "faults" not in options:
        return gradwire.init_rpc(name, None, rank, size, init_method=url, **options)
    options["faults"] = Faults(**options["faults"])
    return join_world(name, find_place(url, None, rank, size, LIMIT), **options)


class Process:
    """A Python script under way."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        path = os.pathsep.join(map(str, PATHS))
        self._popen = subprocess.Popen(
            [sys.executable, "-u", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, **environment},
        )
        self._printed = threading.Condition()
        self._lines: dict[str, list[str]] = {"output": [], "errors": []}
        self._over = 0
        self._readers = [
            threading.Thread(target=self._read, args=pipe)
            for pipe in (
                ("output", self._popen.stdout),
                ("errors", self._popen.stderr),
            )
        ]
        for reader in self._readers:
            reader.start()

    @property
    def output(self) -> str:
        return "".join(self._lines["output"])

    @property
    def errors(self) -> str:
        """All but that it waits for others, who may be late on a busy machine."""
        lines = self._lines["errors"]
        return "".join(line for line in lines if "waiting for " not in line)

    @property
    def ending(self) -> str:
        """How it ended, if it has."""
        code = self._popen.poll()
        return "runs" if code is None else f"ended with {code}"

    def wait_for(self, text: str) -> None:
        """Wait until it has printed that."""
        with self._printed:
            self._printed.wait_for(
                lambda: text in self.output or self._over == 2, LIMIT
            )
        assert text in self.output, f"{text!r} was not printed"

    def tell_to_end(self) -> None:
        """Close its standard input. Idempotent."""
        assert self._popen.stdin is not None
        self._popen.stdin.close()

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        self._popen.send_signal(signal.SIGINT)

    def stop(self) -> None:
        """Stop it, and wait until none of its threads runs any more."""
        self._popen.send_signal(signal.SIGSTOP)
        wait_until(self._stands_still)

    def _stands_still(self) -> bool:
        tasks = Path(f"/proc/{self._popen.pid}/task").glob("*/stat")
        states = [task.read_text().rpartition(")")[2].split()[0] for task in tasks]
        return set(states) == {"T"}

    def go_on(self) -> None:
        self._popen.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._popen.kill()

    def wait(self) -> int:
        """Its exit code, when it has ended by itself."""
        code = self._popen.wait(LIMIT)
        self._join()
        return code

    def close(self) -> None:
        """End it, whatever it does."""
        self._popen.kill()
        self._popen.wait()
        self._join()
        assert self._popen.stdin is not None
        self._popen.stdin.close()

    def _join(self) -> None:
        for reader in self._readers:
            reader.join(LIMIT)

    def _read(self, kind: str, pipe: IO[bytes]) -> None:
        with pipe:
            for line in pipe:
                with self._printed:
                    self._lines[kind].append(line.decode(errors="replace"))
                    self._printed.notify_all()
        with self._printed:
            self._over += 1
            self._printed.notify_all()


class Processes:
    """All processes of one test, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: list[Process] = []
        self._scripts = 0
        self._server: Path | None = None

    @property
    def url(self) -> str:
        """Where workers of this test can meet."""
        return f"file://{self._folder}/meet"

    def script(self, source: str) -> Path:
        """A file with this source."""
        self._scripts += 1
        path = self._folder / f"script{self._scripts}.py"
        path.write_text(source)
        return path

    def run(self, script: Path, *args: object, **environment: str) -> Process:
        """Start a script."""
        process = Process([str(script), *map(str, args)], environment)
        self._started.append(process)
        return process

    def serve(self, rank: int, size: int, **options: Any) -> Process:
        """Start a worker that runs what others ask for, until it is told to end."""
        settings = [f"worker{rank}", rank, size, self.url, options]
        if self._server is None:
            self._server = self.script(SERVER)
        return self.run(self._server, json.dumps(settings, default=asdict))

    @contextmanager
    def world(self, size: int, **options: Any) -> Iterator[Worker]:
        """Be worker0 of a world of that size, and shut down with all others in the end."""
        place = find_place(self.url, None, 0, size, LIMIT)
        worker = join_world("worker0", place, **options)
        try:
            yield worker
        except BaseException:
            worker.shutdown(graceful=False)
            raise
        for process in self._started:
            process.tell_to_end()
        close_world([worker])

    @contextmanager
    def serving_world(self, size: int) -> Iterator[list[Process]]:
        """Be worker0 as users are; the others, which serve, run in these processes."""
        servers = [self.serve(rank, size) for rank in range(1, size)]
        with self.world(size) as worker:
            before = enter(worker)
            try:
                yield servers
            finally:
                enter(before)

    def close(self) -> None:
        """End all of them. pytest shows what is written here if the test failed."""
        for number, process in enumerate(self._started):
            sys.stdout.write(f"--- process {number} {process.ending}\n")
            process.close()
            sys.stdout.write(f"--- process {number}, output:\n{process.output}")
            sys.stdout.write(f"--- process {number}, errors:\n{process.errors}")
