"""A listening socket."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable

from ..threads import Executor
from .poller import Poller

log = logging.getLogger("gradwire")

_BATCH = 32  # accepted at a time, so that existing connections are not starved
_LOG_INTERVAL = 10.0
_TRY_AGAIN = 0.1  # seconds until accepting is retried after a failure


class Listener:
    """A listening socket, watched by the poller."""

    def __init__(
        self,
        sock: socket.socket,
        poller: Poller,
        executor: Executor,
        accepted: Callable[[socket.socket], None],
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._poller = poller
        self._executor = executor
        self._accepted = accepted
        self._log_after = 0.0

    def fileno(self) -> int:
        return self._sock.fileno()

    def ready(self) -> None:
        try:
            for _ in range(_BATCH):
                sock, _ = self._sock.accept()
                self._accepted(sock)
            self._watch()
        except BlockingIOError:
            self._watch()
        except OSError as error:
            if self.fileno() >= 0:  # not closed: out of descriptors, say
                now = time.monotonic()
                if now >= self._log_after:
                    self._log_after = now + _LOG_INTERVAL
                    log.warning("cannot accept a connection for now: %s", error)
                self._executor.look_at(now + _TRY_AGAIN, self._watch)

    def close(self) -> None:
        self._sock.close()

    def _watch(self) -> None:
        if self.fileno() >= 0:
            self._poller.watch(self)
