"""The driver of the references layer: users' operations on references, on one worker.

The values that this worker owns are in its `OwnedValues`, its forks of others' values in its
`HeldForks`; its `Notifier` sends the notes that both produce. This file converts users' operations
into messages to owners, and answers those.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from .._rpc import torch_modes
from .._rpc.agent import Agent
from .._rpc.caller import prepare
from .._rpc.function_runner import Later, Runner
from .._rpc.futures import CallFuture, settle, wait_after
from .._rpc.members import Peer
from .._wire.messages import Call
from ..errors import CallTimeout, GradwireError, NotAllowedError, ProtocolError
from ..ids import WorkerInfo
from ..options import Options
from ..threads import Executor
from .adoption import Adoptions
from .debug_info import debug_info, describe_held
from .held_forks import Creation, Fork, HeldForks
from .ledger import Holding
from .messages import (
    CREATE,
    CREATE_NOW,
    FETCH,
    INVOKE,
    NOTES,
    RECALL,
    Create,
    CreateNow,
    Fetch,
    Invoke,
    Notes,
    Recall,
    freed,
    maker_of,
)
from .notifier import Notifier
from .owned_values import OwnedValue, OwnedValues, part_of
from .reference import Core, RRef, calling_line
from .serialization import ReferenceCarrier

log = logging.getLogger("gradwire")


class References:
    """References of and to one worker."""

    def __init__(
        self,
        agent: Agent,
        *,
        executor: Executor,
        runner: Runner,
        options: Options,
        kind: type[RRef[Any]] = RRef,
    ) -> None:
        self.me: WorkerInfo = agent.me.info
        self.owned_values = OwnedValues(self.me, are_open=options.open_references)
        self.held_forks = HeldForks(self.me.id, self.owned_values)
        self.notifier = Notifier(agent, self.held_forks, executor.host)
        self._agent = agent
        self._executor = executor
        self._runner = runner
        self._timeout = options.timeout
        self._kind = kind
        self._leaked: dict[Holding, str] = {}  # what is held at quiescence
        self.lent: list[dict[str, Any]] = []  # and what others hold at that time
        agent.handle(CREATE, Create, self._create, in_haste=False, in_context=True)
        agent.handle(CREATE_NOW, CreateNow, self._create_now, in_context=True)
        agent.handle(INVOKE, Invoke, self._invoked, in_context=True)
        agent.handle(FETCH, Fetch, self._fetched, in_context=True)
        agent.handle(NOTES, Notes, self._noted)
        agent.handle(RECALL, Recall, self._recalled)
        agent.gone.subscribe(self._worker_gone)
        self.carrier = ReferenceCarrier(
            agent,
            self.owned_values,
            self.held_forks,
            Adoptions(executor),
            lambda core: kind.over(core, self),
        )

    def __repr__(self) -> str:
        return f"<References of {self.me.name}: {self.owned_values!r}, {self.held_forks!r}>"

    # Users' operations

    def own(self, value: Any) -> OwnedValue:
        """Register a value of this worker.

        Raises:
            ClosedError: it is shut down.
        """
        self._agent.peer(self.me.id)
        owned = self.owned_values.new()
        owned.set(value)
        return owned

    def remote(
        self,
        to: Any,
        func: Any,
        args: Any,
        kwargs: Any,
        timeout: float | None,
        device_map: Mapping[Any, Any] | None = None,
    ) -> RRef[Any]:
        """A reference to the result of a function on another worker."""
        peer = self._agent.peer(to)
        core = self._new_core(peer)
        create = prepare(func, args, kwargs, device_map, Create, (core.id,))
        return self._start(core, create, peer, timeout)

    def fetch(self, core: Core, timeout: float | None, part: str = "value") -> Any:
        """The value, or its type."""
        if isinstance(core, OwnedValue):
            seconds = self._timeout if timeout is None else timeout
            return part_of(core.wait(self._executor, seconds), part)
        if not core.is_confirmed:
            return self._fetch_new(core, timeout, part)
        message = Fetch(core.id, core.holding.fork, part, not core.is_registered)
        value = self._agent.ask(core.owner.id, message, timeout)
        if core.adoption is not None:
            core.adoption.succeeded()
        return value

    def _fetch_new(self, core: Fork, timeout: float | None, part: str) -> Any:
        """Fetch a value whose creation is unconfirmed; in one message, if that was deferred."""
        caller, creation = self._agent.caller, core.creation
        held = caller.take_held(creation) if creation and part == "value" else None
        if held is not None:
            try:
                return caller.ask_held(held, CREATE_NOW, timeout)
            except Exception as error:
                if not isinstance(error, CallTimeout):  # then the owner has been told
                    self._creation_failed(core.holding, error)
                raise
        # Not on a leased connection: it would overtake the call that creates the value.
        message = Fetch(core.id, core.holding.fork, part)
        try:
            seconds = self._until_made(creation, timeout)
            return self._agent.request(core.owner.id, message, seconds).wait()
        except GradwireError:
            _ = core.is_confirmed  # if it was never created, raises why
            raise

    def _until_made(self, creation: CallFuture | None, timeout: float | None) -> float:
        """How long to wait for a value: no longer than its creation may take."""
        seconds = self._timeout if timeout is None else timeout
        if creation is None or creation.deadline == float("inf"):
            return seconds
        left = max(creation.deadline - time.monotonic(), 0.001)
        return min(seconds, left) if seconds else left

    def fetch_async(
        self, core: Core, timeout: float | None, part: str = "value"
    ) -> CallFuture:
        """The future of the value, or of its type."""
        if isinstance(core, OwnedValue):
            return self._fetch_here(core, timeout, part)
        _ = core.is_confirmed  # if its creation has failed, raises why
        message = Fetch(core.id, core.holding.fork, part, not core.is_registered)
        return _keeping(core, self._agent.request(core.owner.id, message, timeout))

    def _fetch_here(
        self, owned: OwnedValue, timeout: float | None, part: str
    ) -> CallFuture:
        future = self._agent.caller.local_future(Fetch, self.me.name)
        completes = threading.Lock()  # acquired by the thread that completes it

        def end(look: Callable[[], Any]) -> None:
            if completes.acquire(blocking=False):
                settle(future, look)

        owned.when_ready(lambda: end(lambda: part_of(owned.get(), part)))
        if timeout:
            late = partial(owned.give_up, timeout)
            self._executor.call_at(time.monotonic() + timeout, lambda: end(late))
        return future

    def invoke(
        self, core: Core, method: str, args: Any, kwargs: Any, timeout: Any, **more: Any
    ) -> Any:
        """Call a method of the value; returns its result. `more`: what to run meanwhile."""
        call, peer = _invocation(core, method, args, kwargs), core.owner.id
        caller, to = self._agent.caller, self._agent.peer(peer)
        if isinstance(core, Fork) and core.is_confirmed:
            return caller.call_sync(to, call, timeout, **more)
        future = caller.call_async(
            to, call, timeout
        )  # on a leased connection it would overtake its creation
        return wait_after(more.get("meanwhile"), future)

    def invoke_async(
        self, core: Core, method: str, args: Any, kwargs: Any, timeout: float | None
    ) -> CallFuture:
        """Call a method of the value; returns a future of its result."""
        call, peer = _invocation(core, method, args, kwargs), core.owner.id
        caller = self._agent.caller
        return _keeping(core, caller.call_async(self._agent.peer(peer), call, timeout))

    def invoke_remote(
        self, core: Core, method: str, args: Any, kwargs: Any, timeout: float | None
    ) -> RRef[Any]:
        """Call a method of the value; returns a reference to its result."""
        peer = self._agent.peer(core.owner.id)
        made = self._new_core(peer)
        ids = (made.id, core.id, _fork_of(core))
        create = Create(method, args, kwargs, torch_modes.capture(), ids)
        return self._start(made, create, peer, timeout, keep=core)

    def creation(self, core: Core) -> CallFuture:
        """Done when the owner has the value."""
        made = core.creation if isinstance(core, Fork) else None
        if made is not None:
            return made
        if isinstance(core, OwnedValue):
            return self._fetch_here(core, None, "nothing")
        future = self._agent.caller.local_future(Create, core.owner.name)
        future.set_result(None)
        return future

    def _new_core(self, owner: Peer) -> Core:
        if owner.id == self.me.id:
            return self.owned_values.new()
        return self.held_forks.create(owner.card.info, calling_line())

    def _start(
        self,
        core: Core,
        create: Call,
        peer: Peer,
        timeout: float | None,
        keep: Core | None = None,
    ) -> RRef[Any]:
        """Start creating a value; returns a reference. Arguments are kept alive meanwhile."""
        of = core.holding if isinstance(core, Fork) else core
        failed = partial(self._creation_failed, of)
        # The value is likely to be requested next: send both together.
        make = partial(Creation, failed, self._kind.explain)
        creation = self._agent.caller.call_soon(peer, create, timeout, make)
        if isinstance(core, Fork):
            core.creation = creation
        _keeping(keep, creation)
        return self._kind.over(core, self)

    # Requests from others

    def _create(self, sender: int, message: Create) -> Later | None:
        owned = self._make(sender, message)
        return None if owned.is_ready else Later(self._when_ready(owned, "nothing"))

    def _create_now(self, sender: int, message: Create) -> Any:
        owned = self._make(sender, message)
        if owned.is_ready:
            return owned.give()
        return Later(self._when_ready(owned, "value"))

    def _make(self, sender: int, message: Create) -> OwnedValue:
        number, *of = message.ids
        if maker_of(number) != sender:
            raise ProtocolError(
                f"worker {sender} sent the invalid value number {number}"
            )
        owned = self.owned_values.begin(number, sender)
        try:
            if of:
                value = self._runner.run_method(
                    self._target(of, sender), message, sender
                )
            else:
                value = self._runner.run(sender, message)
        except BaseException as error:  # noqa: BLE001 user code
            owned.fail(error)
            return owned
        if type(value) is not Later:
            owned.set(value)
            return owned

        def finished(future: Any) -> None:
            try:
                owned.set(future.value())
            except BaseException as error:  # noqa: BLE001 user code
                owned.fail(error)

        value.future.add_done_callback(finished)
        return owned

    def _invoked(self, sender: int, message: Invoke) -> Any:
        target = self._target(message.ids, sender)
        return self._runner.run_method(target, message, sender)

    def _target(self, ids: Any, sender: int) -> Any:
        """The value whose method is called."""
        number, fork = ids
        return self._find(number, fork, sender).wait(self._executor, 0)

    def _find(self, number: int, fork: int, sender: int) -> OwnedValue:
        """The value, for a worker that it was given to."""
        try:
            return self.owned_values.find(number, fork, sender)
        except NotAllowedError as error:
            self._agent.denied(sender, str(error))
            raise

    def _fetched(self, sender: int, message: Fetch) -> Any:
        if message.adopts and not self.owned_values.adopt(
            message.value, message.fork, sender
        ):
            raise freed(message.value)
        owned = self._find(message.value, message.fork, sender)
        part = message.part
        if owned.is_ready:
            return part_of(owned.give(), part)
        return Later(self._when_ready(owned, part))

    def _when_ready(self, owned: OwnedValue, part: str) -> CallFuture:
        """The future of the requested part of a value."""
        future = self._agent.caller.local_future(Fetch, self.me.name)
        owned.when_ready(lambda: future.set_result(part_of(owned.give(), part)))
        return future

    def _noted(self, sender: int, notes: Notes) -> None:
        self.owned_values.release(notes.released, sender)
        for token in notes.received:
            self.held_forks.child_settled(token, arrived=True)
        for value, why in notes.failed:
            self.owned_values.creation_failed(value, why)

    def _recalled(self, sender: int, recall: Recall) -> bool | None:
        key, underway = (recall.owner, recall.fork), self._agent.caller.underway(sender)
        return self.held_forks.fork_asked(sender, recall.token, key, underway)

    def _creation_failed(self, of: Holding | OwnedValue, error: Exception) -> None:
        if isinstance(of, OwnedValue):
            of.fail(self._kind.explain(error))
        elif not (isinstance(error, CallTimeout) and self._kind.keeps_late_values):
            self.held_forks.creation_failed(of, f"{type(error).__name__}: {error}")

    def _worker_gone(self, worker: WorkerInfo) -> None:
        self.owned_values.worker_gone(worker)
        self.held_forks.worker_gone(worker.id)

    # Shutdown

    @property
    def unconfirmed(self) -> int:
        """Values whose creation has not been confirmed."""
        return sum(isinstance(a, Creation) for a in self._agent.caller.answers())

    @property
    def started(self) -> int:
        """How many notes about references were sent from here."""
        return self.notifier.said

    def wait_quiet(self, deadline: float | None = None) -> bool:
        """Wait until all notes are delivered and no reference is in transit; whether it is so."""
        if self.held_forks.holdings():
            gc.collect()  # those in cycles
        while True:
            self.notifier.tidy(ask_until=float("inf"))
            unanswered = self.notifier.unanswered
            for answer in unanswered:
                left = None if deadline is None else deadline - time.monotonic()
                try:
                    answer.wait(left)
                except (GradwireError, TimeoutError):
                    pass  # the next round retries
            if not unanswered and self.held_forks.is_quiet:
                self._note_leaks()
                return True
            if deadline is not None and time.monotonic() >= deadline:
                return False
            if not unanswered:
                time.sleep(0.005)  # a receiver will tell us, or can be asked again

    def _note_leaks(self) -> None:
        """Record what is held now, including values of workers that have already left."""
        self.lent = self.owned_values.lent()
        gone = [h for h in self._leaked if self._agent.members.get(h.owner) is None]
        left = {holding: self._leaked[holding] for holding in gone}
        self._leaked = left | self.held_forks.holdings()

    def let_go_of_all(self) -> None:
        """Release everything held here, even with live handles."""
        held = self.held_forks.holdings()
        self.held_forks.handles_dropped([(h.owner, h.fork) for h in held])

    def report_leaks(self) -> None:
        """Log the references that are still held at the end of the world."""
        if self._leaked:
            log.warning(
                "worker %r still holds %s at shutdown: %s",
                self.me.name,
                f"{count} references"
                if (count := len(self._leaked)) > 1
                else "a reference",
                describe_held(self._leaked, self._agent.members.name),
            )

    def debug_info(self) -> dict[str, Any]:
        return debug_info(self.owned_values, self.held_forks, self._agent.members.name)

    def close(self) -> None:
        self.notifier.close()
        self.owned_values.close()


def _invocation(core: Core, method: str, args: Any, kwargs: Any) -> Invoke:
    return Invoke(
        method, args, kwargs, torch_modes.capture(), (core.id, _fork_of(core))
    )


def _fork_of(core: Core) -> int:
    """The fork for a method call, 0 at the owner; raises why there is no value, if known."""
    if isinstance(core, OwnedValue):
        return 0
    _ = core.is_confirmed
    core.register()
    return core.holding.fork


def _keeping(core: Core | None, future: CallFuture) -> CallFuture:
    """The future of a call that uses a fork, which it keeps alive until the response."""
    future.keep = core
    return future
