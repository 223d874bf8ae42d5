"""The future of a call: torch's own, which can also be awaited, and waited on with a timeout.

Who waits on it reads the connection the answer comes by (`Transport.attend`). A failure that
nobody ever looked at is logged once, when the future goes away.

`torch.futures.Future` is a public class; subclassing it is what torch's own users do. `then` and
`add_done_callback` count as looking.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Generator
from typing import Any

import torch.futures

log = logging.getLogger("gradwire")

Attend = Callable[["CallFuture", float | None], None]


class CallFuture(torch.futures.Future[Any]):
    """The result of a call, when it comes. `about` says what was called, for error texts."""

    def __init__(self, call: int, to: int, attend: Attend, about: Any) -> None:
        super().__init__()
        self.call = call
        self.to = to
        self._attend = attend
        self._fate = _Fate(about)

    @property
    def about(self) -> Any:
        return self._fate.about

    def wait(self, timeout: float | None = None) -> Any:
        """The result.

        Raises:
            TimeoutError: it did not come in time. The call goes on; wait again if you like.
            Exception: what the call raised.
        """
        self._fate.seen = True
        if not self.done():
            deadline = None if timeout is None else time.monotonic() + timeout
            self._attend(self, deadline)
            if not self.done():
                raise TimeoutError(f"{self.about}: no result after {timeout or 0:g} s")
        return super().wait()

    def value(self) -> Any:
        self._fate.seen = True
        return super().value()

    def then(self, callback: Callable[[Any], Any]) -> torch.futures.Future[Any]:
        self._fate.seen = True
        return super().then(callback)

    def add_done_callback(self, callback: Callable[[Any], Any]) -> None:
        self._fate.seen = True
        super().add_done_callback(callback)

    def on_done(self, wake: Callable[[], None]) -> None:
        """Be woken at the end, without having looked at the result."""
        super().add_done_callback(lambda _: wake())

    def set_exception(self, result: Any) -> None:
        self._fate.error = result
        super().set_exception(result)

    def __await__(self) -> Generator[Any, None, Any]:
        self._fate.seen = True
        return _awaited(self).__await__()

    def __repr__(self) -> str:
        state = "done" if self.done() else "pending"
        return f"<CallFuture of {self.about}: {state}>"


class _Fate:
    """What became of a call; lives exactly as long as its future."""

    __slots__ = ("about", "error", "seen")

    def __init__(self, about: Any) -> None:
        self.about = about
        self.error: BaseException | None = None
        self.seen = False

    def __del__(self) -> None:
        if self.error is not None and not self.seen:
            log.warning("%s failed and nobody looked: %r", self.about, self.error)


async def _awaited(future: CallFuture) -> Any:
    """The result, without blocking the event loop."""
    loop = asyncio.get_running_loop()
    done = asyncio.Event()

    def wake(_: Any) -> None:
        try:
            loop.call_soon_threadsafe(done.set)
        except RuntimeError:
            pass  # the loop was closed: nobody awaits any more

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


class Loops:
    """One asyncio event loop of a worker, in a thread of its own, for `async def` functions."""

    def __init__(self, host: Callable[[Callable[[], object]], None]) -> None:
        self._host = host
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()

    def run(self, coroutine: Any) -> torch.futures.Future[Any]:
        """Start a coroutine; its result as a future."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        asyncio_future = asyncio.run_coroutine_threadsafe(coroutine, self._running())
        asyncio_future.add_done_callback(lambda done: settle(future, done.result))
        return future

    def close(self) -> None:
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is not None:
            loop.call_soon_threadsafe(loop.stop)

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                loop = self._loop
                self._host(lambda: _run_loop(loop))
            return self._loop


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
