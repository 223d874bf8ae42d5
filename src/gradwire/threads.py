"""An elastic thread pool: threads are added when there is work and end when there is none.

An `Executor` runs tasks from one queue. It keeps as few threads awake as possible: a task that is
submitted while a thread is busy is left for that thread, so a reader that submits a request runs it
itself, without a hand-over. Three rules prevent starvation:

* A thread that is about to block inside a call of ours announces it (`waiting`), and another thread
  takes the queue at once. Such threads do not count towards the limit, so calls can nest to any
  depth.
* A thread that is blocked elsewhere (a sleep, a lock) is noticed by the monitor within a few
  milliseconds, which adds a thread. The monitor ticks only while there is work, and otherwise
  sleeps without a timeout.

`host` gives a task a thread of its own, outside the limit: for tasks that mostly wait. Threads are
reused, most recently used first: OpenMP teams, caches and allocator arenas belong to threads. There
are as few frames below a task as possible, because anomaly mode formats each at every operation.

Where the system cannot start threads ("can't start new thread"), nothing is lost: tasks stay in
the queue, including those that should have a thread of their own, and the monitor retries.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from .locks import CheckedLock, check_none_held

Task = Callable[[], object]

log = logging.getLogger("gradwire")

_TICK = 0.001  # how long a queue may stand still before a thread is added
_LINGER_TICKS = 2  # ticks without work before the monitor sleeps: waking it costs more
_IDLE = 2.0  # how long a thread without work stays
_LOG_INTERVAL = 10.0
_MOMENT = 0.3  # a wait that is longer than this may have no end


class Executor:
    """Runs tasks on elastic threads; also tasks at a given time."""

    def __init__(
        self, name: str, limit: int, *, on_thread: Callable[[], object] | None = None
    ) -> None:
        self._name = name
        self._limit = limit
        self._on_thread = on_thread
        self._lock = CheckedLock()
        self._queue: deque[Task] = deque()
        self._counted: set[int] = set()  # threads that take from the queue
        self._active = 0  # of those, the ones neither idle nor waiting
        self._idle: list[_Thread] = []
        self._looks: list[Callable[[], None]] = []
        self._taken = 0
        self._closed = False
        self._numbers = itertools.count()
        self._threads: set[threading.Thread] = set()
        self._starting = CheckedLock()
        self._log_after = 0.0
        self._monitor = _Monitor(self)

    def __repr__(self) -> str:
        return (
            f"<Executor {self._name}: {len(self._threads)} threads, "
            f"{self._active} active, {len(self._queue)} queued>"
        )

    @property
    def backlog(self) -> int:
        return len(self._queue)

    def begin(self) -> None:
        """Start the monitor, which starts everything else: later there may be no thread for it.

        Raises:
            RuntimeError: the system has no thread now.
        """
        self._monitor.begin()

    def submit(self, task: Task) -> None:
        """Run `task` soon."""
        self._queue.append(task)
        if self._active:
            self._monitor.wake()  # the busy thread will take it, or the monitor adds one
        else:
            self._add_thread()

    def host(self, task: Task) -> None:
        """Run `task` at once in a thread of its own, or as soon as one can be started."""
        with self._lock:
            thread = self._idle.pop() if self._idle and not self._closed else None
            if thread is not None:
                thread.given = task
        if thread is not None:
            thread.bell.ring()
        elif not self.start(task, "host"):
            self.submit(task)

    def call_at(self, when: float, task: Task) -> None:
        """Submit `task` at the monotonic time `when`."""
        self._monitor.schedule(when, task)

    def look_at(self, when: float, look: Task) -> None:
        """Call `look` from the monitor at that monotonic time. It must be quick.

        No thread but the monitor is woken for it.
        """
        self._monitor.schedule(when, look, is_quick=True)

    def waiting(self) -> AbstractContextManager[None]:
        """A context for waits on something that depends on other tasks."""
        if threading.get_ident() in self._counted:
            return _Waiting(self)
        return _NOTHING

    def when_stuck(self, look: Callable[[], None]) -> None:
        """Call `look` from the monitor periodically while all threads are blocked."""
        self._looks.append(look)

    def pause(self) -> None:
        """This thread is about to block: another may take the queue."""
        with self._lock:
            self._active -= 1
        if self._queue and not self._active:
            self._add_thread()

    def resume(self) -> None:
        """This thread continues."""
        with self._lock:
            self._active += 1

    def close(self) -> None:
        """Let the threads end; those inside a task end after it. No more tasks are run."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._queue.clear()
            idle, self._idle = self._idle, []
        for thread in idle:
            thread.bell.ring()
        self._monitor.close()

    def join(self, timeout: float) -> bool:
        """Wait for all other threads to end; False if some have not."""
        deadline = time.monotonic() + timeout
        with self._starting:  # none of these is yet to be started
            threads = list(self._threads)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        self._queue.clear()  # what came late: it will not be run, and may hold a lot
        return all(t is threading.current_thread() for t in list(self._threads))

    def add_if_stuck(self, taken: int) -> int:
        """For the monitor: add a thread if none took a task since; returns the count."""
        if self._queue and self._taken == taken:
            if self._active < self._limit:
                self._add_thread()
            else:
                for look in self._looks:
                    _run(look)
        return self._taken

    def _add_thread(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._active += 1
            thread = self._idle.pop() if self._idle else None
            if thread is not None:
                thread.is_active = True
        if thread is not None:
            thread.bell.ring()
        elif not self.start(None, "work"):
            with self._lock:
                self._active -= 1
            self._monitor.wake()  # it tries again

    def start(self, task: Task | None, role: str) -> bool:
        """Start a thread for a task, or for the queue; False if the system has none."""
        try:
            self._start(task, role)
        except RuntimeError as error:
            if self._closed:  # Python refuses at its end, too
                return False
            now = time.monotonic()
            if now >= self._log_after:
                self._log_after = now + _LOG_INTERVAL
                log.warning("executor %s: %s, trying again", self._name, error)
            return False
        return True

    def _start(self, task: Task | None, role: str) -> None:
        thread = _Thread(
            self, task, f"gradwire-{self._name}-{role}-{next(self._numbers)}"
        )
        with self._starting:
            try:
                self._threads.add(thread)
                thread.start()
            finally:
                if thread.ident is None:  # Ctrl-C came before it began
                    self._threads.discard(thread)

    def _next(self, thread: _Thread) -> Task | None:
        """What a thread does next; sleeps while there is nothing. None: end."""
        while thread.given is None:
            if self._closed:
                return None
            if thread.is_active:
                self._counted.add(thread.number)
                try:
                    task = self._queue.popleft()
                except IndexError:
                    self._counted.discard(thread.number)
                else:
                    self._taken += 1
                    return task
            if not self._rest(thread):
                return None
        task, thread.given = thread.given, None
        return task

    def _rest(self, thread: _Thread) -> bool:
        """Sleep until there is work; False when it is time to go."""
        with self._lock:
            if thread.is_active:
                thread.is_active = False
                self._active -= 1
            if self._closed:
                return False
            if self._queue and not self._active:  # put in just now
                thread.is_active = True
                self._active += 1
                return True
            self._idle.append(thread)
        if thread.bell.wait(_IDLE):
            return True
        with self._lock:
            if thread in self._idle:
                self._idle.remove(thread)
                return False
        return thread.bell.wait(None)  # rung just now: the work is ours

    def _ended(self, thread: _Thread) -> None:
        self._counted.discard(thread.number)
        self._threads.discard(thread)


class _Thread(threading.Thread):
    """A thread of an executor. The task it begins with is its own; without, it is active."""

    def __init__(self, executor: Executor, task: Task | None, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.bell = Bell()
        self.given = task
        self.is_active = task is None
        self.number = 0
        self._executor = executor

    def run(self) -> None:
        executor = self._executor
        self.number = threading.get_ident()
        try:
            if executor._on_thread is not None:
                _run(executor._on_thread)
            while True:
                task = executor._next(self)
                if task is None:
                    return
                try:
                    task()
                except BaseException:  # or the thread would end, and still be counted
                    log.exception("a task of gradwire failed")
                del task  # what it holds must not live until the next one
        finally:
            executor._ended(self)


class ShorterSwitchInterval:
    """Shortens Python's thread switch interval, so that calls need not wait for busy threads.

    The setting is per process, not per worker: it is only ever lowered, and restored by `close`.
    """

    def __init__(self, seconds: float) -> None:
        self._before: float | None = None
        if 0 < seconds < sys.getswitchinterval():
            self._before = sys.getswitchinterval()
            sys.setswitchinterval(seconds)

    def close(self) -> None:
        if self._before is not None:
            sys.setswitchinterval(self._before)
            self._before = None


class _Waiting(AbstractContextManager[None]):
    """A thread of the executor that does not count against the limit while it waits."""

    __slots__ = ("_executor",)

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def __enter__(self) -> None:
        self._executor.pause()

    def __exit__(self, *_: object) -> None:
        self._executor.resume()


_NOTHING: AbstractContextManager[None] = nullcontext()


class Bell:
    """One sleeper, one waker."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def ring(self) -> None:
        try:
            self._lock.release()
        except RuntimeError:
            pass  # rung already

    def wait_until(self, deadline: float | None) -> bool:
        """Wait for an event in another thread.

        Raises:
            GradwireError: it cannot happen, because this thread was interrupted while it held a
                lock.
        """
        left = float("inf") if deadline is None else deadline - time.monotonic()
        if left <= _MOMENT:
            return self.wait(left)
        if self.wait(_MOMENT):
            return True
        check_none_held()
        return self.wait(None if deadline is None else left - _MOMENT)

    def wait(self, timeout: float | None) -> bool:
        return self._lock.acquire(timeout=-1 if timeout is None else max(0.0, timeout))


class _Monitor:
    """The thread that watches for stuck queues and runs timers. Starts on first use."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._bell = Bell()
        self._asleep = False
        self._started = threading.Lock()
        self._lock = CheckedLock()
        self._timers: list[tuple[float, int, Task, bool]] = []
        self._order = itertools.count()
        self._wake_at = float("inf")

    def schedule(self, when: float, task: Task, *, is_quick: bool = False) -> None:
        with self._lock:
            if self._executor._closed:
                return
            heapq.heappush(self._timers, (when, next(self._order), task, is_quick))
            first = when < self._wake_at
        if first:
            self.rouse()

    def close(self) -> None:
        """Drop all timers; the executor is closed."""
        with self._lock:
            self._timers.clear()
        self.rouse()

    def wake(self) -> None:
        """There is work: tick, unless ticking already."""
        if self._asleep or not self._started.locked():
            self.rouse()

    def begin(self) -> None:
        if self._started.acquire(blocking=False):
            try:
                self._executor._start(self._watch, "monitor")
            except BaseException:
                self._started.release()
                raise

    def rouse(self) -> None:
        """Wake it now."""
        # Acquired once, and never released unless the start fails.
        if not self._started.acquire(blocking=False):
            self._bell.ring()
        elif self._executor._closed or not self._executor.start(self._watch, "monitor"):
            self._started.release()  # the next to need it retries

    def _watch(self) -> None:
        executor = self._executor
        quiet = taken = 0
        while not executor._closed:
            for task, is_quick in self._due():
                if is_quick:
                    _run(task)
                else:
                    executor.submit(task)
            quiet = 0 if executor.backlog else quiet + 1
            taken = executor.add_if_stuck(taken)
            self._asleep = quiet > _LINGER_TICKS
            if (
                self._asleep and executor.backlog
            ):  # put in before it could see us asleep
                self._asleep = False
            self._bell.wait(self._pause())
            self._asleep = False

    def _pause(self) -> float | None:
        """How long to sleep, and note until when, so that an earlier timer wakes us."""
        now = time.monotonic()
        with self._lock:
            first = self._timers[0][0] if self._timers else float("inf")
            self._wake_at = first if self._asleep else min(first, now + _TICK)
        return None if self._wake_at == float("inf") else self._wake_at - now

    def _due(self) -> list[tuple[Task, bool]]:
        now = time.monotonic()
        due = []
        with self._lock:
            self._wake_at = float("-inf")  # awake: nobody needs to ring
            while self._timers and self._timers[0][0] <= now:
                due.append(heapq.heappop(self._timers)[2:])
        return due


def _run(task: Task) -> None:
    try:
        task()
    except BaseException:  # or the thread would end, and still be counted
        log.exception("a task of gradwire failed")
