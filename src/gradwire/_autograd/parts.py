"""What the rounds of one pass on one worker share, and how it ends if it fails.

Its lock guards the state of the pass, and is never held while anything runs or is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from .._rpc.futures import CallFuture
from ..errors import WorkerLostError
from ..locks import OwnedLock
from ..threads import Bell, Executor
from . import engine
from .contexts import Context, Contexts, Numbers, owner, unknown
from .failures import describe
from .messages import Abort, Failed, Header, pack_failed
from .nodes import Crossing, Gradients
from .pass_state import PassState
from .segment_runner import SegmentRunner, Start
from .segments import Plan

_NOWHERE = Start()


class Host(Protocol):
    """What a part needs of its worker: `service.py`."""

    me: int
    executor: Executor
    numbers: Numbers
    contexts: Contexts
    pickles: bool

    def request(self, to: int, message: Any) -> CallFuture:
        """Send a message, with no limit on how long its response may take."""

    def tell(self, to: int, message: Any) -> None:
        """Send a message whose response is not needed."""

    def ask(self, to: int, message: Any, is_over: Callable[[], bool]) -> Any:
        """Send a message and wait for its response, or until it is no longer wanted."""


class Round(Protocol):
    """What follows from one request (`pass_driver.py`)."""

    asker: int | None

    def let_go(self) -> set[int]:
        """The pass has failed: respond now. Returns the workers that owe us a response."""


class Ended(Exception):
    """The pass has failed, and the error is known."""


class Part:
    """One pass on one worker."""

    def __init__(
        self,
        host: Host,
        context: Context,
        header: Header,
        plan: Plan,
        start: Start | None = None,
    ) -> None:
        """With the lock of the context. `start`: where the pass begins, on the leader."""
        self.host = host
        self.context = context
        self.header = header
        self.failed: Failed | None = None
        self.error: BaseException | None = None
        """What failed, if it failed here."""
        self.is_profiled = engine.is_profiled()
        self.runner = SegmentRunner(
            host.contexts, context, plan, start or _NOWHERE, header.flags
        )
        self.state = PassState(plan)
        self.lock = OwnedLock()
        self.gradients: dict[int, Sequence[Tensor | None]] = {}
        """What came for messages and was not run yet."""
        self.rounds: list[Round] = []
        """Those under way."""
        self.parked: dict[int, int] = {}
        """On the leader: how many messages are parked, by worker."""
        self._bells: dict[int, Bell] = {}

    @property
    def is_under_way(self) -> bool:
        return bool(self.rounds)

    def has_ended(self) -> bool:
        return self.failed is not None

    def check(self) -> None:
        """Stop here if the pass has failed meanwhile, as it has if its context has ended.

        Raises:
            Ended: it has.
        """
        if self.failed is not None:
            raise Ended

    def collect(self, send: Crossing) -> Gradients:
        """The gradients for a message; waits for them."""
        bell = None
        with self.lock:
            if self.state.fate(send.id) is None and self.failed is None:
                bell = self._bells[send.id] = Bell()
        if bell is not None:
            with self.host.executor.waiting():
                bell.wait(None)
        self.check()
        gradients = self.gradients.pop(send.id, None)
        return (None,) * send.count if gradients is None else tuple(gradients)

    def wake(self, send: int) -> None:
        """The outcome of a message is known."""
        with self.lock:
            bell = self._bells.pop(send, None)
        if bell is not None:
            bell.ring()

    # How it ends, unless it succeeds

    def fail(self, error: BaseException) -> None:
        """Report an error here."""
        if not isinstance(error, Ended):
            host = self.host
            self.end(describe(error, host.me, pickles=host.pickles), error)

    def end(self, failed: Failed, error: BaseException | None = None) -> None:
        """The pass has failed with this error: release all that wait, here and elsewhere."""
        with self.lock:
            if self.failed is not None:
                return
            self.failed, self.error = failed, error
            bells, self._bells = self._bells, {}
            self.gradients.clear()
        for bell in bells.values():
            bell.ring()
        parked = self.parked.copy()  # atomic: responses still arrive
        asked = {worker for worker, count in parked.items() if count}
        for each in list(self.rounds):
            asked |= each.let_go()
        context, number = self.header[:2]
        for worker in asked - {self.host.me}:
            self.host.tell(worker, Abort(context, number, pack_failed(failed)))

    def released(self) -> None:
        """The context has ended."""
        if self.rounds:
            self.fail(unknown(self.context.id))

    def worker_gone(self, worker: int, name: str) -> None:
        """End it if it cannot go on without a worker."""
        needed = {each.asker for each in list(self.rounds)} | {
            owner(self.header.number)
        }
        sends = self.context.sends
        with self.lock:
            needed |= {sends[n].crossing.worker for n in self._bells if n in sends}
        if worker in needed:
            reason = "it is needed by a backward pass"
            self.fail(WorkerLostError(name, reason))
