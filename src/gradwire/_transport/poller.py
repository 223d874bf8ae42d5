"""One wait for all idle connections of a worker.

The wait is a task of the executor like any other: its thread sleeps until some connections have
data, reads it, and puts the next wait at the end of the queue, behind what arrived. So the thread
that read a request runs it, and another thread takes over the wait only if that one blocks.

A connection reports once and then has to be watched again. `_Epoll` does this with one cheap system
call, `_Portable` with what every system has.
"""

from __future__ import annotations

import logging
import select
import selectors
import socket
import threading
import time
from typing import Protocol

from ..locks import CheckedLock
from ..threads import Executor
from .busy_poll import BusyPoll

log = logging.getLogger("gradwire")


class Watched(Protocol):
    """Something with a descriptor."""

    def fileno(self) -> int: ...

    def ready(self) -> None:
        """Data (or the end) has arrived. Must not block. Watch again for more."""


class _Epoll:
    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._known: set[int] = set()

    def arm(self, fd: int) -> None:
        events = select.EPOLLIN | select.EPOLLONESHOT
        if fd in self._known:
            self._epoll.modify(fd, events)
            return
        try:
            self._epoll.register(fd, events)
        except FileExistsError:  # a Ctrl-C came just here, the last time
            self._epoll.modify(fd, events)
        self._known.add(fd)

    def disarm(self, fd: int) -> None:
        self._epoll.modify(fd, select.EPOLLONESHOT)

    def drop(self, fd: int) -> None:
        if fd in self._known:
            self._known.discard(fd)
            self._epoll.unregister(fd)

    def poll(self, timeout: float | None) -> list[int]:
        events = self._epoll.poll(-1 if timeout is None else timeout)
        return [fd for fd, _ in events]

    def close(self) -> None:
        self._epoll.close()


class _Portable:
    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._lock = CheckedLock()

    def arm(self, fd: int) -> None:
        with self._lock:
            if fd not in self._selector.get_map():
                self._selector.register(fd, selectors.EVENT_READ)

    def disarm(self, fd: int) -> None:
        with self._lock:
            if fd in self._selector.get_map():
                self._selector.unregister(fd)

    drop = disarm

    def poll(self, timeout: float | None) -> list[int]:
        fds = [key.fd for key, _ in self._selector.select(timeout)]
        for fd in fds:
            self.disarm(fd)
        return fds

    def close(self) -> None:
        self._selector.close()


class Poller:
    """Watches connections and notifies them when data arrives."""

    def __init__(self, executor: Executor, busy_poll: BusyPoll) -> None:
        self._executor = executor
        self._busy_poll = busy_poll
        self._last_wait = 0.0
        self._system = _Epoll() if hasattr(select, "epoll") else _Portable()
        self._watched: dict[int, Watched] = {}
        self._closing = threading.Event()
        self._turning = CheckedLock()
        self._lock = CheckedLock()
        self._waker, self._woken = socket.socketpair()
        self._system.arm(self._woken.fileno())

    def start(self) -> None:
        self._executor.when_stuck(self._look)
        self._executor.submit(self._turn)

    def watch(self, what: Watched) -> None:
        """Notify it once when data arrives."""
        fd = what.fileno()
        with self._lock:
            if fd >= 0 and not self._closing.is_set():
                self._watched[fd] = what
                self._system.arm(fd)

    def pause(self, what: Watched) -> None:
        """Do not notify it until it is watched again."""
        fd = what.fileno()
        with self._lock:
            if fd in self._watched and not self._closing.is_set():
                self._system.disarm(fd)

    def drop(self, what: Watched) -> None:
        """Remove it. Call this before its descriptor is closed."""
        fd = what.fileno()
        with self._lock:
            known = self._watched.pop(fd, None) is not None
            if known and not self._closing.is_set():
                self._system.drop(fd)

    def close(self) -> None:
        """Stop waiting; returns when no wait is in progress."""
        if self._closing.is_set():
            return
        with self._lock:
            self._closing.set()
        self._waker.send(b"x")
        with self._turning:
            self._system.close()
            self._waker.close()
            self._woken.close()

    def _turn(self) -> None:
        with self._turning:
            if self._closing.is_set():
                return
            with self._executor.waiting():
                began = time.perf_counter()
                fds = self._busy_poll.found(
                    lambda: self._system.poll(0), self._last_wait
                )
                fds = fds or self._system.poll(None)
                self._last_wait = time.perf_counter() - began
        try:
            self._tell(fds)
        finally:  # an error in one connection does not affect the others
            if not self._closing.is_set():
                self._executor.submit(self._turn)

    def _look(self) -> None:
        """All threads are busy: at least read what has arrived, so that pings are answered."""
        if not self._turning.acquire(blocking=False):
            return  # a thread is waiting already
        try:
            fds = [] if self._closing.is_set() else self._system.poll(0)
        finally:
            self._turning.release()
        self._tell(fds)

    def _tell(self, fds: list[int]) -> None:
        for fd in fds:
            what = self._watched.get(fd)
            if what is None:
                continue
            try:
                what.ready()
            except Exception:
                log.exception("a connection could not be served")
