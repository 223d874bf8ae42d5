"""The driver of distributed autograd on one worker: contexts and passes.

What messages carry is recorded as they are sent and received (`recording.py`); a pass on one
worker is a `Part`. This file creates parts, finds them for the messages that arrive, and ends
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

from .. import streams
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
from .engine import is_profiled
from .failures import describe, revive, to_raise
from .messages import (
    ABORT,
    ACCUMULATE,
    CLAIM,
    CREATE,
    PASS,
    QUIET,
    RELEASE,
    RETAIN,
    Abort,
    Claim,
    Failed,
    Header,
    PassRequest,
    Release,
    pack_failed,
    read_failed,
    read_request,
)
from .parts import Part
from .pass_driver import Round, lead
from .segment_runner import Start
from .timeouts import Limits

log = logging.getLogger("gradwire")

_FOR_EVER = 0.0  # a backward has no limit; a lost worker is noticed
_PATIENCE = 10.0  # seconds until an unacknowledged release is retried


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
    """Distributed autograd on one worker. `pickles`: errors may be sent pickled."""

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
        self._limits = Limits(executor, self._expire)
        self.releases = Releases(executor, self._say)
        calls.handle(PASS, PassRequest, self._on_pass)
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
            GradwireError: this thread already has one.
        """
        return self.contexts.new()

    def context(self) -> Session:
        """A new context for a block; yields its id."""
        return Session(self)

    def release(self, context_id: int, told_by: int = -1) -> None:
        """End a context here, and soon on all workers that know it. Idempotent."""
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
            TypeError: not an id.
            GradwireError: there is no such context.
        """
        check_id(context_id)
        context = self.contexts.get(context_id)
        with context.lock:
            gradients = dict(context.gradients)
        if streams.in_use:
            streams.take(gradients)
        return gradients

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
            TypeError, GradwireError: invalid roots; or "Error on Node N: ...", with the original
                error as its cause.
            WorkerLostError: a worker that is needed is lost.
            BackwardTimeout: it did not finish in time.
        """
        if not are_usual(context_id, roots):
            check_call(context_id, roots)
            self.contexts.get(context_id)  # PyTorch's message starts with that
            check_roots(roots)
        context = self.contexts.get(context_id)
        flags = 0
        if retain_graph or create_graph or accumulate:
            flags = RETAIN * as_flag("retain_graph", retain_graph)
            flags |= CREATE * as_flag("create_graph", create_graph)
            flags |= ACCUMULATE * as_flag("accumulate", accumulate)
        start = Start(roots, [None] * len(roots))
        if is_profiled():
            with record_function("torch::distributed::autograd::backward"):
                self._lead(context, start, flags, timeout)
        else:
            self._lead(context, start, flags, timeout)

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

        As `torch.autograd.grad`, along all paths, including those through other workers. Nothing is
        stored in the context.

        Raises:
            TypeError, ValueError: an argument is invalid.
            GradwireError: as `backward`; or an input is unused and that is not allowed.
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
        found = self._lead(context, Start(outputs, gradients, wanted), flags, timeout)
        if not allow_unused:
            check_used(found)
        return tuple(found)

    def _lead(
        self, context: Context, start: Start, flags: int, timeout: float | None
    ) -> Sequence[Tensor | None]:
        """Run a pass; returns the requested gradients."""
        seconds = _FOR_EVER if timeout is None else check_timeout(timeout)
        flags |= anomaly.flags()
        with context.lock:
            number, since = context.begin_pass(self._passes)
            header = Header(context.id, number, flags, since)
            plan = context.segments().plan(start.edges())
            part = context.parts[number] = Part(self, context, header, plan, start)
        try:
            with streams.default():
                self._lead_within(part, seconds)
        finally:
            context.parts.pop(number, None)
            context.led.discard(number)
        self._raise(part)
        return part.runner.wanted

    def _lead_within(self, part: Part, seconds: float) -> None:
        if seconds == _FOR_EVER:
            lead(part)
            return
        with self._limits.limit(part.context, part.header.number, seconds):
            lead(part)
            self._raise(part)

    def _raise(self, part: Part) -> None:
        if part.failed is not None:
            raise self._error(part.failed, part.error)

    def _error(self, failed: Failed, error: BaseException | None) -> BaseException:
        if error is None:
            name = self._calls.members.name(failed.worker)
            error = revive(failed, name, pickles=self.pickles)
        return to_raise(failed, error)

    def _expire(self, context: Context, number: int, error: BackwardTimeout) -> None:
        self._end(context, number, describe(error, self.me, pickles=self.pickles))

    def _end(self, context: Context, number: int, failed: Failed) -> None:
        """End a pass here."""
        with context.lock:
            part = context.parts.get(number)
            if part is None:
                context.aborted.add(number)
        if part is not None:
            part.end(failed)

    # The interface for parts

    def request(self, to: int, message: Any) -> CallFuture:
        return self._calls.request(to, message, _FOR_EVER)

    def tell(self, to: int, message: Any) -> None:
        try:
            self.request(to, message).fate.seen = True
        except Exception:  # noqa: BLE001 it is gone, and so is its part
            pass

    def ask(self, to: int, message: Any, is_over: Callable[[], bool]) -> Any:
        return self._calls.ask(to, message, _FOR_EVER, is_over)

    # Messages from others

    def _on_pass(self, sender: int, message: PassRequest) -> Any:
        header, load = read_request(message)
        context = self.contexts.arrived(header.context)
        context.known.add(sender)
        with context.lock:
            current = self._join(context, header, sender)
        if current is not None:
            return current.serve(load)
        if context.is_released:
            error = unknown(context.id)
            return pack_failed(describe(error, self.me, pickles=self.pickles))
        return None  # the leader knows

    def _join(self, context: Context, header: Header, asker: int) -> Round | None:
        """Take part in a pass; None if it has ended. With the lock of the context."""
        number = header.number
        part = context.parts.get(number)
        if part is None:
            is_over = owner(number) == self.me or context.is_over(number)
            if is_over or context.is_released:
                return None
            context.forget_passes(number, header.since)
            plan = context.segments().plan()
            part = context.parts[number] = Part(self, context, header, plan)
        assert isinstance(part, Part)
        return Round(part, header, asker)

    def _on_abort(self, sender: int, abort: Abort) -> None:
        failed = read_failed(abort.failed)
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
            if began == info.id:  # nothing else would end it
                self.release(context.id)
            elif was_known and began != self.me:
                orphans.setdefault(began, []).append(context.id)
        for began, numbers in orphans.items():
            end = partial(self.release, told_by=began)
            self.executor.submit(partial(self.releases.claim, began, numbers, end))

    def close(self) -> None:
        """End all contexts here, without telling others. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            ddp.unwatch()
        self._unsubscribe()
        for context in self.contexts:
            self.contexts.remove(context.id)
            for part in context.clear():
                part.released()
