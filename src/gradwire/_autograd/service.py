"""The driver of distributed autograd on one worker: contexts and passes.

What messages carry is recorded as they are sent and received (`recording.py`); a pass on one
worker is a `Part`. This file makes parts, finds them for the messages that arrive, and ends
contexts everywhere.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.profiler import record_function

from .._rpc.agent import Agent
from .._rpc.futures import CallFuture
from ..errors import BackwardTimeout
from ..ids import WorkerInfo
from ..options import check_timeout
from ..threads import Executor
from . import anomaly, ddp
from .arguments import (
    are_usual,
    as_flag,
    as_gradients,
    as_tensors,
    check_call,
    check_history,
    check_id,
    check_inputs,
    check_roots,
    check_used,
)
from .context_release import Releases
from .contexts import Context, Contexts, Numbers, owner, unknown
from .engine import Start, is_profiled
from .failures import describe, revive, to_raise
from .messages import (
    ABORT,
    ACCUMULATE,
    CLAIM,
    CREATE,
    DIRECT,
    OVER,
    QUIET,
    RELEASE,
    RETAIN,
    STEP,
    Abort,
    About,
    Claim,
    Direct,
    Done,
    Failed,
    Noted,
    Over,
    Release,
    Step,
    Trip,
    pack,
    read_step,
    unpack,
)
from .pass_driver import Part
from .rounds import Failing
from .strands import Strands, strands_of
from .timeouts import Limits
from .tree_pass import DirectPasses

log = logging.getLogger("gradwire")

_FOR_EVER = 0.0  # a backward may take its time; a lost worker is noticed
_PATIENCE = 10.0  # seconds until a release that is not answered is said again


class Session:
    """A new context for a block. Not a generator: those take longer than the rest."""

    __slots__ = ("_autograd", "_number")

    def __init__(self, autograd: Autograd) -> None:
        self._autograd = autograd

    def __enter__(self) -> int:
        number = self._number = self._autograd.contexts.new().id
        return number

    def __exit__(self, *error: object) -> None:
        self._autograd.release(self._number)


class Autograd:
    """Distributed autograd on one worker. `pickles`: errors may travel pickled."""

    def __init__(
        self, calls: Agent, executor: Executor, *, pickles: bool = True
    ) -> None:
        self.me = calls.me.id
        self.executor = executor
        self.pickles = pickles
        self.numbers = Numbers(self.me)
        self.contexts = Contexts(self.me)
        self._calls = calls
        self._passes = Numbers(self.me)
        self._direct = DirectPasses(self, self.contexts)
        self._limits = Limits(executor, self._expire)
        self.releases = Releases(executor, self._say)
        calls.handle(STEP, Step, self._on_step)
        calls.handle(DIRECT, Direct, self._direct.answer)
        calls.handle(OVER, Over, self._on_over)
        calls.handle(ABORT, Abort, self._on_abort)
        calls.handle(RELEASE, Release, self._on_release)
        calls.handle(CLAIM, Claim, self._on_claim)
        self._unsubscribe = calls.gone.subscribe(self._worker_gone)
        ddp.watch()
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<Autograd of worker {self.me}: {self.debug_info()}>"

    # Contexts

    def new_context(self) -> Context:
        """A new context, current in this thread until it is released.

        Raises:
            GradwireError: this thread has one already.
        """
        return self.contexts.new()

    def context(self) -> Session:
        """A new context for a block; gives its id."""
        return Session(self)

    def release(self, context_id: int, told_by: int = -1) -> None:
        """End a context here, and soon on all workers that know it. Twice is fine."""
        context = self.contexts.remove(context_id)
        if context is None:
            return
        for part in context.clear():
            part.released()
        for worker in tuple(context.known):
            if worker != told_by and worker != self.me:
                self.releases.add(worker, context_id)

    def get_gradients(self, context_id: int) -> dict[Tensor, Tensor]:
        """The gradients of this worker's leaves.

        Raises:
            TypeError: that is no id.
            GradwireError: there is no such context.
        """
        check_id(context_id)
        context = self.contexts.get(context_id)
        with context.lock:
            return dict(context.gradients)

    def debug_info(self) -> dict[str, int]:
        return {
            "num_current_backward_passes": sum(c.passes() for c in self.contexts),
            "num_autograd_contexts": len(self.contexts),
        }

    # Passes

    def backward(
        self,
        context_id: int,
        roots: Sequence[Tensor],
        retain_graph: bool = False,
        *,
        create_graph: bool = False,
        accumulate: bool = False,
        timeout: float | None = None,
    ) -> None:
        """Run one backward pass through all workers of a context.

        Raises:
            TypeError, GradwireError: these are no roots; or "Error on Node N: ...", with what
                went wrong there as its cause.
            WorkerLostError: a worker that is needed is gone.
            BackwardTimeout: it did not end in time.
        """
        if not are_usual(context_id, roots):
            check_call(context_id, roots)
            self.contexts.get(context_id)  # PyTorch says first that there is none
            check_roots(roots)
        context = self.contexts.get(context_id)
        flags = 0
        if retain_graph or create_graph or accumulate:
            flags = RETAIN * as_flag("retain_graph", retain_graph)
            flags |= CREATE * as_flag("create_graph", create_graph)
            flags |= ACCUMULATE * as_flag("accumulate", accumulate)
        seconds = _FOR_EVER if timeout is None else check_timeout(timeout)
        with context.lock:
            strands = strands_of(context)
            number, since = context.begin_pass(self._passes)
        trip = Trip(context.id, number, flags | anomaly.flags(), since)
        if seconds == _FOR_EVER:
            self._backward(context, trip, strands, roots)
            return
        with self._limits.limit(context, number, seconds):
            self._backward(context, trip, strands, roots)

    def _backward(
        self, context: Context, trip: Trip, strands: Strands, roots: Sequence[Tensor]
    ) -> None:
        try:
            if is_profiled():  # whoever looks wants to see the nodes of sends and recvs
                with record_function("torch::distributed::autograd::backward"):
                    self._lead(context, trip.about, Start(roots, [None] * len(roots)))
                return
            parked = self._direct.lead(context, trip, strands, roots)
            if parked is None:
                self._lead(context, trip.about, Start(roots, [None] * len(roots)))
            elif parked:
                self._lead(context, trip.about, Start(parked=parked))
            return
        except Failing as error:
            failed, cause = error.failed, error.__cause__
        finally:
            context.led.discard(trip.number)
        raise self._error(failed, cause)

    def grad(  # noqa: PLR0913 they are those of `torch.autograd.grad`
        self,
        context_id: int,
        outputs: Tensor | Sequence[Tensor],
        inputs: Tensor | Sequence[Tensor],
        grad_outputs: Tensor | Sequence[Tensor | None] | None = None,
        *,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        allow_unused: bool = False,
        timeout: float | None = None,
    ) -> tuple[Tensor | None, ...]:
        """The gradients of `outputs` with respect to `inputs`, both of this worker.

        As `torch.autograd.grad`, along all paths, also those through other workers. Nothing is
        kept in the context.

        Raises:
            TypeError, ValueError: something is wrong with the arguments.
            GradwireError: as `backward`; or an input is not used and that is not allowed.
        """
        check_id(context_id)
        outputs = as_tensors("outputs", outputs)
        inputs = as_tensors("inputs", inputs)
        context = self.contexts.get(context_id)
        gradients = as_gradients(grad_outputs, outputs)
        for output in outputs:
            check_history(output)
        check_inputs(inputs)
        flags = QUIET | CREATE * as_flag("create_graph", create_graph)
        retain = create_graph if retain_graph is None else retain_graph
        flags |= RETAIN * as_flag("retain_graph", retain)
        wanted = [get_gradient_edge(tensor) for tensor in inputs]
        about = About(context.id, self._passes.next(), flags | anomaly.flags())
        start = Start(outputs, gradients, wanted)
        seconds = _FOR_EVER if timeout is None else check_timeout(timeout)
        if seconds == _FOR_EVER:
            found = self._lead(context, about, start)
        else:
            with self._limits.limit(context, about.number, seconds):
                found = self._lead(context, about, start)
        if not allow_unused:
            check_used(found)
        return found

    def _lead(
        self, context: Context, about: About, start: Start
    ) -> tuple[Tensor | None, ...]:
        part = Part(self, context, about)
        with context.lock:
            if context.is_released:
                raise unknown(context.id)
            part.lock.acquire()  # others wait until it has begun
            context.parts[part.number] = part
        found = part.lead(start)
        if isinstance(part.outcome, Failed):
            raise self._error(part.outcome, part.error)
        return tuple(found)

    def _error(self, failed: Failed, error: BaseException | None) -> BaseException:
        if error is None:
            name = self._calls.members.name(failed.worker)
            error = revive(failed, name, pickles=self.pickles)
        return to_raise(failed, error)

    def _expire(self, context: Context, number: int, error: BackwardTimeout) -> None:
        self._end(context, number, describe(error, self.me, pickles=self.pickles))

    def _end(self, context: Context, number: int, failed: Failed) -> None:
        """End a pass here, however it is run."""
        with context.lock:
            part = context.parts.get(number)
            record = context.records.get(number)
            if record is not None:
                record.failed = record.failed or failed
            if part is None:
                context.ended.add(number)
        if part is not None:
            part.end(failed)

    # What parts need

    def request(self, to: int, message: Any) -> CallFuture:
        return self._calls.request(to, message, _FOR_EVER)

    def tell(self, to: int, message: Any) -> None:
        try:
            self.request(to, message).fate.seen = True
        except Exception:  # noqa: BLE001 it is gone, and so is its part
            pass

    def ask(
        self,
        to: int,
        message: Any,
        is_over: Callable[[], bool],
        meanwhile: Callable[[], None] | None = None,
    ) -> Any:
        return self._calls.ask(to, message, _FOR_EVER, is_over, meanwhile)

    # What others say

    def _on_step(self, sender: int, step: Step) -> Any:
        about, words, deliveries = read_step(step)
        number = about.number
        context = self.contexts.arrived(about.context)
        context.known.add(sender)
        with context.lock:
            part = context.parts.get(number)
            if part is None and number in context.ended:
                # The engager knows, or is about to hear it with the last gradients.
                is_engager = context.ended.get(number) == sender
                return pack(Noted() if is_engager else Done())
            if part is None and context.is_released:
                error = unknown(context.id)
                return pack(describe(error, self.me, pickles=self.pickles))
            if part is None:
                new = Part(self, context, about, sender)
                new.lock.acquire()  # others wait until it has begun
                context.parts[number] = new
        go_on = new.engage if part is None else part.step
        return go_on(sender, words, deliveries)

    def _on_over(self, sender: int, over: Over) -> None:
        part = self.contexts.arrived(over.context).parts.get(over.number)
        if part is not None:
            part.ended(sender, over.outcome)

    def _on_abort(self, sender: int, abort: Abort) -> None:
        failed = unpack(abort.failed)
        if isinstance(failed, Failed):
            self._end(self.contexts.arrived(abort.context), abort.number, failed)

    def _on_release(self, sender: int, release: Release) -> None:
        for context_id in release.contexts:
            self.release(context_id, sender)

    def _on_claim(self, sender: int, claim: Claim) -> tuple[int, ...]:
        return self.contexts.claimed(claim.contexts, sender)

    def _say(self, worker: int, message: Release | Claim) -> CallFuture:
        return self._calls.request(worker, message, _PATIENCE)

    def _worker_gone(self, info: WorkerInfo) -> None:
        orphans: dict[int, list[int]] = {}
        for context in self.contexts:
            for part in list(context.parts.values()):
                part.worker_gone(info.id, info.name)
            was_known = info.id in context.known
            context.known.discard(info.id)
            began = owner(context.id)
            if began == info.id:  # nobody else would end it
                self.release(context.id)
            elif was_known and began != self.me:
                orphans.setdefault(began, []).append(context.id)
        for began, numbers in orphans.items():
            end = partial(self.release, told_by=began)
            self.executor.submit(partial(self.releases.claim, began, numbers, end))

    def close(self) -> None:
        """End all contexts here; nobody is told. Twice is fine."""
        if not self._is_closed:
            self._is_closed = True
            ddp.unwatch()
        self._unsubscribe()
        for context in self.contexts:
            self.contexts.remove(context.id)
            for part in context.clear():
                part.released()
