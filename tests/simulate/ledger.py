"""Simulated worlds of references over time: the real ledgers, a clock, a network that fails.

The workers are those of `references.py`, which check themselves at each step. Here they have users
who call, pass references on, return and drop them; timeouts, retries and the notifier's moments by
the clock; a network that delays, loses, repeats, reorders and is cut; and they crash at any step.
At the end nothing goes wrong any more and all handles are dropped: then nothing may be left.
"""

from __future__ import annotations

import traceback
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from gradwire._rpc.members import Seen
from gradwire._rref.messages import Adopt, Notes, Recall

from .network import Faults, Network
from .packets import Body, Gone, Request
from .references import AGAIN, Handle, Running, SimulatedWorker, World
from .simulation import Simulation, Wrong

_GATHER, _RETRY = 0.03, 2.0
"""As in `_rref/notifier.py`."""
_PATIENCE = 2.0
"""Seconds before the receiver of a reference is asked what became of it."""
_LONG = 20.0
"""Seconds that users are active."""


class TimedWorker(SimulatedWorker):
    """A worker with a clock."""

    def __init__(self, me: int, world: TimedWorld) -> None:
        super().__init__(me, world)
        self.world: TimedWorld = world
        self.has_alarm = False
        self.seen: dict[int, Seen] = defaultdict(Seen)

    @property
    def is_dead(self) -> bool:
        return self.me in self.world.dead

    def receive(self, sender: int, body: Body) -> None:
        if isinstance(body, Request) and not self.seen[sender].is_new(body.call):
            return
        super().receive(sender, body)

    def _send_call(self, to: int, handles: list[Handle], made: Handle | None) -> None:
        super()._send_call(to, handles, made)
        call = next(reversed(self.sent))
        timeout = self.world.chance.choice((0.1, 3.0, 30.0))
        self.world.after(
            timeout, self, lambda: self.time_out(call), lambda: call in self.sent
        )

    def ask(
        self, to: int, message: Adopt | Notes | Recall, then: Callable[[Any], None]
    ) -> None:
        super().ask(to, message, then)
        if to not in self.gone:
            number = next(reversed(self.asked))
            self.world.after(
                _RETRY,
                self,
                lambda: self.answered(number, AGAIN),
                lambda: number in self.asked,
            )

    def set_alarm(self) -> None:
        """See to it that the notifier looks soon, if there is something to say."""
        if self.has_alarm or not (self.dropped or self.outbox or self.doubts):
            return
        self.has_alarm = True
        pause = _GATHER if self.dropped or self.outbox else _PATIENCE
        self.world.after(pause * (1 + self.world.chance.random()), self, self.alarm)

    def alarm(self) -> None:
        self.has_alarm = False
        self.tidy(ask=self.world.is_ending or self.world.chance.random() < 0.5)

    def finish(self, running: Running) -> None:
        """A function returns, or raises."""
        if running in self.running:
            handles = self.world.some_handles(self)
            self.answer(running, handles, is_ok=self.world.chance.random() < 0.9)
            if self.world.chance.random() < 0.5:
                self.let_go(handles)


class TimedWorld(World):
    """Workers, their users, and what goes wrong."""

    def __init__(self, seed: int, crash_at: int | None = None) -> None:
        """`crash_at`: the step at which a worker crashes; None leaves it to the seed."""
        self.simulation = Simulation(seed)
        self.chance = chance = self.simulation.chance
        size = chance.randint(2, 5)
        super().__init__(size)
        self.workers: list[TimedWorker] = [TimedWorker(i, self) for i in range(size)]
        self.wire = Network(self.simulation, Faults.drawn(chance), self._arrive)
        self.is_ending = False
        self._functions: set[tuple[int, Running]] = set()
        steps = [
            chance.randrange(200) for _ in range(chance.choice((0, 0, 0, 1, 1, 2)))
        ]
        for step in steps if crash_at is None else [crash_at]:
            self.simulation.at_step[step] = self.crash

    def run(self) -> None:
        """Until nothing more happens.

        Raises:
            Wrong: something happened that must not.
        """
        try:
            for _ in range(self.chance.randint(5, 30)):
                worker = self.chance.choice(self.workers)
                when = self.chance.random() * self.chance.choice((0.1, _LONG))
                self.after(when, worker, lambda w=worker: self._act(w))
            self.simulation.after(_LONG, self.end)
            if self.chance.random() < 0.2:
                self.simulation.after(self.chance.random() * _LONG, self._cut)
            self.simulation.run()
            self._drop_all()
            for worker in self.living:
                self.check_empty(worker)
        except Wrong:
            raise
        except (AssertionError, KeyError) as error:
            where = traceback.extract_tb(error.__traceback__)[-1].line
            raise Wrong(f"{where} {error}") from error

    def after(
        self,
        seconds: float,
        worker: TimedWorker,
        event: Callable[[], object],
        condition: Callable[[], bool] = lambda: True,
    ) -> None:
        """Have a worker do something later, if it lives then and there is still reason to."""
        self.simulation.after(seconds, lambda: self._happens(worker, event, condition))

    def _happens(
        self,
        worker: TimedWorker,
        event: Callable[[], object],
        condition: Callable[[], bool] = lambda: True,
    ) -> None:
        if worker.is_dead or not condition():
            return
        event()
        for running in worker.running:
            if (worker.me, running) not in self._functions:
                self._functions.add((worker.me, running))
                seconds = self.chance.choice((0.0, 1.0)) * self.chance.random()
                self.after(seconds, worker, lambda r=running: worker.finish(r))
        self.check_around(worker)
        worker.set_alarm()

    # What users do

    def _act(self, worker: TimedWorker) -> None:
        action = self.chance.choice((self._own, self._remote, self._call, self._drop))
        action(worker)

    def _own(self, worker: TimedWorker) -> None:
        worker.own()
        self._call(worker)

    def _remote(self, worker: TimedWorker) -> None:
        others = [other for other in self._known_to(worker) if other != worker.me]
        if others:
            worker.remote(self.chance.choice(others), self.some_handles(worker))
            self._call(worker)

    def _call(self, worker: TimedWorker) -> None:
        """With references, which may be dropped at once."""
        handles = self.some_handles(worker)
        worker.call(self.chance.choice(self._known_to(worker)), handles)
        if self.chance.random() < 0.5:
            worker.let_go(handles)

    def _drop(self, worker: TimedWorker) -> None:
        worker.let_go(self.some_handles(worker))

    def _known_to(self, worker: TimedWorker) -> list[int]:
        return [w.me for w in self.workers if w.me not in worker.gone]

    def some_handles(self, worker: TimedWorker) -> list[Handle]:
        good = [
            handle
            for handle in worker.handles
            if handle.is_good and handle.holding.owner not in worker.gone
        ]
        return self.chance.sample(good, min(len(good), self.chance.randint(0, 2)))

    # What goes wrong

    def post(self, sender: int, to: int, body: Body) -> None:
        self.wire.send(sender, to, body)

    def _arrive(self, sender: int, to: int, body: Body) -> None:
        worker = self.workers[to]
        self._happens(worker, lambda: worker.receive(sender, body))

    def crash(self) -> None:
        """One worker; the others hear of it at some time."""
        if len(self.living) < 2:
            return
        dead = self.chance.choice(self.living).me
        self.simulation.note(f"{dead} crashes")
        self.dead.add(dead)
        for survivor in self.living:
            self.wire.send_surely(dead, survivor.me, Gone())

    def _cut(self) -> None:
        one, other = self.chance.sample(range(len(self.workers)), 2)
        self.wire.cut(one, other, self.chance.random() * 10)

    # The end

    def end(self) -> None:
        """Nothing more goes wrong, and users want nothing more."""
        self.is_ending = True
        self.wire.mend()
        self._let_go_of_all()

    def _drop_all(self) -> None:
        """Drop what still came, until nothing comes."""
        for _ in range(50):
            if not any(worker.handles or worker.running for worker in self.living):
                return
            self._let_go_of_all()
            self.simulation.run()
        raise Wrong("references keep coming")

    def _let_go_of_all(self) -> None:
        for worker in self.living:
            worker.let_go(list(worker.handles))
            worker.set_alarm()
