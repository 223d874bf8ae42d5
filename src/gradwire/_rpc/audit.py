"""The audit log: joins, leaves, refusals with their reasons, and calls with their callers.

Off by default. One JSON object on each line, appended at once, so several workers can share a file.
It contains names of functions and workers, but no arguments.
"""

from __future__ import annotations

import json
import logging
import os
from datetime import datetime, timezone

log = logging.getLogger("gradwire")


class Audit:
    """Logs what one worker sees."""

    def __init__(self, path: str, worker: str) -> None:
        self._worker = worker
        self._path = path
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def __repr__(self) -> str:
        return f"<Audit of {self._worker!r} in {self._path}>"

    def write(self, event: str, **what: str) -> None:
        """Append a line. A failure is logged, and does not affect the worker."""
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
    """No log."""

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
