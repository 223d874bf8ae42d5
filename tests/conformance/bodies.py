"""Runs one test body in a process forked for it, which starts the ranks and ends with them.

The ranks are forked as well, out of a process that has imported everything and done nothing.
PyTorch starts new ones, each of which takes seconds to import torch.
"""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import time
import unittest
from pathlib import Path
from typing import Any, NamedTuple

import suites
import torch
from torch.testing._internal import common_distributed

_KILL_AFTER = (
    10.0  # seconds more than a test may take, for its own report of what hangs
)


class Outcome(NamedTuple):
    """How a test ended: pass, fail, skip or timeout."""

    suite: str
    test: str
    status: str
    seconds: float
    why: str


class Running:
    """A test under way."""

    def __init__(self, suite: str, test: str, folder: Path, limit: float) -> None:
        self.suite, self.test = suite, test
        self.log = folder / f"{suite}.{test}.log"
        self._result = folder / f"{suite}.{test}.json"
        self._result.unlink(missing_ok=True)
        self._began = time.monotonic()
        self._deadline = self._began + limit + _KILL_AFTER
        self._child = os.fork()
        if self._child == 0:
            _be_child(suite, test, self.log, self._result, limit)

    def poll(self) -> Outcome | None:
        """How it ended, if it has."""
        ended, _ = os.waitpid(self._child, os.WNOHANG)
        late = time.monotonic() > self._deadline
        if not ended and not late:
            return None
        self._end_group()
        if not ended:
            os.waitpid(self._child, 0)
        seconds = time.monotonic() - self._began
        try:
            status, why = json.loads(self._result.read_text())
        except (OSError, ValueError):
            status, why = (
                ("timeout", "it hangs") if late else ("fail", "its process died")
            )
        return Outcome(self.suite, self.test, status, seconds, why)

    def _end_group(self) -> None:
        try:
            os.killpg(self._child, signal.SIGKILL)  # the ranks, if some are left
        except (ProcessLookupError, PermissionError):
            pass


def _be_child(suite: str, test: str, log: Path, result: Path, limit: float) -> None:
    code = 70
    try:
        os.setsid()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(output, 1)
        os.dup2(output, 2)
        written = json.dumps(_run(suite, test, limit))
        result.write_text(written)
        code = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run(suite: str, test: str, limit: float) -> tuple[str, str]:
    common_distributed.TIMEOUT_DEFAULT = int(limit)
    common_distributed.TIMEOUT_OVERRIDE.clear()
    case = common_distributed.MultiProcessTestCase
    case._spawn_processes = _fork_processes
    check = case._check_return_codes
    codes: list[int | None] = []

    def check_return_codes(self: Any, *args: Any) -> Any:
        codes.extend(process.exitcode for process in self.processes)
        return check(self, *args)

    case._check_return_codes = check_return_codes
    outcome = unittest.TextTestResult(io.StringIO(), True, 0)  # type: ignore[type-var]
    unittest.TestSuite([suites.load(suite)(test)]).run(outcome)
    for _, text in [*outcome.errors, *outcome.failures]:
        timed_out = "terminated or timed out after" in text
        return "timeout" if timed_out else "fail", _last_line(text)
    if outcome.skipped:
        return "skip", outcome.skipped[0][1]
    if any(codes):  # PyTorch looks at the first rank only
        return "fail", f"exit codes {codes}"
    return "pass", ""


def _fork_processes(self: Any) -> None:
    self._start_processes(torch.multiprocessing.get_context("fork").Process)


def _last_line(text: str) -> str:
    """What went wrong: the last line of the first traceback of a rank."""
    lines = [line for line in text.splitlines() if "Error" in line and line[:1] != " "]
    of_ranks = [line for line in lines if not line.startswith("RuntimeError: Process ")]
    return (of_ranks or lines or ["no traceback"])[0][:300]
