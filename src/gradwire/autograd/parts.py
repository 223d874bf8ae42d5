"""The part of one worker in one pass: carries out what its progress says.

`Progress` (`passes.py`) knows what has happened and what must follow; this file runs segments,
posts messages and wakes those who wait. Its lock guards the progress and is never held while
running or sending anything.

Who runs what: a segment that need not wait is run by the thread that learned that it can be: the
caller of `backward`, the one that got a message, or the one that got an answer. A segment with
roots is always run by the caller. One that may have to wait for other workers, or that is found
inside a call of the engine, is a task of its own.

Gradients for the engager that a short run yields are held until it is over: if the worker is done
by then, they go with the answer, so that a call and its return take one message each way.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import ProtocolError, WorkerLostError
from ..rpc.futures import CallFuture
from ..rpc.runner import Later
from ..threads import Bell, Executor
from . import engine, graph, messages
from .contexts import Context, Numbers, owner, unknown
from .engine import Job, Start
from .failures import describe
from .gradients import keep
from .messages import CREATE, NOTED, Delivery, Done, Failed, Outcome, Step, pack, unpack
from .nodes import Crossing, Gradients
from .passes import (
    Abort,
    Action,
    Finish,
    Narrow,
    Piece,
    Plan,
    Progress,
    Run,
    Tell,
    Wake,
    Words,
)

_GLANCE = (
    0.05  # seconds until one who reads for an answer looks whether the pass failed
)


class Desk(Protocol):
    """What a part needs of its worker."""

    me: int
    executor: Executor
    numbers: Numbers
    pickles: bool

    def request(self, to: int, message: Any) -> CallFuture:
        """Send a message, with no limit to how long its answer may take."""


class _Ended(Exception):
    """The pass has failed elsewhere: get out of the engine."""


class Part:
    """One pass on one worker."""

    def __init__(
        self,
        desk: Desk,
        context: Context,
        number: int,
        flags: int,
        *,
        engager: int | None = None,
    ) -> None:
        self.context = context
        self.number = number
        self.lock = threading.Lock()
        self.outcome: Outcome | None = None
        self.error: BaseException | None = None
        """What failed, if it failed here."""
        self.wanted: list[Tensor | None] = []
        self._desk = desk
        self._flags = flags
        self._start = Start()
        self._segments: list[graph.Segment] = []
        self._progress = Progress(desk.me, Plan((), {}, {}), engager)
        self._gradients: dict[int, Gradients] = {}
        self._bells: dict[int, Bell] = {}
        self._held: list[Delivery] = []
        self._futures: list[CallFuture] = []
        self._answer: torch.futures.Future[Any] | None = None
        self._ended = Bell()

    def __repr__(self) -> str:
        state = "under way" if self.outcome is None else type(self.outcome).__name__
        return f"<Part of worker {self._desk.me} in pass {self.number}: {state}>"

    # How a part begins and ends

    def lead(self, start: Start) -> None:
        """Run the pass that begins here, until all is done everywhere or it has failed."""
        try:
            with self.lock:
                self._start = start
                self.wanted = [None] * len(start.wanted)
                self._prepare()
                actions = self._progress.begun()
            self._do(actions)
            self._wait()
        except BaseException as error:
            self.fail(error)
            raise

    def engage(self, sender: int, step: Step) -> Any:
        """Take part because of this message, with the lock held; the answer to it."""
        try:
            try:
                self._prepare()
                self._take(sender, step)
                actions = self._progress.begun()
            finally:
                self.lock.release()
            self._do(actions)
        except Exception as error:  # noqa: BLE001 user code
            self.fail(error)
        with self.lock:
            if self.outcome is not None:
                return pack(self.outcome)
            self._answer = torch.futures.Future()
            return Later(self._answer)

    def step(self, sender: int, step: Step) -> Any:
        """Another message; the answer to it."""
        try:
            with self.lock:
                if self._progress.is_over:
                    over = self.outcome
                    return pack(over if isinstance(over, Failed) else Done())
                self._take(sender, step)
                actions = self._progress.settled()
            self._do(actions)
        except Exception as error:  # noqa: BLE001 user code
            self.fail(error)
        return NOTED

    def fail(self, error: BaseException, worker: int | None = None) -> None:
        """End the pass here, and with the answers everywhere."""
        if isinstance(error, _Ended) or self._progress.is_over:
            return
        at = self._desk.me if worker is None else worker
        failed = describe(error, at, pickles=self._desk.pickles)
        self.end(failed, error)

    def end(self, failed: Failed, error: BaseException | None = None) -> None:
        with self.lock:
            actions = self._progress.failed()
            if self.outcome is not None:
                return
            self.error = error
        self._conclude(failed)
        for action in actions:
            if isinstance(action, Abort):
                self._abort(action.to, failed)
            elif isinstance(action, Wake):
                self._wake(action.send)

    def worker_gone(self, worker: int, name: str) -> None:
        """Fail if that one was needed."""
        with self.lock:
            needed = self._progress.is_expecting(worker)
        if needed or owner(self.number) == worker:
            self.fail(WorkerLostError(name, "it went away during a backward pass"))

    def released(self) -> None:
        self.fail(unknown(self.context.id))

    def _prepare(self) -> None:
        context = self.context
        with context.lock:
            sends, recvs = dict(context.sends), dict(context.recvs)
        roots = [root.grad_fn for root in self._start.roots]
        self._segments = graph.cut(roots, list(sends.values()), context.id)
        plan = Plan(
            [_piece(segment) for segment in self._segments],
            {number: send.crossing.worker for number, send in sends.items()},
            {number: recv.crossing.worker for number, recv in recvs.items()},
        )
        self._progress = Progress(self._desk.me, plan, self._progress.engager)

    def _conclude(self, outcome: Outcome) -> None:
        with self.lock:
            self.outcome = outcome
            answer = self._answer
        with self.context.lock:
            self.context.parts.pop(self.number, None)
            self.context.ended.add(self.number)
        self._gradients.clear()
        self._ended.ring()
        if answer is not None:
            answer.set_result(pack(outcome))

    def _wait(self) -> None:
        """Until the pass has ended. Reads the answers: that saves others being woken for it."""
        while self.outcome is None:
            coming = next((f for f in list(self._futures) if not f.done()), None)
            if coming is None:
                with self._desk.executor.waiting():
                    self._ended.wait(None)
                continue
            try:
                coming.wait(_GLANCE)
            except Exception:  # noqa: BLE001 `_answered` sees to it
                continue

    # What is said

    def _take(self, sender: int, step: Step) -> None:
        self._receive(sender, step.deliveries)
        words = Words(step.voids, step.listed, step.awaiting)
        self._progress.heard(sender, words, [d[0] for d in step.deliveries])

    def _receive(self, sender: int, deliveries: Iterable[Delivery]) -> None:
        for number, gradients, absent, link, linked in deliveries:
            if self._progress.plan.sends.get(number) != sender:
                raise ProtocolError(f"gradients for send {number}, which is not there")
            count = self.context.sends[number].crossing.count
            there = [i for i, gradient in enumerate(gradients) if gradient is not None]
            if sorted((*there, *absent)) != list(range(count)):
                raise ProtocolError(
                    f"send {number} of {count} tensors got gradients for {there} only"
                )
            if link:
                self.context.add_recv(link, sender, [gradients[i] for i in linked])
            self._gradients.setdefault(number, tuple(gradients))

    def _post(self, to: int, words: Words, deliveries: tuple[Delivery, ...]) -> None:
        step = Step(self.context.id, self.number, self._flags, *words, deliveries)
        try:
            future = self._desk.request(to, step)
        except Exception as error:  # noqa: BLE001 it cannot be sent, or nobody is there
            self.fail(error)
            return
        self._futures.append(future)
        future.on_done(partial(self._answered, to, future))

    def _answered(self, to: int, future: CallFuture) -> None:
        self._futures.remove(future)
        try:
            outcome = unpack(future.value())
            if isinstance(outcome, Failed):
                self.end(outcome)
                return
            with self.lock:
                if self._progress.is_over:
                    return
                if outcome is None:
                    actions = self._progress.answered(to)
                else:
                    self._receive(to, outcome.deliveries)
                    sends = [delivery[0] for delivery in outcome.deliveries]
                    actions = self._progress.finished(to, sends)
            self._do(actions)
        except Exception as error:  # noqa: BLE001 user code
            self.fail(error)

    def _do(self, actions: Iterable[Action]) -> None:
        runs = []
        for action in actions:
            if isinstance(action, Run):
                runs.append(action)
            elif isinstance(action, Narrow):
                self._narrow(action.piece, action.sends)
            elif isinstance(action, Tell):
                self._post(action.to, action.words, ())
            elif isinstance(action, Wake):
                self._wake(action.send)
            elif isinstance(action, Finish):
                self._conclude(Done())
        runs.sort(key=lambda run: run.may_wait)  # those that need not, first
        for run in runs:
            piece = self._progress.plan.pieces[run.piece]
            if engine.is_inside() or (run.may_wait and not piece.has_roots):
                self._desk.executor.submit(partial(self._run, run))
            else:
                self._run(run)

    def _abort(self, to: int, failed: Failed) -> None:
        message = messages.Abort(self.context.id, self.number, pack(failed))
        try:
            self._desk.request(to, message)
        except Exception:  # noqa: BLE001 it is gone, and so is its part
            pass

    # What is run

    def _run(self, run: Run) -> None:
        try:
            job = self._job(run)
            leaves, wanted = engine.execute(job, _Run(self, run))
            self.add_wanted(wanted)
            keep(self.context, job.leaves, leaves, self._flags)
        except BaseException as error:
            self.fail(error)
            if not isinstance(error, Exception):
                raise
            return
        with self.lock:
            actions = self._progress.ran(run)
            held, self._held = tuple(self._held), []
            last = actions[-1] if actions else None
            words = None
            if isinstance(last, Finish):
                actions.pop()
            elif held and not self._progress.is_over:
                words = self._progress.speak(self._progress.engager or 0)
        if isinstance(last, Finish):
            self._conclude(Done(held))
        elif words is not None:
            self._post(self._progress.engager or 0, words, held)
        self._do(actions)

    def _job(self, run: Run) -> Job:
        segment = self._segments[run.piece]
        if len(run.sends) < len(segment.sends):
            segment = self._narrow(run.piece, run.sends)
        start = self._start
        roots = [(start.roots[i], start.gradients[i]) for i in segment.roots]
        return Job(
            roots,
            segment.sends,
            segment.recvs,
            segment.leaves,
            start.wanted,
            self._flags,
        )

    def _narrow(self, piece: int, numbers: tuple[int, ...]) -> graph.Segment:
        """What is reached from the sends that are not void."""
        segment = self._segments[piece]
        sends = [send for send in segment.sends if send.crossing.id in numbers]
        roots = [self._start.roots[index].grad_fn for index in segment.roots]
        parts = graph.cut(roots, sends, self.context.id)
        recvs = [recv for part in parts for recv in part.recvs]
        leaves = list({leaf for part in parts for leaf in part.leaves})
        with self.lock:
            actions = self._progress.narrowed(piece, [recv.id for recv in recvs])
        self._do(actions)
        return graph.Segment(segment.roots, sends, leaves, recvs)

    def add_wanted(self, gradients: list[Tensor | None]) -> None:
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                before = self.wanted[index]
                self.wanted[index] = gradient if before is None else before + gradient

    def _wake(self, send: int) -> None:
        with self.lock:
            bell = self._bells.pop(send, None)
        if bell is not None:
            bell.ring()

    def collect(self, send: Crossing) -> Gradients:
        """The gradients for a send; waits for them."""
        with self.lock:
            fate = self._progress.fate(send.id)
            if fate is None and not self._progress.is_over:
                bell = self._bells[send.id] = Bell()
            else:
                bell = None
        if bell is not None:
            with self._desk.executor.waiting():
                bell.wait(None)
        if self._progress.has_failed:
            raise _Ended
        if self._progress.fate(send.id):
            return self._gradients.pop(send.id)
        return (None,) * send.count

    def deliver(self, run: Run, recv: Crossing, gradients: Gradients) -> None:
        """Send the gradients of a recv to where its tensors came from."""
        if self._progress.is_over:
            raise _Ended
        absent = tuple(i for i, gradient in enumerate(gradients) if gradient is None)
        if len(absent) == recv.count:
            with self.lock:
                actions = self._progress.came_empty(recv.id)
            self._do(actions)
            return
        delivery = self._packed(recv, gradients, absent)
        to = recv.worker
        with self.lock:
            self._progress.left(recv.id)
            if to == self._progress.engager and not run.may_wait:
                self._held.append(delivery)
                return
            if to == self._desk.me:
                self._receive(to, (delivery,))
                actions, words = self._progress.delivered_here(recv.id), None
            else:
                actions, words = [], self._progress.speak(to)
        if words is not None:
            self._post(to, words, (delivery,))
        self._do(actions)

    def _packed(
        self, recv: Crossing, gradients: Gradients, absent: tuple[int, ...]
    ) -> Delivery:
        link = 0
        linked: tuple[int, ...] = ()
        if self._flags & CREATE:
            linked = tuple(
                i for i, g in enumerate(gradients) if g is not None and g.requires_grad
            )
            if linked:
                link = self._desk.numbers.next()
                sent = [gradients[i] for i in linked]
                self.context.add_send(link, recv.worker, sent)  # type: ignore[arg-type]
        bare = tuple(g if g is None else g.detach() for g in gradients)
        return recv.id, bare, absent, link, linked


class _Run:
    """A call of the engine, as its nodes see it."""

    __slots__ = ("_part", "_run")

    def __init__(self, part: Part, run: Run) -> None:
        self._part = part
        self._run = run

    def collect(self, send: Crossing) -> Gradients:
        return self._part.collect(send)

    def deliver(self, recv: Crossing, gradients: Gradients) -> None:
        self._part.deliver(self._run, recv, gradients)


def _piece(segment: graph.Segment) -> Piece:
    return Piece(
        tuple(send.crossing.id for send in segment.sends),
        tuple(recv.id for recv in segment.recvs),
        bool(segment.roots),
    )
