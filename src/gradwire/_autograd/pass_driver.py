"""The part of one worker in one pass: carries out what its progress says.

`Progress` (`pass_state.py`) knows what has happened and what must follow; this file has segments
run,
posts messages and wakes those who wait. Its lock guards the progress and is never held while
running or sending anything.

Who runs what: a segment that need not wait is run by the thread that learned that it can be: the
caller of `backward`, the one that got a message, or the one that got an answer. A segment with
roots is always run by the caller. One that may have to wait for other workers, or that is found
inside a call of the engine, is a task of its own.

Gradients that a run yields at its very end are held until it is over. Those for the worker whose
question this thread has to answer go with the answer. If there are none, and the thread has nothing
else to run, it asks: it sends what there is and waits for what comes back. So along a chain of
calls the same threads pass the gradients on that passed the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from ..errors import WorkerLostError
from ..threads import Bell
from . import deliveries, engine
from .actions import (
    Abort,
    Action,
    Answer,
    Finish,
    Narrow,
    Plan,
    Reach,
    Run,
    Slot,
    Tell,
    Wake,
    Words,
)
from .contexts import Context, owner, unknown
from .desk import Desk
from .engine import Start
from .exchanges import Exchange
from .failures import describe
from .mail import Ended, Mail
from .messages import About, Delivery, Done, Failed, Noted, Outcome, pack, unpack
from .nodes import Crossing, Gradients
from .pass_state import Progress
from .profiler import Errands, can_serve
from .talk import End, Look, Message, Question, Talk
from .work import Work


class Part:
    """One pass on one worker."""

    def __init__(
        self, desk: Desk, context: Context, about: About, engager: int | None = None
    ) -> None:
        self.number = about.number
        self.error: BaseException | None = None
        """What failed, if it failed here."""
        self._desk = desk
        self._context = context
        self._flags = about.flags
        self._engager = engager
        self._work: Any = None  # known once it has begun
        self.mail = Mail(desk, context, about.flags)
        self.lock = self.mail.lock
        self._end = End()
        self._talk = Talk(desk, about, self._end)
        self._asking = 0  # questions of the engager that are still to be answered
        self._is_told = engager is None  # the engager knows that it has ended here
        self._ended = Bell()
        self._errands: Errands | None = None
        self._for_leader: list[Run] = []  # what has roots: only it may wait with these

    def __repr__(self) -> str:
        state = "under way" if self.outcome is None else type(self.outcome).__name__
        return f"<Part of worker {self._desk.me} in pass {self.number}: {state}>"

    @property
    def outcome(self) -> Outcome | None:
        return self._end.outcome

    # How a part begins and ends

    def lead(self, start: Start) -> Sequence[Tensor | None]:
        """Run the pass that begins here, with the lock held; what it yields of what was wanted.

        Returns when all is done everywhere or it has failed.
        """
        try:
            try:
                self._begin(start)
                actions = self.mail.progress.begun()
            finally:
                self.lock.release()
            is_profiled = engine.is_profiled()
            if is_profiled and can_serve(self._work.plan, actions):
                self._errands = Errands()
            self._go_on_alone(self._act(actions))
            if is_profiled:
                self._wait(self.mail.progress.have_roots_run)
                self._serve()
            self._wait()
        except BaseException as error:
            self.fail(error)
            raise
        wanted: Sequence[Tensor | None] = self._work.wanted
        return wanted

    def engage(self, sender: int, words: Words, arrived: list[Delivery]) -> Any:
        """Take part because of this message, with the lock held; the answer to it."""
        question = Question(sender, [])
        try:
            try:
                self._asking = 1
                self._begin(Start())
                self.mail.progress.heard(
                    sender, words, self.mail.receive(sender, arrived)
                )
                actions = self.mail.progress.begun()
            finally:
                self.lock.release()
            self._go_on(self._act(actions), question)
        except BaseException as error:  # noqa: BLE001 user code
            self.fail(error)
        return self._answer(question, is_engaging=True)

    def step(self, sender: int, words: Words, arrived: list[Delivery]) -> Any:
        """Another message; the answer to it."""
        question = Question(sender, [])
        with self.lock:
            self._asking += sender == self._engager
        try:
            with self.lock:
                if not self.mail.progress.is_over:
                    sends = self.mail.receive(sender, arrived)
                    self.mail.progress.heard(sender, words, sends)
                    actions = self.mail.progress.settled()
                else:
                    actions = []
            self._go_on(self._act(actions), question)
        except BaseException as error:  # noqa: BLE001 user code
            self.fail(error)
        return self._answer(question)

    def ended(self, worker: int, outcome: Any) -> None:
        """A worker that was engaged from here has ended, and says how."""
        self._answered(worker, lambda: outcome, is_last=True)

    def fail(self, error: BaseException) -> None:
        """End the pass because of an error here."""
        with self.lock:  # it has begun
            if isinstance(error, Ended) or self.mail.progress.is_over:
                return
        self.end(describe(error, self._desk.me, pickles=self._desk.pickles), error)

    def end(self, failed: Failed, error: BaseException | None = None) -> None:
        """End the pass here; those who gave us work and those we gave some are told."""
        with self.lock:
            if self.mail.progress.is_over:
                return
            actions = self.mail.progress.failed()
            self.error = error
        self._conclude(failed)
        for action in actions:
            if isinstance(action, Abort):
                self._talk.abort(action.to, failed)
            else:
                self.mail.wake(action.send)

    def worker_gone(self, worker: int, name: str) -> None:
        """Fail if that one is needed."""
        with self.lock:
            is_needed = self.mail.progress.is_expecting(worker)
        if is_needed or owner(self.number) == worker:
            self.fail(WorkerLostError(name, "it went away during a backward pass"))

    def released(self) -> None:
        """Fail, because the context is over."""
        self.fail(unknown(self._context.id))

    def _begin(self, start: Start) -> None:
        me = self._desk.me
        try:
            record = self._context.records.pop(self.number, None)
            enter = partial(self._desk.contexts.entered, self._context)
            self._work = Work(self._context, start, self._flags, record, enter)
            self.mail.progress = Progress(me, self._work.plan, self._engager)
            if record is not None:
                self.mail.gradients.update(record.parked())
                arrived = [deliveries.arrived(*one) for one in record.parked().items()]
                self.mail.progress.resumed(arrived, start.parked)
        except BaseException:
            self.mail.progress = Progress(me, Plan((), {}, {}), self._engager)
            raise

    def _conclude(self, outcome: Outcome) -> None:
        with self._context.lock:
            self._context.parts.pop(self.number, None)
            self._context.ended.add(self.number, self._engager)
        with self.lock:
            self._end.outcome = outcome
            tells = not (self._is_told or self._asking)
            self._is_told |= tells
        self.mail.gradients.clear()
        self._ended.ring()
        if self._errands is not None:
            self._errands.end()
        if tells:
            assert self._engager is not None
            self._talk.over(self._engager, outcome)

    def _serve(self) -> None:
        """Do in this thread what need not wait for other workers, until the pass has ended."""
        self._errands = self._errands or Errands()
        if self.outcome is None:
            self._errands.serve(self._go_on_alone, self._desk.executor)

    def _wait(self, is_enough: Callable[[], bool] = lambda: False) -> None:
        """Until the pass has ended; run what has roots and could not be run before."""
        while self.outcome is None and not is_enough():
            if self._for_leader:
                count = len(self._for_leader)  # others may add some
                self._go_on_alone([self._for_leader.pop() for _ in range(count)])
            elif not self._talk.read():
                with self._desk.executor.waiting():
                    self._ended.wait(None)

    # What is said

    def _answer(self, question: Question, *, is_engaging: bool = False) -> Any:
        """The answer to a question: the end, if it has come and is to be told now."""
        sender, carried = question
        words = None
        with self.lock:
            is_over = self.mail.progress.is_over
            outcome, tells = self.outcome, False
            if sender == self._engager:
                self._asking -= 1
                tells = outcome is not None and not self._is_told
                self._is_told |= tells
            elif is_over and not self.mail.progress.has_failed:
                outcome, tells = Done(), True
            if not is_over:
                words = self.mail.progress.answer(sender)
        if isinstance(outcome, Failed):
            return pack(outcome)
        if tells and outcome is not None:
            return pack(Done([*carried, *outcome.deliveries]))
        return pack(Noted(is_engaging, words, carried))

    def _hear(self, worker: int, look: Look, *, is_last: bool = False) -> list[Action]:
        """An answer came, or a worker's last word: what follows."""
        answer = unpack(look())
        if isinstance(answer, Failed):
            self.end(answer)
            return []
        with self.lock:
            progress = self.mail.progress
            if progress.is_over:
                return []
            sends = self.mail.receive(worker, answer.deliveries)
            actions: list[Action]
            if is_last:
                actions = progress.ended(worker, sends)
            elif isinstance(answer, Done):
                actions = progress.answered(worker, Answer(sends, None, True))
            else:
                said = Answer(sends, answer.words, False, answer.is_engaged)
                actions = progress.answered(worker, said)
        return actions

    def _answered(self, worker: int, look: Look, is_last: bool = False) -> None:
        """An answer came to a thread that has other things to do than to wait for more."""
        try:
            actions = self._hear(worker, look, is_last=is_last)
            self._go_on(self._act(actions), is_free=False)
        except BaseException as error:  # noqa: BLE001 user code
            self.fail(error)

    # What is done

    def _act(self, actions: Iterable[Action]) -> list[Run]:
        """Do what is to be done; the runs that are left to this thread."""
        runs: list[Run] = []
        for action in actions:
            if type(action) is Run:
                runs.append(action)
            elif type(action) is Finish:
                self._conclude(Done())
            elif type(action) is Tell:
                self._talk.post(Message(action.to, action.words, ()), self._answered)
            elif type(action) is Wake:
                self.mail.wake(action.send)
            elif type(action) is Narrow:
                runs += self._narrow(action.piece, action.sends)
            elif type(action) is Reach:
                recvs = self._work.reach(action.piece, action.sends)
                with self.lock:
                    more = self.mail.progress.reached(recvs)
                runs += self._act(more)
        return [run for run in runs if not self._is_handed_over(run)]

    def _is_handed_over(self, run: Run) -> bool:
        """Whether a run is a task of its own; it is made one."""
        if self._work.has_roots(run.piece):
            self._for_leader.append(run)
            self._ended.ring()
            return True
        if not run.may_wait and not engine.is_inside():
            return self._errands is not None and self._errands.leave(run)
        self._submit(run)
        return True

    def _submit(self, run: Run) -> None:
        self._desk.executor.submit(partial(self._go_on_alone, [run]))

    def _go_on_alone(self, runs: list[Run]) -> None:
        try:
            self._go_on(runs, is_free=self._errands is None)
        except BaseException as error:  # noqa: BLE001 user code
            self.fail(error)

    def _go_on(
        self, runs: list[Run], question: Question | None = None, is_free: bool = True
    ) -> None:
        """Run what there is to be run. `is_free`: this thread may wait for what follows."""
        while runs:
            if len(runs) > 1:
                runs.sort(key=lambda run: run.may_wait)  # those that need not, first
            leaving = self._run(runs.pop(0), runs, question)
            last = None
            if is_free and not runs and not (question and question.deliveries):
                last = leaving.pop() if leaving and self._talk.can_ask() else None
            for message in leaving:
                self._talk.post(message, self._answered)
            if last is not None:
                runs += self._act(self._hear(last.to, self._talk.ask(last)))

    def _narrow(self, piece: int, sends: tuple[Slot, ...]) -> list[Run]:
        recvs = self._work.narrow(piece, sends)
        with self.lock:
            actions = self.mail.progress.narrowed(piece, sends, recvs)
        return self._act(actions)

    def _run(
        self, run: Run, more: list[Run], question: Question | None
    ) -> list[Message]:
        """Run a piece; the messages that follow. What else can be run is put with `more`."""
        if not self._work.is_whole(run):
            more += self._narrow(run.piece, run.sends)
        given = None if run.may_wait or engine.is_profiled() else self.mail.gradients
        exchange = Exchange(run, self.mail.collect, self.deliver, self._end.has_come)
        for recv, gradients in self._work.execute(run.piece, exchange, given):
            more += self._act(self.mail.put(recv, gradients, exchange.held))
        held = exchange.held
        with self.lock:
            progress = self.mail.progress
            if progress.is_over:
                return []
            if question is not None and question.sender in held:
                question.deliveries.extend(held.pop(question.sender))
            engager = -1 if self._engager is None else self._engager
            last = held.pop(engager, None)
            leaving = [Message(to, progress.speak(to), held[to]) for to in held]
            actions = progress.ran(run)
            if last and not progress.is_over:
                leaving.append(Message(engager, progress.speak(engager), last))
                last = None
        if last:  # its end, and nobody waits for it here
            actions.pop()
            self._conclude(Done(last))
        more += self._act(actions)
        return leaving

    def deliver(self, exchange: Exchange, recv: Crossing, gradients: Gradients) -> None:
        """A recv was run by the engine: send its gradients to where its tensors came from."""
        run = exchange.run
        may_hold = not run.may_wait and self._work.is_last(run.piece, recv.id)
        held = exchange.held if may_hold else {}
        actions = self.mail.put(recv, gradients, held)
        if not may_hold and held:
            (to,) = held
            with self.lock:
                message = Message(to, self.mail.progress.speak(to), held[to])
            self._talk.post(message, self._answered)
        for run in self._act(actions):  # on a thread of the engine's own
            self._submit(run)
