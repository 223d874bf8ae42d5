"""An agent whose messages fail or are late on purpose, by the names torch has for them.

Which kinds of ours they stand for is in `_KINDS`. A message of a kind that is to fail does so the
first few times it is sent; those that are said until answered (`_RETRIED`) get through in the end.
What a call is (a Python function, or an operator or scripted function) its bytes do not tell; so
the agent says it before it sends (`_Speaking`), on the same thread.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from ..._autograd.messages import RELEASE
from ..._rref.messages import ADOPT, CREATE, FETCH, INVOKE, NOTES
from ..._transport.base import Card, IsOver, Transport
from ..._transport.faulty import WrappedTransport
from ..._wire.frames import Frame, Parcel
from ..._wire.messages import CALL
from ...errors import GradwireError
from ...threads import Executor
from . import constants
from .agents import TensorPipeAgent
from .errors import RpcTimeout
from .options import TensorPipeRpcBackendOptions
from .references import RRef
from .scripts import builtin_name, is_scripted

_KINDS = {
    CALL: "{}_CALL",
    INVOKE: "{}_CALL",
    CREATE: "{}_REMOTE_CALL",
    FETCH: "{}_RREF_FETCH_CALL",
    ADOPT: "RREF_FORK_REQUEST",
    NOTES: "RREF_USER_DELETE",
    RELEASE: "CLEANUP_AUTOGRAD_CONTEXT_REQ",
}
_RETRIED = (ADOPT, NOTES, RELEASE)
_MESSAGES_TO_FAIL = (
    "RREF_FORK_REQUEST",
    "RREF_CHILD_ACCEPT",
    "RREF_USER_DELETE",
    "CLEANUP_AUTOGRAD_CONTEXT_REQ",
)


class FaultyTensorPipeRpcBackendOptions(TensorPipeRpcBackendOptions):
    """Which messages fail, how often each, and which are late, by so many seconds."""

    def __init__(
        self,
        *,
        num_worker_threads: int = constants.DEFAULT_NUM_WORKER_THREADS,
        rpc_timeout: float = constants.DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = constants.DEFAULT_INIT_METHOD,
        messages_to_fail: list[str] | None = None,
        messages_to_delay: dict[str, float] | None = None,
        num_fail_sends: int = 0,
    ) -> None:
        super().__init__(
            num_worker_threads=num_worker_threads,
            rpc_timeout=rpc_timeout,
            init_method=init_method,
        )
        default = list(_MESSAGES_TO_FAIL)
        self.messages_to_fail = (
            default if messages_to_fail is None else messages_to_fail
        )
        self.messages_to_delay = dict(messages_to_delay or {})
        self.num_fail_sends = num_fail_sends


class _Speaking(threading.local):
    """What this thread sends: `PYTHON` or `SCRIPT`."""

    language = "PYTHON"


_speaking = _Speaking()


@contextmanager
def _speak(function: Any) -> Iterator[None]:
    is_script = is_scripted(function) or builtin_name(function) is not None
    _speaking.language = "SCRIPT" if is_script else "PYTHON"
    try:
        yield
    finally:
        _speaking.language = "PYTHON"


class FaultyTensorPipeAgent(TensorPipeAgent):
    """One worker in this process, badly connected."""

    def __init__(
        self,
        store: Store,
        name: str,
        rank: int,
        world_size: int | None,
        options: FaultyTensorPipeRpcBackendOptions,
    ) -> None:
        around = partial(FaultySockets, options=options)
        super().__init__(store, name, rank, world_size, options, around)

    def call_sync(
        self, to: Any, func: Any, args: Any, kwargs: Any, timeout: float
    ) -> Any:
        return self.call_async(to, func, args, kwargs, timeout).wait()

    def call_async(
        self, to: Any, func: Any, args: Any, kwargs: Any, timeout: float
    ) -> Any:
        with _speak(func):
            return super().call_async(to, func, args, kwargs, timeout)

    def remote(self, to: Any, func: Any, args: Any, kwargs: Any, timeout: float) -> Any:
        with _speak(func):
            rref = super().remote(to, func, args, kwargs, timeout)
        rref.made_by = func
        return rref

    def fetch(self, rref: RRef[Any], timeout: float | None) -> Any:
        with _speak(rref.made_by):
            return super().fetch(rref, timeout)


class FaultySockets(WrappedTransport):
    """Another transport, with faults."""

    def __init__(
        self,
        inner: Transport,
        executor: Executor,
        *,
        options: FaultyTensorPipeRpcBackendOptions,
    ) -> None:
        super().__init__(inner, executor)
        self._options = options
        self._failed: Counter[tuple[int, str, bytes]] = Counter()

    def post(
        self, to: Card, call: int, parcel: Parcel, deadline: float | None = None
    ) -> None:
        delay = self._fail_or_delay(to, parcel)
        send = partial(self._inner.post, to, call, parcel)
        if delay:
            self._executor.call_at(time.monotonic() + delay, _quietly(send))
        else:
            send()

    def exchange(
        self,
        to: Card,
        call: int,
        parcel: Parcel,
        *,
        deadline: float | None,
        is_over: IsOver | None = None,
    ) -> Frame:
        delay = self._fail_or_delay(to, parcel)
        if delay:
            left = delay if deadline is None else deadline - time.monotonic()
            with self._executor.waiting():
                threading.Event().wait(min(delay, max(left, 0.0)))
        return self._inner.exchange(
            to, call, parcel, deadline=deadline, is_over=is_over
        )

    def _fail_or_delay(self, to: Card, parcel: Parcel) -> float:
        """Seconds by which a message is delayed; raises what it fails with."""
        kind = _KINDS.get(parcel.kind, "").format(_speaking.language)
        self._fail_some(to, kind, parcel)
        return self._options.messages_to_delay.get(kind, 0.0)

    def _fail_some(self, to: Card, kind: str, parcel: Parcel) -> None:
        if kind not in self._options.messages_to_fail:
            return
        key = to.id, kind, bytes(parcel.body)
        if self._failed[key] < self._options.num_fail_sends:
            self._failed[key] += 1
            if parcel.kind in _RETRIED:
                raise RpcTimeout(f"{kind} (failed intentionally)", to.name, 0.0)
            raise GradwireError(f"send attempt failed intentionally for {kind}")


def _quietly(send: Callable[[], None]) -> Callable[[], None]:
    def late() -> None:
        try:
            send()
        except (GradwireError, OSError):
            pass  # the waiter for the response was told

    return late
