"""The future of a call: torch's own, which can also be awaited, and waited on with a timeout.

A thread that waits on it reads the connection on which the response arrives (`Transport.attend`).
An exception that was never retrieved is logged once, when the future is freed.

`torch.futures.Future` is a public class; subclassing it is what torch's own users do. `then` and
`add_done_callback` count as retrieving.

Private torch name used here, and what breaks without it: `Future._set_unwrap_func`, with which
torch's own `set_exception` makes C++ raise one and the same exception object at every access. That
object collects the frames it passes through, they reference the future, and C++ holds the object,
where no garbage collector sees it: every failed call would leak. Here each access raises a copy,
and accesses through `torch.futures.wait_all` are noticed.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
import logging
import sys
import time
from collections.abc import Callable, Coroutine, Generator
from typing import Any, NamedTuple, TypeVar

import torch.futures

from .. import streams
from .._wire.functions import describe
from ..errors import ClosedError
from ..locks import CheckedLock
from ..tracebacks import hide_frames, text_of
from ..uncompiled import uncompiled

log = logging.getLogger("gradwire")

Attend = Callable[["CallFuture", float | None], None]
E = TypeVar("E", bound=BaseException)


_NONE_YET = object()


class Future(torch.futures.Future[Any]):
    """A future whose callbacks run with the context variables of where they were added, as in
    asyncio.

    So do the callbacks of what `then` returns.
    """

    def then(self, callback: Callable[[Any], Any]) -> torch.futures.Future[Any]:
        made = Future()

        def finish(inner: Any) -> None:
            try:
                value = inner.value()
            except Exception:  # noqa: BLE001 user code
                made._set_unwrap_func(lambda _: inner.value())  # the same each time
                value = None
            made.set_result(value)

        super().then(_with_variables(callback)).add_done_callback(finish)
        return made

    def wait(self) -> Any:
        return _taken(super().wait())

    def value(self) -> Any:
        return _taken(super().value())

    def add_done_callback(self, callback: Callable[[Any], Any]) -> None:
        super().add_done_callback(_with_variables(callback))


class CallFuture(Future):
    """The future result of a call."""

    def __init__(
        self, call: int, to: int, deadline: float, attend: Attend, fate: Fate
    ) -> None:
        super().__init__()
        self.call = call
        self.to = to
        self.deadline = deadline
        self.fate = fate
        self.keep: Any = None  # what must live until the response arrives
        self._attend = attend
        self._result: Any = _NONE_YET

    @uncompiled
    def wait(self, timeout: float | None = None) -> Any:
        """The result.

        Raises:
            TimeoutError: it did not arrive in time. The call continues; you can wait again.
            Exception: what the call raised.
        """
        self.fate.seen = True
        if (
            self._result is not _NONE_YET
        ):  # torch's way releases the GIL: that can take long
            return _taken(self._result)
        if not self.done():
            deadline = None if timeout is None else time.monotonic() + timeout
            self._attend(self, deadline)
            if not self.done():
                raise TimeoutError(f"{self.fate}: no result after {timeout or 0:g} s")
        try:
            return super().wait()
        except Exception as error:
            hide_frames(error)
            raise

    def done(self) -> bool:
        return self._result is not _NONE_YET or super().done()

    def set_result(self, result: Any) -> None:
        self._result = result
        self.keep = None
        super().set_result(result)

    def value(self) -> Any:
        self.fate.seen = True
        if self._result is not _NONE_YET:
            return _taken(self._result)
        try:
            return super().value()
        except Exception as error:
            hide_frames(error)
            raise

    def then(self, callback: Callable[[Any], Any]) -> torch.futures.Future[Any]:
        self.fate.seen = True
        return super().then(callback)

    def add_done_callback(self, callback: Callable[[Any], Any]) -> None:
        self.fate.seen = True
        super().add_done_callback(callback)

    def on_done(self, wake: Callable[[], None]) -> None:
        """Register a wake-up for its completion, without marking the result as retrieved."""
        torch.futures.Future.add_done_callback(self, lambda _: wake())

    def set_exception(self, result: Exception) -> None:
        self.keep = None
        fate = self.fate
        fate.error = _without_frames(result)  # they hold this future

        def look(_: Any) -> None:
            fate.seen = True
            raise fresh_copy(result)

        self._set_unwrap_func(look)
        super().set_result(fate.error)  # the only part that TorchScript sees

    def __await__(self) -> Generator[Any, None, Any]:
        self.fate.seen = True
        return _awaited(self).__await__()

    def __repr__(self) -> str:
        state = "done" if self.done() else "pending"
        return f"<CallFuture of {self.fate}: {state}>"


class Fate:
    """What was called and its outcome; lives exactly as long as the future."""

    __slots__ = ("error", "seen", "what", "worker")

    def __init__(self, what: Any, worker: str) -> None:
        self.what = what
        self.worker = worker
        self.error: BaseException | None = None
        self.seen = False

    def __str__(self) -> str:
        return f"call of {describe(self.what)} on worker {self.worker!r}"

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if self.error is None or self.seen or is_finalizing():  # no logger by then
            return
        log.warning("%s: exception was never retrieved: %r", self, self.error)


class Failed(NamedTuple):
    """An exception in place of a result, without its frames but with its traceback as text."""

    error: BaseException
    trace: str


def keepable(error: BaseException) -> Failed:
    """An exception to store: with its traceback as text, as frames keep local variables alive."""
    trace = text_of(error)
    twin = fresh_copy(error).with_traceback(None)
    # They have frames as well; the text has everything.
    twin.__cause__ = twin.__context__ = None
    return Failed(twin, trace)


def _without_frames(error: E) -> E:
    """The same exception, and its causes, without frames."""
    stack: list[BaseException | None] = [error]
    seen: set[int] = set()
    while stack:
        one = stack.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = None
            stack += [one.__cause__, one.__context__]
    return error


def wait_after(meanwhile: Callable[[], object] | None, future: CallFuture) -> Any:
    """Do something else first, then wait for a future."""
    if meanwhile is not None:
        meanwhile()
    return future.wait()


def fresh_copy(error: E) -> E:
    """A copy of an exception to raise, so that the original collects no frames."""
    try:
        twin = copy.copy(error)
    except Exception:  # noqa: BLE001 user code
        return error
    twin.__cause__ = error.__cause__
    return twin


def _with_variables(callback: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap a callback to run with the context variables of where it was registered."""
    if not callable(callback):
        return callback  # torch reports what is wrong with it
    variables = contextvars.copy_context()

    def call(future: Any) -> Any:
        if not streams.in_use:
            return variables.run(callback, future)
        with streams.default():  # as what others wait for then
            return variables.run(callback, future)

    return call


def _taken(value: Any) -> Any:
    """A value, for this thread's streams."""
    if streams.in_use:
        streams.take(value)
    return value


async def _awaited(future: CallFuture) -> Any:
    """Await the result without blocking the event loop."""
    loop = asyncio.get_running_loop()
    done = asyncio.Event()

    def wake(_: Any) -> None:
        try:
            loop.call_soon_threadsafe(done.set)
        except RuntimeError:
            pass  # the loop was closed: nothing awaits it any more

    future.add_done_callback(wake)
    await done.wait()
    return future.value()


def settle(future: torch.futures.Future[Any], outcome: Callable[[], Any]) -> None:
    """Complete a future with what `outcome` returns or raises."""
    try:
        value = outcome()
    except Exception as error:  # noqa: BLE001 user code
        future.set_exception(error)
    else:
        future.set_result(value)


def _kept(outcome: Callable[[], Any]) -> Any:
    """The value, or `Failed`."""
    try:
        return outcome()
    except Exception as error:  # noqa: BLE001 user code
        return keepable(error)


class Loops:
    """One asyncio event loop of a worker, in a thread of its own, for `async def` functions."""

    def __init__(self, host: Callable[[Callable[[], object]], None]) -> None:
        self._host = host
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[Any] = (
            set()
        )  # a loop holds what it runs by weak references only
        self._closed = False
        self._lock = CheckedLock()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> torch.futures.Future[Any]:
        """Start a coroutine; returns a future of its result, or `Failed`.

        A future that is given an exception holds it in C++, with all its frames and what they
        reference, such as this future: it would leak.

        Raises:
            ClosedError: the worker is closed.
        """
        future: torch.futures.Future[Any] = torch.futures.Future()
        with self._lock:  # the loop is not stopped meanwhile
            if self._closed:
                coroutine.close()
                raise ClosedError("this worker was shut down")
            task = asyncio.run_coroutine_threadsafe(
                _contained(coroutine), self._running()
            )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda done: future.set_result(_kept(done.result)))
        return future

    def close(self) -> None:
        with self._lock:
            self._closed = True
            loop, self._loop = self._loop, None
        if loop is not None:
            loop.call_soon_threadsafe(loop.stop)

    def _running(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            loop = self._loop
            self._host(lambda: _run_loop(loop))
        return self._loop


async def _contained(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Await a coroutine, and contain a `SystemExit`: it would end the loop for everyone."""
    try:
        return await coroutine
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(f"{type(error).__qualname__}: {error}") from error


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
