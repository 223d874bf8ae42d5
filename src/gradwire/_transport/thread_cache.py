"""Threads that begin a task at once, for those who then sleep until it is done.

They stay for a while when they have none: waking one costs far less than a new one.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable

from ..threads import Bell, Task

_IDLE = 2.0  # seconds that a thread without a task stays


class Hosts:
    """Such threads; `start` starts one (`Executor.host`)."""

    def __init__(self, start: Callable[[Task], None]) -> None:
        self._start = start
        self._idle: list[_Host] = []
        self._closed = False

    def run(self, task: Task) -> None:
        """Run `task` at once, in a thread of its own."""
        while True:
            try:
                host = self._idle.pop()
            except IndexError:
                break
            if host.give(task):
                host.bell.ring()
                return
        host = _Host()
        host.give(task)
        try:
            self._start(lambda: self._be(host))
        except Exception:  # no more threads; and not Ctrl-C: it may have started
            host.close()
            raise

    def close(self) -> None:
        """Let the threads end; those inside a task end after it."""
        self._closed = True
        while self._idle:
            self._idle.pop().bell.ring()

    def _be(self, host: _Host) -> None:
        try:
            while (task := host.take()) is not None:
                task()
                del task  # what it holds must not live until the next one
                self._await_task(host)
        finally:
            host.close()  # nobody has it any more, to ring it

    def _await_task(self, host: _Host) -> None:
        """Wait for the next task, for a while."""
        host.given = {}
        self._idle.append(host)
        if not self._closed:
            host.bell.wait(_IDLE)
        try:
            self._idle.remove(host)
        except ValueError:
            pass  # whoever took it gives it a task; unless that was interrupted


class _Host:
    """Such a thread."""

    def __init__(self) -> None:
        self.given: dict[str, Task | None] = {}  # the next task; None: it is to end
        try:
            self.bell: Bell | _QuickBell = _QuickBell()
        except (AttributeError, OSError):  # not on this system, or out of descriptors
            self.bell = Bell()

    def give(self, task: Task) -> bool:
        """Have a task run; False: it is ending. In a single step, and so is `take`."""
        return self.given.setdefault("task", task) is task

    def take(self) -> Task | None:
        """The task; None: there was none, and there will be none."""
        task = self.given.setdefault("task", None)
        if task is not None:
            self.given = {"task": None}
        return task

    def close(self) -> None:
        if isinstance(self.bell, _QuickBell):
            self.bell.close()


class _QuickBell:
    """A bell whose ringing lets go of Python's lock, so that the sleeper goes on at once.

    Rung by a `Bell`, it would wake, find that lock taken, and sleep again.
    """

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)

    def ring(self) -> None:
        os.eventfd_write(self._fd, 1)

    def wait(self, timeout: float | None) -> bool:
        if not self._poll.poll(None if timeout is None else timeout * 1000):
            return False
        os.eventfd_read(self._fd)
        return True

    def close(self) -> None:
        os.close(self._fd)
