"""Says what a worker waits for while it starts: a missing one is seen long before the timeout."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable

from ..errors import GradwireError

log = logging.getLogger("gradwire")

_FIRST = 3.0  # seconds until the first report
_INTERVAL = 10.0
_PROBE = 2.0  # seconds for one attempt to connect
_PAUSE = 0.05


class WaitReport:
    """A warning with what is waited for, after some seconds and then once in a while."""

    def __init__(self, what: Callable[[], str], first: float | None = None) -> None:
        self._what = what
        self._next = time.monotonic() + (_FIRST if first is None else first)

    def tick(self) -> None:
        """To be called while waiting, often."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _INTERVAL
            log.warning("waiting for %s", self._what())


def wait_for_listener(host: str, port: int, timeout: float) -> None:
    """Wait until something listens at an address.

    torch waits as well, but says nothing useful, and prints C++ stacks.

    Raises:
        GradwireError: nothing did in time; says why.
    """
    deadline = time.monotonic() + timeout
    report = WaitReport(lambda: f"the store at tcp://{host}:{port}, which rank 0 hosts")
    while True:
        left = deadline - time.monotonic()
        try:
            socket.create_connection(
                (host, port), max(min(left, _PROBE), _PAUSE)
            ).close()
        except OSError as error:
            if time.monotonic() + _PAUSE > deadline:
                raise GradwireError(
                    f"cannot reach the store at {host}:{port} within {timeout:.3g} s ({error}): "
                    "rank 0 hosts it: check that it runs, and that all use the same address"
                ) from None
            report.tick()
            time.sleep(_PAUSE)
        else:
            return
