"""The composition root: builds the layers of one worker and wires them together.

A worker is an object with no globals below it, so several can live in one process.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch

from ._autograd.recording import Recording
from ._autograd.service import Autograd
from ._rpc import device_check
from ._rpc.agent import Agent
from ._rpc.allow import AllowList
from ._rpc.audit import open_audit
from ._rpc.caller import prepare
from ._rpc.collectives import Collectives
from ._rpc.function_runner import Runner
from ._rpc.futures import CallFuture
from ._rpc.interceptors import InterceptedCodec
from ._rpc.messages import GREETING, Greeting
from ._rref.reference import RRef
from ._rref.service import References
from ._transport.base import Card, Transport
from ._transport.keys import Keys
from ._transport.rendezvous import Meeting, Part
from ._transport.sockets import SocketTransport
from ._transport.stores import Place
from ._wire.codec import Codec
from ._wire.device_maps import names_of
from ._wire.frames import Limits
from ._wire.functions import main_fingerprint
from ._wire.pickling import Reducer
from .cores import SharedCores
from .errors import CallTimeout, GradwireError, WorkerLostError
from .ids import WorkerInfo, check_name
from .options import Options
from .threads import Executor, ShorterSwitchInterval

log = logging.getLogger("gradwire")

_LOOK = 1.0  # seconds between looks into the store, which wakes nobody
_CLOSE = 5.0  # seconds for the threads to end; one in a user's function may take longer
_INTERRUPTED = 0.1  # the same after Ctrl-C: who pressed it does not want to wait

MakeTransport = Callable[[Executor], Transport]
Surround = Callable[[Transport, Executor], Transport]
OnThread = Callable[["Worker"], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kinds:
    """The classes a worker is made of, where subclasses of them may take their place."""

    reference: type[RRef[Any]] = RRef
    """The handles that users hold."""
    runner: type[Runner] = Runner
    """Runs what other workers ask for."""
    timeout: type[CallTimeout] = CallTimeout
    """What is raised when a call takes too long."""
    keep_gaps: bool = False
    """Whether small views arrive with their strides (`_wire/dense_tensors.py`)."""
    no_map: str = ""
    """What to say of a tensor of a device without a device map; empty: it may go without."""
    warns: bool = True
    """Whether it is said where gradients are lost (`_autograd/lost_gradients.py`)."""


class Worker:
    """One participant of a world. Use it in a `with` block, or call `shutdown`.

    `gw.init_rpc` and `gw.local_world` make one; the functions of `gradwire` are its methods.

    >>> worker = world[1]  # of a gw.testing.World(2)
    >>> worker.name, worker.id, worker.rpc_sync("worker0", max, (1, 2))
    ('worker1', 1, 2)
    """

    def __init__(
        self,
        name: str,
        number: int,
        *,
        options: Options,
        make_transport: MakeTransport,
        on_thread: OnThread | None = None,
        kinds: Kinds | None = None,
    ) -> None:
        check_name(name)
        maps = names_of(options.device_maps or {})
        self.options = options
        self._allow = None if options.allow is None else AllowList(options.allow)
        self._audit = open_audit(options.audit, name)
        self._on_thread = on_thread
        self._executor = Executor(name, options.threads, on_thread=self._prepare_thread)
        try:
            self._transport = make_transport(self._executor)
        except BaseException:
            self._executor.close()
            raise
        card = self._transport.card(name, number, main_fingerprint())
        self.card = replace(card, device_maps=maps)
        self._meeting: Meeting | None = None
        self._switch_interval = ShorterSwitchInterval(options.switch_interval)
        self._cores = SharedCores(name, options.torch_threads)
        self._closed = False
        self._patience = _CLOSE
        self._told_to_stop = False
        self._woken = threading.Event()
        """Set when a server has to look whether it is to end."""
        self._process = os.getpid()
        self._build_layers(kinds or Kinds())

    def _build_layers(self, kinds: Kinds) -> None:
        """Build what stands on the transport, and wire it together."""
        options = self.options
        codec = Codec(
            Limits(options.max_body, options.max_bulk),
            plain_only=options.allow is not None,
            custom=options.serializer,
            keep_gaps=kinds.keep_gaps,
        )
        self._codec = InterceptedCodec(codec)
        runner = kinds.runner(self._allow, self._executor.host)
        runner.waiting = self._executor.waiting
        runner.audit = self._audit
        self._agent = Agent(
            self.card,
            options=options,
            executor=self._executor,
            transport=self._transport,
            codec=self._codec,
            runner=runner,
        )
        self._agent.no_map = kinds.no_map
        runner.name_of = self._agent.members.name
        self._keep_audit()
        self._agent.caller.timeout_error = kinds.timeout
        self.references = References(
            self._agent,
            executor=self._executor,
            runner=runner,
            options=options,
            kind=kinds.reference,
        )
        self._codec.carry((RRef, kinds.reference), self.references.carrier)
        pickles = self._allow is None
        self.autograd = Autograd(self._agent, self._executor, pickles=pickles)
        self._codec.record_with(Recording(self.autograd, warns=kinds.warns))
        self._agent.run_in_context(self.autograd.contexts.run, self.autograd.release)
        self._collectives = Collectives(self._agent)
        self._agent.handle(GREETING, Greeting, lambda sender, message: None)
        device_check.serve(self._agent)

    def __repr__(self) -> str:
        calls = f"{self._agent.caller.in_flight} calls in flight"
        state = "closed" if self._closed else calls
        return f"<Worker {self.name!r}, id {self.id}: {state}>"

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is KeyboardInterrupt:
            self._patience = _INTERRUPTED
        self.shutdown(graceful=kind is None)

    @property
    def name(self) -> str:
        """Its name: unique among live workers, and free again once this one has left."""
        return self.card.name

    @property
    def id(self) -> int:
        """Its id: the rank in a world of fixed size, otherwise the next number. Never reused."""
        return self.card.id

    @property
    def info(self) -> WorkerInfo:
        """Its name and id, as other workers see them."""
        return self.card.info

    @property
    def is_closed(self) -> bool:
        """Whether it has left the world."""
        return self._closed

    def start(self, cards: list[Card], keys: Keys, meeting: Meeting | None) -> None:
        """Begin to take part in a world of these workers. Raises what `device_check` does."""
        is_elastic = meeting is not None and meeting.is_elastic
        device_check.check_here(self.card, cards, is_elastic=is_elastic)
        self._executor.begin()
        for card in cards:
            self._agent.add_member(card)
        if meeting is not None:
            self._meeting = meeting
            self._agent.directory = meeting
            self._agent.gone.subscribe(lambda info: meeting.leave(info.id))
            self._share_cores(meeting.is_elastic)
        self._transport.start(self.id, keys, self._agent)

    def check_device_maps(self) -> None:
        """Raise ValueError if other workers lack devices that the device maps name."""
        device_check.check_there(self._agent, self.options.join_timeout)

    def _share_cores(self, is_elastic: bool) -> None:
        """Divide the host's cores among its workers; anew whenever one joins or leaves."""

        def divide(_: WorkerInfo | None = None) -> None:
            host = [c for c in self._agent.members.cards() if c.host == self.card.host]
            others = [card.cores for card in host if card.id != self.id]
            self._cores.divide(self.card.cores, others)
            self._transport.share_host(len(host))

        divide()
        if is_elastic:
            self._agent.joined.subscribe(divide)
            self._agent.gone.subscribe(divide)
            self._agent.before_each = self._cores.follow

    def _keep_audit(self) -> None:
        """Write down who comes, goes and is refused; the runner does so for calls."""
        write, agent = self._audit.write, self._agent
        agent.joined.subscribe(lambda info: write("join", who=info.name))
        agent.gone.subscribe(lambda info: write("leave", who=info.name))
        agent.refusals.subscribe(lambda what: write("refuse", **what))

    def _prepare_thread(self) -> None:
        """What each of our threads does first."""
        torch.get_num_threads()  # takes over the process's number (cores.py)
        if self._on_thread is not None:
            self._on_thread(self)

    def greet(self) -> None:
        """Announce this worker to all others of an elastic world."""
        others = [c.id for c in self._agent.members.cards() if c.id != self.id]
        for greeting in [self._agent.request(to, Greeting()) for to in others]:
            try:
                greeting.wait()
            except GradwireError as error:
                log.debug("greeting: %s", error)  # it went while we came

    # Users' operations

    def rpc_sync(
        self,
        to: str | int | WorkerInfo,
        func: Callable[..., Any],
        args: Any = None,
        kwargs: dict[str, Any] | None = None,
        timeout: float | None = None,
        device_map: Mapping[Any, Any] | None = None,
    ) -> Any:
        """Call a function on a worker and wait for its result: `gw.rpc_sync` as this worker."""
        call = prepare(func, args, kwargs, device_map)
        return self._agent.call_sync(to, call, timeout)

    def rpc_async(
        self,
        to: str | int | WorkerInfo,
        func: Callable[..., Any],
        args: Any = None,
        kwargs: dict[str, Any] | None = None,
        timeout: float | None = None,
        device_map: Mapping[Any, Any] | None = None,
    ) -> CallFuture:
        """Call a function on a worker, returning a future: `gw.rpc_async` as this worker."""
        call = prepare(func, args, kwargs, device_map)
        return self._agent.call_async(to, call, timeout)

    def remote(
        self,
        to: str | int | WorkerInfo,
        func: Callable[..., Any],
        args: Any = None,
        kwargs: dict[str, Any] | None = None,
        timeout: float | None = None,
        device_map: Mapping[Any, Any] | None = None,
    ) -> RRef[Any]:
        """Call a function on a worker, returning a reference: `gw.remote` as this worker."""
        return self.references.remote(to, func, args, kwargs, timeout, device_map)

    def debug_info(self) -> dict[str, Any]:
        """What this worker currently owns, holds and waits for."""
        return {
            "calls_in_flight": self._agent.caller.in_flight,
            **self.autograd.debug_info(),
            **self.references.debug_info(),
        }

    def statistics(self) -> dict[str, Any]:
        """Calls and bytes since the start, and the transport to each other worker.

        Calls include Gradwire's own requests, such as the steps of a backward pass.
        """
        links = self._transport.links().items()
        return {
            "calls_made": self._agent.caller.started,
            "calls_run": self._agent.run_count,
            **self._transport.traffic.counts(),
            "links": {self._agent.members.name(to): link for to, link in links},
        }

    def barrier(self, timeout: float | None = None) -> None:
        """Wait until all workers have called this."""
        self._collectives.barrier(timeout)

    def all_gather(self, value: Any, timeout: float | None = None) -> dict[str, Any]:
        """The `value` of every worker, by name. All workers call it, in the same order."""
        return self._collectives.all_gather(value, timeout)

    def get_worker_info(self, name: str | int | None = None) -> WorkerInfo:
        """Name and id of a worker; without a name, those of this one."""
        return self.info if name is None else self._agent.peer(name).card.info

    def get_worker_infos(self) -> list[WorkerInfo]:
        """All workers of the world, in order of ids."""
        return [card.info for card in self._agent.members.cards()]

    def on_join(self, callback: Callable[[WorkerInfo], object]) -> Callable[[], None]:
        """Call `callback(info)` for every worker that joins. Returns an unsubscriber."""
        return self._agent.joined.subscribe(callback)

    def on_leave(self, callback: Callable[[WorkerInfo], object]) -> Callable[[], None]:
        """Call `callback(info)` for every worker that is gone. Returns an unsubscriber."""
        return self._agent.gone.subscribe(callback)

    def count_as_lost(self, number: int, reason: str) -> None:
        """Take the word of one who watches a worker from outside that it is lost."""
        if number != self.id:
            self._agent.lost(number, reason)

    def wait_for(self, name: str, lost: int, deadline: float) -> bool:
        """Wait until the name of a worker that was lost is another's; whether that came in time.

        `deadline` is by `time.monotonic`. Nobody comes back to a world of fixed size.
        """
        came = threading.Event()
        end = self._agent.joined.subscribe(lambda _: came.set())
        try:
            while self._meeting is not None and self._meeting.is_elastic:
                came.clear()
                if self._is_another(name, lost):
                    return True
                if (left := deadline - time.monotonic()) <= 0:
                    return False
                with self.waiting():
                    came.wait(min(left, _LOOK))
        finally:
            end()
        return False

    def _is_another(self, name: str, lost: int) -> bool:
        try:
            return self._agent.peer(name).id != lost  # its loss may not be known yet
        except WorkerLostError:
            return False

    def meet(self, to: int) -> None:
        """Connect to a worker, however long it takes; if it is lost, calls will tell."""
        if to != self.id:
            try:
                self._agent.request(to, Greeting(), 0).wait()
            except GradwireError as error:
                log.debug("meeting worker %d: %s", to, error)

    def waiting(self) -> AbstractContextManager[None]:
        """A context for blocking waits, which do not count against the thread limit."""
        return self._executor.waiting()

    def register_reducer(self, kind: type, reducer: Reducer) -> None:
        """Pickle objects of exactly this type with `reducer` (as `copyreg.pickle` would)."""
        self._codec.register_reducer(kind, reducer)

    def serve(self) -> None:
        """Serve other workers until the world ends or `stop_serving` is called; then leave.

        A world of fixed size ends when all workers shut down. An elastic one ends when those that
        do not serve have shut down; a lost one may come back, and is waited for.
        """
        if self._meeting is not None and self._meeting.is_elastic:
            self._meeting.note(self.name, Part.SERVES)
            self._agent.watch_over_all()
            end = self._agent.gone.subscribe(lambda _: self._woken.set())
            try:
                while not (self._told_to_stop or self._meeting.is_over()):
                    self._woken.wait(_LOOK)
                    self._woken.clear()
            finally:
                end()
        self.shutdown()

    def stop_serving(self) -> None:
        """Make `serve` return.

        Raises:
            GradwireError: the world has a fixed size, and all workers leave together.
        """
        if self._meeting is None or not self._meeting.is_elastic:
            raise GradwireError(
                f"worker {self.name!r} is in a world of fixed size: all leave it together"
            )
        self._told_to_stop = True
        self._woken.set()

    def shutdown(self, graceful: bool = True, timeout: float | None = None) -> None:
        """Leave the world.

        If graceful, wait until all workers shut down and all calls everywhere are done, except on
        lost workers. Otherwise leave now; calls in flight fail. Either way, this one is closed.

        Raises:
            CallTimeout: others did not shut down in time, or calls from here are in flight.
        """
        if self._closed or self._is_copy():
            return
        try:
            if graceful:
                self.join(timeout)
        except KeyboardInterrupt:
            self._patience = _INTERRUPTED
            raise
        finally:
            self.close()

    def close(self) -> None:
        """Leave now and free everything. Idempotent."""
        if self._closed or self._is_copy():
            return
        self._closed = True
        if self._meeting is not None:
            self._meeting.leave(self.id)
        for layer in (self._agent, self.references, self.autograd, self._transport):
            layer.close()
        self._executor.close()
        if self._agent.members.get(self.id) is not None:  # else it has not joined
            self._audit.write("leave", who=self.name)
        for part in (self._switch_interval, self._cores, self._audit):
            part.close()
        if not self._executor.join(self._patience):
            log.warning("worker %r: functions still run after shutdown", self.name)

    def give_up_calls(self) -> int:
        """Give up the calls in flight without warnings; how many there are."""
        pending = self._agent.caller.answers()
        for future in pending:
            future.fate.seen = True
        return len(pending)

    def _is_copy(self) -> bool:
        """Whether this is a forked child, whose sockets and threads are the parent's."""
        return os.getpid() != self._process

    def join(self, timeout: float | None = None) -> None:
        """Wait until all workers want to leave and all calls everywhere are done.

        In an elastic world others stay: then for what this worker has begun.

        Raises:
            CallTimeout: others did not come to the end in time, or calls from here are in flight.
        """
        parties = (self._agent.caller, self.references)
        if self._meeting is not None and self._meeting.is_elastic:
            deadline = time.monotonic() + timeout if timeout else None
            self._collectives.wait_quiet(parties, deadline, timeout)
            self._meeting.note(self.name, Part.FINISHED)
        else:
            self._collectives.settle(parties, timeout or 0)
        self.references.report_leaks()


def open_worker(
    name: str,
    place: Place,
    options: Options,
    on_thread: OnThread | None = None,
    kinds: Kinds | None = None,
    around: Surround | None = None,
) -> Worker:
    """A worker that communicates over sockets, in the world that meets at `place`.

    `around` may wrap the sockets in another transport, such as one that injects faults.

    Raises:
        ValueError: the name or rank is taken or invalid.
        GradwireError: the other workers did not arrive in time.
    """
    check_name(name)
    meeting = Meeting(place, options)

    def make_transport(executor: Executor) -> Transport:
        sockets = SocketTransport(options, executor, place.host)
        return sockets if around is None else around(sockets, executor)

    worker = Worker(
        name,
        meeting.number(),
        options=options,
        make_transport=make_transport,
        on_thread=on_thread,
        kinds=kinds,
    )
    try:
        worker.start(meeting.join(worker.card), meeting.keys, meeting)
        worker.check_device_maps()
        if meeting.is_elastic:
            worker.greet()
    except BaseException:
        worker.close()
        raise
    return worker
