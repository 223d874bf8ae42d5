"""The driver of the calls layer: sends calls, runs those that arrive, completes futures.

Its state is in pure tables (`calls.py`, `collectives.py`, `members.py`); this file moves messages
between them, the transport and the executor. Its lock guards the table of calls and is never held
while sending or running user code.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch

from .. import streams
from .._transport.base import Card, Respond, Transport
from .._wire.device_maps import NoMapError
from .._wire.frames import Frame, Parcel
from .._wire.functions import describe
from .._wire.messages import Call
from ..errors import (
    ClosedError,
    GradwireError,
    NotAllowedError,
    ProtocolError,
    StaleReferenceError,
    WorkerLostError,
)
from ..events import Event
from ..ids import WorkerInfo
from ..options import Options
from ..threads import Executor
from . import torch_modes
from .caller import Caller
from .function_runner import Later, Runner
from .futures import CallFuture, Failed
from .interceptors import InterceptedCodec
from .members import Members, Peer

log = logging.getLogger("gradwire")

Handler = Callable[[int, Any], Any]
InContext = Callable[[Any, Handler, int, Any], Any]
EndContext = Callable[[int, int], None]


class Directory(Protocol):
    """Where workers that join later are looked up (`_transport/rendezvous.py`)."""

    def find(self, name: str) -> Card | None: ...

    def card(self, number: int) -> Card | None: ...

    def was_here(self, name: str) -> bool: ...


class Agent:
    """Calls from and to one worker."""

    no_map = ""
    """The error for a tensor on a device that no device map lists; empty: it is sent."""

    def __init__(
        self,
        card: Card,
        *,
        options: Options,
        executor: Executor,
        transport: Transport,
        codec: InterceptedCodec,
        runner: Runner,
    ) -> None:
        self.me = card
        self.members = Members()
        self.joined: Event[WorkerInfo] = Event("joined")
        self.gone: Event[WorkerInfo] = Event("gone")
        self.refusals: Event[dict[str, str]] = Event("refusals")
        """For the audit log: of strangers, and of members' requests (for functions: the runner)."""
        self.directory: Directory | None = None
        """None in a world of fixed size: no worker joins later."""
        self.caller = Caller(
            card.id,
            options=options,
            executor=executor,
            transport=transport,
            codec=codec,
        )
        self._options = options
        self._executor = executor
        self._transport = transport
        self._codec = codec
        self._runner = runner
        self._handlers: dict[type, Handler] = {Call: runner.run}
        self._patient, self._last = set[type](), set[type]()
        self._in_context: InContext | None = None
        self._end_context: EndContext | None = None
        self._peers: dict[int, Peer] = {}
        self._closed = False
        self.before_each: Callable[[], object] | None = None
        """Called in each thread before it makes a request or runs one."""
        self.run_count = 0
        """Requests of others that were run here, those of upper layers too."""

    def __repr__(self) -> str:
        return f"<Agent of {self.me.name}: {self.caller.in_flight} calls in flight>"

    # Members

    def add_member(self, card: Card) -> None:
        """Add a worker to the members of the world."""
        if self.members.add(card):
            plain = self._options.allow is not None
            self._peers[card.id] = Peer(card, self.me, plain, self.no_map)
            self.joined.fire(card.info)

    def peer(self, to: str | int | WorkerInfo) -> Peer:
        """The peer that `to` names.

        Raises:
            ValueError, TypeError, WorkerLostError: there is none.
        """
        if self._closed:
            raise ClosedError(f"worker {self.me.name!r} is shut down")
        if self.before_each is not None:
            self.before_each()
        if streams.in_use:
            streams.publish()
        try:
            card = self.members.find(to)
        except (ValueError, WorkerLostError) as error:
            newcomer = self._look_up(to)
            if newcomer is not None:
                self.add_member(newcomer)
            elif isinstance(error, ValueError) and self._was_here(to):
                reason = "it was gone before this worker came"
                raise WorkerLostError(str(to), reason) from None
            if newcomer is None or self.members.get(newcomer.id) is None:
                raise  # there is none, or the directory still lists the lost one
            card = newcomer
        return self._peers[card.id]

    def _look_up(self, to: str | int | WorkerInfo) -> Card | None:
        if self.directory is None:
            return None
        if isinstance(to, str):
            return self.directory.find(to)
        return self.directory.card(to if isinstance(to, int) else to.id)

    def _was_here(self, to: str | int | WorkerInfo) -> bool:
        """Whether a worker that this one has never seen was ever in the world."""
        if self.directory is None or not isinstance(to, str):
            return False
        return self.directory.was_here(to)

    def watch_over_all(self) -> None:
        """Connect to every worker, so that the loss of any of them is noticed."""
        for card in self.members.cards():
            if card.id != self.me.id:
                self._executor.submit(partial(self._transport.watch, card))

    def _introduced(self, worker: int) -> Peer | None:
        """Look up a new worker whose first request came before the news that it joined."""
        card = self._look_up(worker)
        if card is not None:
            self.add_member(card)
        return self._peers.get(worker)

    def knows(self, worker: int) -> bool:
        return worker in self._peers

    def name_of(self, worker: int) -> str | None:
        peer = self._peers.get(worker) or self._introduced(worker)
        return None if peer is None else peer.name

    def refused(self, origin: str, reason: str) -> None:
        self.refusals.fire({"origin": origin, "reason": reason})

    def denied(self, member: int, reason: str) -> None:
        """A member's request was not allowed."""
        self.refusals.fire({"by": self.members.name(member), "reason": reason})

    # Calls from here

    def call_sync(self, to: Any, call: Call, timeout: float | None) -> Any:
        return self.caller.call_sync(self.peer(to), call, timeout)

    def call_async(self, to: Any, call: Call, timeout: float | None) -> CallFuture:
        return self.caller.call_async(self.peer(to), call, timeout)

    def request(
        self, to: int, message: Any, timeout: float | None = None
    ) -> CallFuture:
        """Send an upper layer's message; returns the future of its response."""
        peer = self.peer(to)
        parcel = self._codec.message(message, peer.manner)
        return self.caller.post(peer, parcel, type(message), timeout)

    def ask(
        self,
        to: int,
        message: Any,
        timeout: float | None = None,
        is_over: Callable[[], bool] | None = None,
        meanwhile: Callable[[], object] | None = None,
    ) -> Any:
        """Send an upper layer's message and wait for its response; `meanwhile` runs while waiting.

        Raises:
            CallTimeout: no response in time; or, with `is_over`, soon after it is no longer wanted.
        """
        peer = self.peer(to)
        parcel = self._codec.message(message, peer.manner)
        parcel.meanwhile = meanwhile
        return self.caller.exchange(peer, parcel, type(message), timeout, is_over)

    def handle(
        self,
        kind: int,
        message: type,
        handler: Handler,
        *,
        in_haste: bool = True,
        may_be_last: bool = False,
        in_context: bool = False,
    ) -> None:
        """Register `handler(sender, message)` for an upper layer's message; it returns the
        response.

        Unless they are urgent, responses are deferred for a moment to be batched. So are those to
        bursts of requests, unless this worker may leave right after them. `in_context`: the message
        belongs to the context in which it is sent, and is handled in it.
        """
        self._codec.register(kind, message, in_context=in_context)
        self._handlers[message] = handler
        if not in_haste:
            self._patient.add(message)
        if may_be_last:
            self._last.add(message)

    def run_in_context(self, run: InContext, end: EndContext) -> None:
        """Handle messages of a context through `run(context, handler, sender, message)`.

        `end(context, sender)` is called when the sender has reported the end of a context.
        """
        self._in_context = run
        self._end_context = end

    # Calls from others

    def serve(self, sender: int, frame: Frame, respond: Respond) -> None:
        """Run a request of another worker, or of this one. Duplicates are dropped.

        Raises:
            ProtocolError: the sender is not in this world.
        """
        if streams.in_use:
            streams.reset()
        peer = self._peers.get(sender) or self._introduced(sender)
        if peer is None:
            raise ProtocolError(f"worker {sender} is unknown here")
        if not peer.is_new(frame.call):
            return
        if frame.refused:
            respond(self._over_quota(peer, frame.refused))
            return
        self.run_count += 1
        if self.before_each is not None:
            self.before_each()
        message = value = None
        try:
            message = self._opened(frame, sender)
            frame.area = None
            handler = self._handlers[type(message)]
            if frame.context is None or self._in_context is None:
                value = handler(sender, message)
            else:
                value = self._in_context(frame.context, handler, sender, message)
        except BaseException as error:  # noqa: BLE001 user code
            parcel: Parcel | None = self._codec.failure(error, peer.manner)
        else:
            if type(value) is Later:
                _settle(frame)
                self._respond_later(peer, message, value, frame.context, respond)
                parcel = None
            else:
                parcel = self._result(peer, message, value, frame.context)
        message = value = None  # their memory is freed before the response is sent
        if parcel is not None and not self._closed:
            if frame.waits:
                _settle(frame)
            respond(parcel)  # if closed, the response is that this worker has left
        if frame.over and self._end_context is not None:  # nobody waits for that
            self._end_context(frame.over, sender)

    def _opened(self, frame: Frame, sender: int) -> Any:
        try:
            return self._codec.open(frame, sender)
        except NotAllowedError as error:
            self.denied(sender, str(error))
            raise

    def _over_quota(self, peer: Peer, why: str) -> Parcel:
        if peer.may_tell_of_quota():
            self.denied(peer.id, why)
        error = GradwireError(f"worker {self.me.name!r}: {why}")
        return self._codec.failure(error, peer.manner)

    def complete(self, sender: int, frame: Frame) -> None:
        """Take the response to a posted request."""
        peer = self._peers.get(sender) or self._introduced(sender)
        if peer is not None:
            self.caller.complete(peer, frame)

    def _respond_later(
        self, peer: Peer, message: Any, later: Later, context: Any, respond: Respond
    ) -> None:
        """Let the thread that completes a future send the response."""

        def finished(future: Any) -> None:
            with streams.for_others():  # a user's thread may complete it on another
                try:
                    parcel = self._result(peer, message, future.value(), context)
                except BaseException as error:  # noqa: BLE001 user code
                    parcel = self._codec.failure(error, peer.manner)
                if not self._closed:
                    respond(parcel)

        later.future.add_done_callback(finished)
        if later.begin is not None:
            later.begin()

    def _result(self, peer: Peer, message: Any, value: Any, context: Any) -> Parcel:
        if type(value) is Failed:
            return self._codec.failure(value.error, peer.manner, value.trace)
        given = getattr(message, "modes", None) if context else None
        manner = peer.manner
        if type(message) is Call and message.device_map is not None:
            manner = manner.with_map(message.device_map)
        try:
            if given is None or torch_modes.allow_grad(given):
                parcel = self._codec.result(value, manner, context, message)
            else:
                with torch.no_grad():
                    parcel = self._codec.result(value, manner, context)
        except (WorkerLostError, StaleReferenceError, NoMapError) as error:
            return self._codec.failure(error, peer.manner)
        except Exception as error:  # noqa: BLE001 user code
            what = describe(getattr(message, "function", message))
            kind = type(value)
            refusal = TypeError(
                f"the result of {what}, a {kind.__module__}.{kind.__qualname__}, cannot "
                f"be sent: {type(error).__name__}: {error}"
            )
            refusal.__cause__ = error
            return self._codec.failure(refusal, peer.manner)
        parcel.can_wait = type(message) in self._patient
        parcel.may_be_last = type(message) in self._last
        return parcel

    # Lost and leaving workers

    def lost(self, worker: int, reason: str) -> None:
        if self.members.get(worker) is not None:
            log.warning("lost worker %r: %s", self.members.name(worker), reason)
        self._went(worker, reason)

    def left(self, worker: int) -> None:
        reason = "it has left: it was shut down, or its program ended without shutdown"
        self._went(worker, reason)

    def _went(self, worker: int, reason: str) -> None:
        card = self.members.remove(worker, reason)
        self.caller.worker_gone(worker, reason)
        if card is not None:
            self._transport.forget(worker)
            self.gone.fire(card.info)

    def close(self) -> None:
        """Fail all calls in flight; nothing is sent or run after this."""
        self._closed = True
        self.caller.close()
        self._runner.close()


def _settle(frame: Frame) -> None:
    """Wait for what must complete before a request is answered."""
    for wait in frame.waits:
        wait.settle()
