"""One worker's part in one pass: carries out the actions of its state.

`PassState` (`pass_state.py`) knows what has arrived and what must follow; this file has segments
run, sends requests and wakes waiting threads.

A *round* is the work that one request brings, from another worker or, on the leader, from itself:
the thread that serves it runs what can be run, sends on the results, continues with what comes
back, and responds when nothing is left. That thread waits only if there is a single request to wait
for: so along a chain of calls, gradients travel on the same threads as the calls did. Otherwise it
returns, and whichever thread takes the last response sends ours. The leader's thread waits for
all; what its requests bring in the first step runs in that thread.

A segment that has to wait for gradients inside the engine blocks its thread. It runs last, the
others as tasks of their own. What leaves while it waits is sent at once, and what is for the
requester rides on the response only if that can be sent now: others may be waiting for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch

from .._rpc.function_runner import Later
from .._rpc.futures import CallFuture
from ..errors import CallTimeout
from ..locks import OwnedLock
from . import deliveries
from .messages import Answer, Failed, Header, Load, pack, pack_failed, request, unpack
from .nodes import Crossing, Gradients
from .parts import Ended, Part
from .pass_state import ROOTS, Action, Narrow, Reach, Run, Step, Void, Wake

_DEEPEST = 16  # workers in a chain that wait for each other
_GLANCE = 0.05  # seconds that handling one response may take
_LONG = 0.0003  # seconds of a run after which its results do not wait for the next

Leaving = dict[int, Load]
"""What is to be sent, by worker."""


class Round:
    """What follows from one request. Several threads may serve it, one after the other.

    For the nodes of crossings it is the run in progress (`nodes.Run`).
    """

    _inbox: SimpleQueue[Callable[[], None]]
    """What the leader's thread has to do: in the later steps that may be inside the engine."""

    def __init__(self, part: Part, header: Header, asker: int | None = None) -> None:
        """`asker`: who waits for the response; None: this worker is the leader."""
        self.part = part
        self.asker = asker
        self.parked: dict[int, int] = {} if asker is not None else part.parked
        """By how much what is parked has changed, by worker."""
        self.collect = part.collect
        self.is_over = part.has_ended
        self._host = part.host
        self._header = header
        self._back = Load()  # what there is for the requester
        self._lock = OwnedLock()
        self._open = 1  # working threads, and outstanding requests
        self._asked: list[int] = []  # workers that owe a response
        self._future: torch.futures.Future[Any] | None = None  # of ours
        self._is_served_here = False
        if asker is None:
            self._inbox = SimpleQueue()
            self._coming: dict[CallFuture, None] = {}  # answers
            self._is_served_here = header.step == Step.RUN
        part.rounds.append(self)

    # From the request to the response

    def serve(self, load: Load) -> Any:
        """The response to a request that brought this; or `Later`."""
        assert self.asker is not None
        try:
            leaving: Leaving = {}
            self._go_on(self._take(self.asker, load, leaving), leaving, may_wait=True)
        except BaseException as error:  # noqa: BLE001 user code
            self.part.fail(error)
        with self._lock:
            self._open -= 1
            if self._open and self.part.failed is None:
                self._future = torch.futures.Future()
                return Later(self._future)
        return self._answer()

    def lead(self, actions: Iterable[Action], leaving: Leaving) -> None:
        """Complete everything that follows from these actions, and from what leaves.

        Raises:
            BaseException: any error here, or `Ended`.
        """
        self._go_on(self._act(actions, leaving), leaving, may_wait=True)
        with self._lock:
            self._open -= 1
        while self._open:
            self.part.check()
            self._attend()
        self.part.rounds.remove(self)
        self.part.check()

    def _attend(self) -> None:
        """Wait for work or an event.

        A thread that helps to read a response saves waking another. But meanwhile it notices no
        other response: so it does that only for the last one.
        """
        coming = [*self._coming]
        if self._inbox.empty() and len(coming) == 1 and not coming[0].done():
            try:
                coming[0].wait(_GLANCE)
            except Exception:  # noqa: BLE001 the receiver of the response handles it
                pass
            return
        with self._host.executor.waiting():
            task = self._inbox.get()
        task()

    def _answer(self) -> Any:
        """The response to the requester."""
        part = self.part
        part.rounds.remove(self)
        if part.failed is not None:
            return pack_failed(part.failed)
        return pack(Answer(self._back, self.parked), self._header.flags)

    def _enter(self) -> None:
        with self._lock:
            self._open += 1

    def _leave(self) -> None:
        """A thread has nothing more to do, or has handled a response."""
        with self._lock:
            self._open -= 1
            future = None if self._open else self._future
            self._future = None if future else self._future
            is_over = not self._open
        if future is not None:
            future.set_result(self._answer())
        elif is_over and self.asker is None:
            self._inbox.put(_look)

    def let_go(self) -> set[int]:
        """The pass has failed: respond now. Returns the workers that owe us a response."""
        with self._lock:
            future, self._future = self._future, None
        if future is not None:
            future.set_result(self._answer())
        elif self.asker is None:
            self._inbox.put(_look)
        return {*self._asked}

    # Arrivals

    def _take(self, sender: int, load: Load, leaving: Leaving) -> list[Run]:
        """Record what arrived from a worker; returns what to run."""
        part, step = self.part, self._header.step
        state = part.state
        came = [deliveries.take(part.context, sender, d) for d in load.deliveries]
        actions: list[Action] = []
        with part.lock:
            part.check()
            before = len(state.parked)
            if step == Step.REST:
                actions += state.rest()
            for send, slots, gradients in came:
                if state.fate(send) is None:
                    part.gradients[send] = gradients
                actions += state.came(send, slots)
            for send in load.voids:
                actions += state.came(send, ())
            if step == Step.ANNOUNCE:
                actions += state.announce(load.slots)
            more = len(state.parked) - before
        if more and step == Step.RUN:
            self._note_parked({self._host.me: more})
        return self._act(actions, leaving)

    def _note_parked(self, parked: Any) -> None:
        with self._lock:
            for worker, more in parked.items():
                self.parked[worker] = self.parked.get(worker, 0) + more

    def _act(self, actions: Iterable[Action], leaving: Leaving) -> list[Run]:
        """Carry out actions; runs are left to this thread."""
        part = self.part
        runs: list[Run] = []
        for action in actions:
            if type(action) is Run:
                runs.append(action)
            elif type(action) is Wake:
                part.wake(action.send)
            elif type(action) is Reach:
                recvs = dict(part.runner.reach(action.sources).recvs)
                slots = [(n.crossing.id, i) for n in recvs for i in sorted(recvs[n])]
                with part.lock:
                    slots = part.state.reached(action.sources, slots)
                workers = {node.crossing.id: node.crossing.worker for node in recvs}
                for slot in slots:
                    _at(leaving, workers[slot[0]]).slots.append(slot)
            elif type(action) is Narrow:
                reached = part.runner.reach(action.sources).recvs
                numbers = [node.crossing.id for node in [*reached]]
                with part.lock:
                    voids = part.state.narrowed(action.sources, numbers)
                self._act(voids, leaving)
            elif type(action) is Void:
                known = part.context.recvs
                for number in action.recvs:
                    if number in known:
                        worker = known[number].crossing.worker
                        _at(leaving, worker).voids.append(number)
        return runs

    # Actions

    def _go_on(self, runs: list[Run], leaving: Leaving, *, may_wait: bool) -> None:
        """Run what can be run, and everything that follows."""
        part, me = self.part, self._host.me
        is_rest = self._header.step == Step.REST
        while True:
            part.check()
            if me in leaving:
                runs += self._take_own(leaving)
            elif runs and not (is_rest and all(run.waits for run in runs)):
                self._run_next(runs, leaving)
            elif runs:
                runs = self._wait_in_one(runs, leaving, may_wait=may_wait)
            elif not is_rest and self.asker in leaving:
                with self._lock:
                    self._back.add(leaving.pop(self.asker))
            elif not leaving or (
                is_rest and [*leaving] == [self.asker] and self._ride(leaving)
            ):
                return
            elif may_wait and len(leaving) == 1 and self._may_ask():
                runs += self._ask(leaving)
            else:
                self._send_now(leaving)
                return

    def _run_next(self, runs: list[Run], leaving: Leaving) -> None:
        """Run the first of these that need not wait."""
        if len(runs) == 1:
            self._run(runs.pop(), leaving)
            return
        run = runs.pop([run.waits for run in runs].index(False))
        begun = time.perf_counter()
        self._run(run, leaving)
        if time.perf_counter() - begun > _LONG:
            self.part.check()
            self._post_all(leaving)

    def _wait_in_one(
        self, runs: list[Run], leaving: Leaving, *, may_wait: bool
    ) -> list[Run]:
        """Run what waits: one in this thread. What is left to run: nothing."""
        self._send_now(leaving)
        mine = next((run for run in runs if ROOTS in run.sources), runs[0])
        for run in runs:
            if run is not mine or not may_wait:
                self._submit(run)
        if may_wait:
            self._run(mine, leaving)
        return []

    def _ride(self, leaving: Leaving) -> bool:
        """Whether what is for the requester can ride on the response: nothing else is left."""
        with self._lock:
            if self._open > 1:
                return False
            self._back.add(leaving.popitem()[1])
            return True

    def _run(self, run: Run, leaving: Leaving) -> None:
        """Run a segment; returns its results."""
        part, sources = self.part, run.sources
        given = None if run.waits or part.is_profiled else part.gradients
        for recv, gradients in part.runner.run(sources, given, self):
            self._yielded(recv, gradients, leaving)

    def deliver(self, recv: Crossing, gradients: Gradients) -> None:
        """A recv was run by the engine, which has more to do: others may go on meanwhile."""
        self.part.check()
        leaving: Leaving = {}
        self._yielded(recv, gradients, leaving)
        self._send_now(leaving)

    def _yielded(self, recv: Crossing, gradients: Gradients, leaving: Leaving) -> None:
        """Handle the gradients of a recv."""
        part = self.part
        flags, numbers = self._header.flags, self._host.numbers
        delivery = deliveries.make(part.context, recv, gradients, flags, numbers)
        if delivery is not None:
            _at(leaving, recv.worker).deliveries.append(delivery)
            return
        with part.lock:
            actions = part.state.empty(recv.id)
        self._act(actions, leaving)

    def _send_now(self, leaving: Leaving) -> None:
        """Send all of this; take what is for this worker, and let others do what follows."""
        while self._host.me in leaving:
            for run in self._take_own(leaving):
                self._submit(run)
        self._post_all(leaving)

    def _take_own(self, leaving: Leaving) -> list[Run]:
        """Take what a worker has for itself."""
        me = self._host.me
        load = leaving.pop(me)
        load.deliveries = [*map(deliveries.copied, load.deliveries)]
        return self._take(me, load, leaving)

    def _submit(self, run: Run) -> None:
        """Let another thread do a run."""
        self._enter()
        work = partial(self._go_on, [run], {}, may_wait=True)
        task = partial(self._see_through, work)
        if self._is_served_here:
            self._inbox.put(task)
        else:
            self._host.executor.submit(task)

    def _see_through(self, work: Callable[[], None]) -> None:
        """A thread's work for this round. An error ends the pass."""
        try:
            work()
        except BaseException as error:  # noqa: BLE001 user code
            self.part.fail(error)
        finally:
            self._leave()

    # Requests to others

    def _may_ask(self) -> bool:
        """Whether this thread may wait for a response: a deep chain would block many threads."""
        with self._lock:
            return self._open == 1 and self._header.depth < _DEEPEST

    def _ask(self, leaving: Leaving) -> list[Run]:
        """Send a request and wait; returns what the response requires to be run."""
        to, load = leaving.popitem()
        self._asked.append(to)
        message = request(self._header, load)
        try:
            answer = self._host.ask(to, message, self.part.has_ended)
        except CallTimeout:
            self.part.check()
            raise
        self._asked.remove(to)
        return self._heard(to, self._read(answer), leaving)

    def _post_all(self, leaving: Leaving) -> None:
        """Send requests without waiting."""
        is_rest = self._header.step == Step.REST
        for to in [*leaving]:
            if to == self._host.me:
                continue
            load = leaving.pop(to)
            if to == self.asker and not is_rest:
                with self._lock:
                    self._back.add(load)
            else:
                self._post(to, load)

    def _post(self, to: int, load: Load) -> None:
        self._enter()
        self._asked.append(to)
        try:
            future = self._host.request(to, request(self._header, load))
        except BaseException:
            self._leave()
            raise
        future.fate.seen = True
        if self.asker is None:
            self._coming[future] = None
        future.on_done(partial(self._answered, to, future))

    def _answered(self, worker: int, future: CallFuture) -> None:
        """A response arrived at a thread that does not wait for more."""
        if self.asker is None:
            self._coming.pop(future, None)
        self._asked.remove(worker)
        try:
            answer = self._read(future.value())  # a failure is noticed at once
        except BaseException as error:  # noqa: BLE001 whatever has become of the worker
            self.part.fail(error)
            self._leave()
            return
        work = partial(self._see_to, worker, answer)
        if self._is_served_here:
            self._inbox.put(partial(self._see_through, work))
        else:
            self._see_through(work)

    def _see_to(self, worker: int, answer: Answer) -> None:
        leaving: Leaving = {}
        runs = self._heard(worker, answer, leaving)
        self._go_on(runs, leaving, may_wait=self._is_served_here)

    def _read(self, packed: Any) -> Answer:
        answer = unpack(packed, self._header.flags)
        if type(answer) is Failed:
            self.part.end(answer)
            raise Ended
        assert type(answer) is Answer
        return answer

    def _heard(self, worker: int, answer: Answer, leaving: Leaving) -> list[Run]:
        if answer.parked:
            self._note_parked(answer.parked)
        return self._take(worker, answer.load, leaving) if answer.load else []


def _at(leaving: Leaving, worker: int) -> Load:
    load = leaving.get(worker)
    if load is None:
        load = leaving[worker] = Load()
    return load


def _look() -> None:
    """What the leader's thread does when it is woken for nothing else."""


def lead(part: Part) -> None:
    """Lead a pass. Its outcome is in the part."""
    state = part.state
    try:
        with part.lock:
            actions = state.came(ROOTS, ())
        Round(part, part.header).lead(actions, {})
        if part.parked or state.parked:
            _resolve(part, Step.ANNOUNCE, state.announce)
            _resolve(part, Step.REST, state.rest)
    except BaseException as error:  # noqa: BLE001 user code
        part.fail(error)


def _resolve(part: Part, step: Step, first: Callable[[], list[Action]]) -> None:
    """Run this step on all workers where something is parked. `first`: what to do here."""
    parked = {worker for worker, count in part.parked.items() if count}
    if parked or part.state.parked:
        current = Round(part, Header(*part.header[:4], step))
        with part.lock:
            actions = first()
        current.lead(actions, {worker: Load() for worker in parked - {part.host.me}})
