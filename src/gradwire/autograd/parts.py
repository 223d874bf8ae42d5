"""The part of one worker in one pass: carries out what its progress says.

`Progress` (`passes.py`) knows what has happened and what must follow; this file has segments run,
posts messages and wakes those who wait. Its lock guards the progress and is never held while
running or sending anything.

Who runs what: a segment that need not wait is run by the thread that learned that it can be: the
caller of `backward`, the one that got a message, or the one that got an answer. A segment with
roots is always run by the caller. One that may have to wait for other workers, or that is found
inside a call of the engine, is a task of its own.

Gradients that a run yields at its very end are held until it is over. Those for the engager then go
with the answer, if the worker is done, so that a call and its return take one message each way;
others leave when the one who sends them is free to wait for the answer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..errors import WorkerLostError
from ..rpc.runner import Later
from ..threads import Bell
from . import deliveries, engine, messages
from .contexts import Context, owner, unknown
from .desk import Desk
from .engine import Start
from .failures import describe
from .messages import NOTED, Delivery, Done, Failed, Outcome, Step
from .nodes import Crossing, Gradients
from .passes import (
    Abort,
    Action,
    Finish,
    Narrow,
    Plan,
    Progress,
    Run,
    Tell,
    Wake,
    Words,
)
from .talk import Look, Talk
from .work import Work

_NO_PLAN = Plan((), {}, {})


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
        engager: int | None = None,
    ) -> None:
        self.number = number
        self.lock = threading.Lock()
        self.outcome: Outcome | None = None
        self.error: BaseException | None = None
        """What failed, if it failed here."""
        self._desk = desk
        self._context = context
        self._flags = flags
        self._engager = engager
        self._work: Any = None  # known once it has begun, as is the progress
        self._progress: Any = None
        self._gradients: dict[int, Gradients] = {}
        self._bells: dict[int, Bell] = {}
        self._held: dict[int, list[Delivery]] = {}  # by worker
        self._talk = Talk(desk, context, number, flags)
        self._answer: torch.futures.Future[Any] | None = None
        self._ended = Bell()

    def __repr__(self) -> str:
        state = "under way" if self.outcome is None else type(self.outcome).__name__
        return f"<Part of worker {self._desk.me} in pass {self.number}: {state}>"

    # How a part begins and ends

    def lead(self, start: Start) -> Sequence[Tensor | None]:
        """Run the pass that begins here, with the lock held; what it yields of what was wanted.

        Returns when all is done everywhere or it has failed.
        """
        try:
            try:
                self._begin(start)
                actions = self._progress.begun()
            finally:
                self.lock.release()
            self._do(actions)
            self._wait()
        except BaseException as error:
            self.fail(error)
            raise
        found: Sequence[Tensor | None] = self._work.wanted
        return found

    def engage(self, sender: int, step: Step) -> Any:
        """Take part because of this message, with the lock held; the answer to it."""
        try:
            try:
                self._begin(Start())
                self._take(sender, step)
                actions = self._progress.begun()
            finally:
                self.lock.release()
            self._do(actions)
        except Exception as error:  # noqa: BLE001 user code
            self.fail(error)
        with self.lock:
            if self.outcome is not None:
                return messages.pack(self.outcome)
            self._answer = torch.futures.Future()
            return Later(self._answer)

    def step(self, sender: int, step: Step) -> Any:
        """Another message; the answer to it."""
        try:
            with self.lock:
                if self._progress.is_over:
                    return messages.answer_after(self.outcome, sender == self._engager)
                self._take(sender, step)
                actions = self._progress.settled()
            self._do(actions)
        except Exception as error:  # noqa: BLE001 user code
            self.fail(error)
        return NOTED

    def fail(self, error: BaseException) -> None:
        """End the pass because of an error here."""
        with self.lock:  # it has begun
            if isinstance(error, _Ended) or self._progress.is_over:
                return
        self.end(describe(error, self._desk.me, pickles=self._desk.pickles), error)

    def end(self, failed: Failed, error: BaseException | None = None) -> None:
        """End the pass here; those who gave us work and those we gave some are told."""
        with self.lock:
            if self._progress.is_over:
                return
            actions = self._progress.failed()
            self.error = error
        self._conclude(failed)
        for action in actions:
            if isinstance(action, Abort):
                self._talk.abort(action.to, failed)
            else:
                self._wake(action.send)

    def worker_gone(self, worker: int, name: str) -> None:
        """Fail if that one is needed."""
        with self.lock:
            is_needed = self._progress.is_expecting(worker)
        if is_needed or owner(self.number) == worker:
            self.fail(WorkerLostError(name, "it went away during a backward pass"))

    def released(self) -> None:
        """Fail, because the context is over."""
        self.fail(unknown(self._context.id))

    def _begin(self, start: Start) -> None:
        me = self._desk.me
        try:
            self._work = Work(self._context, start, self._flags)
            self._progress = Progress(me, self._work.plan, self._engager)
        except BaseException:
            self._progress = Progress(me, _NO_PLAN, self._engager)
            raise

    def _conclude(self, outcome: Outcome) -> None:
        with self._context.lock:
            self._context.parts.pop(self.number, None)
            self._context.ended.add(self.number, self._engager)
        with self.lock:
            self.outcome = outcome
            answer = self._answer
        self._gradients.clear()
        self._ended.ring()
        if answer is not None:
            answer.set_result(messages.pack(outcome))

    def _wait(self) -> None:
        """Until the pass has ended."""
        while self.outcome is None:
            if not self._talk.read():
                with self._desk.executor.waiting():
                    self._ended.wait(None)

    # What is said

    def _take(self, sender: int, step: Step) -> None:
        sends = self._receive(sender, messages.unflatten(step.heads, step.gradients))
        words = Words(step.voids, step.listed, step.awaiting)
        self._progress.heard(sender, words, sends)

    def _receive(self, sender: int, arrived: Iterable[Delivery]) -> list[int]:
        sends = []
        for delivery in arrived:
            gradients = deliveries.take(self._context, sender, delivery)
            self._gradients.setdefault(delivery[0], gradients)
            sends.append(delivery[0])
        return sends

    def _answered(self, to: int, look: Look, is_free: bool = False) -> None:
        """An answer came. `is_free`: this thread has nothing else to do, and may wait."""
        try:
            outcome = messages.unpack(look())
            if isinstance(outcome, Failed):
                self.end(outcome)
                return
            with self.lock:
                if self._progress.is_over:
                    return
                if outcome is None:
                    actions = self._progress.answered(to)
                else:
                    sends = self._receive(to, outcome.deliveries)
                    actions = self._progress.finished(to, sends)
            self._do(actions, is_free)
        except Exception as error:  # noqa: BLE001 user code
            self.fail(error)

    # What is done

    def _do(self, actions: Iterable[Action], is_free: bool = True) -> None:
        runs = []
        for action in actions:
            if isinstance(action, Run):
                runs.append(action)
            elif isinstance(action, Narrow):
                self._narrow(action.piece, action.sends)
            elif isinstance(action, Tell):
                self._talk.post(action.to, action.words, (), self._answered)
            elif isinstance(action, Wake):
                self._wake(action.send)
            elif isinstance(action, Finish):
                self._conclude(Done())
        if len(runs) > 1:
            runs.sort(key=lambda run: run.may_wait)  # those that need not, first
        for run in runs:
            is_task = run.may_wait and not self._work.has_roots(run.piece)
            if is_task or engine.is_inside():
                self._desk.executor.submit(partial(self._run, run))
            else:
                self._run(run, is_free and run is runs[-1])

    def _narrow(self, piece: int, sends: tuple[int, ...]) -> None:
        recvs = self._work.narrow(piece, sends)
        with self.lock:
            actions = self._progress.narrowed(piece, recvs)
        self._do(actions, is_free=False)

    def _run(self, run: Run, is_free: bool = True) -> None:
        """Run a piece. `is_free`: this thread has nothing else to do, and may wait."""
        try:
            if not self._work.is_whole(run.piece, run.sends):
                self._narrow(run.piece, run.sends)
            given = None if run.may_wait or engine.is_profiled() else self._gradients
            recvs = self._work.execute(run.piece, _Exchange(self, run), given)
            for recv, gradients in recvs:
                self._deliver(recv, gradients, self._hold)
        except BaseException as error:
            self.fail(error)
            if not isinstance(error, Exception):
                raise
            return
        engager = -1 if self._engager is None else self._engager
        with self.lock:
            if self._progress.is_over:
                return
            held, self._held = self._held, {}
            last = held.pop(engager, None)
            leaving = [(to, self._progress.speak(to), held[to]) for to in held]
            actions = self._progress.ran(run)
            if last and not self._progress.is_over:
                leaving.append((engager, self._progress.speak(engager), last))
        is_free = is_free and not actions and not engine.is_inside()
        if is_free and len(leaving) == 1 and self._talk.is_alone_with(leaving[0][0]):
            to = leaving[0][0]
            self._answered(to, self._talk.ask(*leaving[0]), is_free=True)
            return
        for message in leaving:
            self._talk.post(*message, self._answered)
        if last and actions and isinstance(actions[-1], Finish):
            actions.pop()
            self._conclude(Done(tuple(last)))
        self._do(actions, is_free)

    def _wake(self, send: int) -> None:
        with self.lock:
            bell = self._bells.pop(send, None)
        if bell is not None:
            bell.ring()

    def collect(self, send: Crossing) -> Gradients:
        """The gradients for a send; waits for them."""
        bell = None
        with self.lock:
            if self._progress.fate(send.id) is None and not self._progress.is_over:
                bell = self._bells[send.id] = Bell()
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
        may_hold = not run.may_wait and self._work.is_last(run.piece, recv.id)
        self._deliver(recv, gradients, self._hold if may_hold else self._send)

    def _deliver(
        self, recv: Crossing, gradients: Gradients, go: Callable[[int, Delivery], None]
    ) -> None:
        if self._progress.is_over:
            raise _Ended
        if all(gradient is None for gradient in gradients):
            with self.lock:
                actions = self._progress.came_empty(recv.id)
            self._do(actions, is_free=False)
            return
        context, to = self._context, recv.worker
        delivery = deliveries.make(
            context, recv, gradients, self._flags, self._desk.numbers
        )
        if to != self._desk.me:
            with self.lock:
                self._progress.left(recv.id)
            go(to, delivery)
            return
        with self.lock:
            self._progress.left(recv.id)
            sends = self._receive(to, (delivery,))
            actions = self._progress.delivered_here(sends[0])
        self._do(actions, is_free=False)

    def _hold(self, to: int, delivery: Delivery) -> None:
        with self.lock:
            self._held.setdefault(to, []).append(delivery)

    def _send(self, to: int, delivery: Delivery) -> None:
        with self.lock:
            words = self._progress.speak(to)
        self._talk.post(to, words, (delivery,), self._answered)


class _Exchange:
    """A call of the engine, as its nodes see it."""

    __slots__ = ("_part", "_run", "collect")

    def __init__(self, part: Part, run: Run) -> None:
        self._part = part
        self._run = run
        self.collect = part.collect

    def deliver(self, recv: Crossing, gradients: Gradients) -> None:
        self._part.deliver(self._run, recv, gradients)
