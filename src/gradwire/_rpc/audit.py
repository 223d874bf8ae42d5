"""The audit log: who came and went, who was refused and why, and what was called by whom.

Off by default. One JSON object on each line, written at once and at the end of the file, so several
workers can share one. It has names of functions and of workers, but no arguments.
"""

from __future__ import annotations

import json
import logging
import os
from datetime import datetime, timezone

log = logging.getLogger("gradwire")


class Audit:
    """Writes down what one worker sees."""

    def __init__(self, path: str, worker: str) -> None:
        self._worker = worker
        self._path = path
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def __repr__(self) -> str:
        return f"<Audit of {self._worker!r} in {self._path}>"

    def write(self, event: str, **what: str) -> None:
        """Add a line. If that fails, the work goes on: the log says so."""
        time = datetime.now(timezone.utc).isoformat()
        line = {"time": time, "worker": self._worker, "event": event, **what}
        try:
            os.write(self._file, (json.dumps(line) + "\n").encode())
        except OSError as error:
            log.error("cannot write the audit log %s: %s", self._path, error)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1


class _NoAudit(Audit):
    """None is kept."""

    def __init__(self) -> None:
        self._file = -1

    def __repr__(self) -> str:
        return "<no audit>"

    def write(self, event: str, **what: str) -> None:
        pass


NO_AUDIT: Audit = _NoAudit()


def open_audit(path: str | None, worker: str) -> Audit:
    """The log at that path.

    Raises:
        OSError: it cannot be written to.
    """
    return NO_AUDIT if path is None else Audit(path, worker)
