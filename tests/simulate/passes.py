"""Simulated backward passes: real states on every worker, a made-up graph and network.

Workers run their segments as torch's engine does, and say to each other what `pass_driver.py`
would. Chance decides the graph, which message arrives next, who goes on next, what is said twice,
and what goes wrong. Whoever runs is checked: gradients go exactly where the roots' gradients flow,
slot by slot.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from gradwire._autograd.pass_state import (
    ROOTS,
    Action,
    Indexes,
    Narrow,
    PassState,
    Reach,
    Run,
    Step,
    Void,
    Wake,
)

from .simulation import Simulation, Wrong

Slot = tuple[int, int]
"""A tensor of a message: the message's number, and which of its tensors."""
Slots = frozenset[Slot]


@dataclass
class Source:
    """Where gradients begin on a worker: a root (no message), or a slot of a message that left."""

    reach: Slots
    """The slots of recvs that it leads to."""
    group: int
    slot: Slot | None = None
    to: int = -1


@dataclass
class Graph:
    """Of one worker."""

    sources: list[Source] = field(default_factory=list)
    recvs: dict[Slot, int] = field(default_factory=dict)

    def add(self, reaches: Iterable[Slots], message: int | None, to: int) -> None:
        """Slots of one message, or roots, which are one segment each."""
        group = len(self.sources)
        for index, reach in enumerate(reaches):
            slot = None if message is None else (message, index)
            self.sources.append(Source(reach, group, slot, to))
        self.join()

    def join(self) -> None:
        """Sources that lead to a common recv are one segment."""
        first: dict[int, Source] = {}
        for source in self.sources:
            for message, _ in source.reach:
                other = first.setdefault(message, source)
                if other.group != source.group:
                    self.merge(other.group, source.group)

    def merge(self, one: int, other: int) -> None:
        for source in self.sources:
            if source.group == other:
                source.group = one

    def segments(self) -> list[list[Source]]:
        groups: dict[int, list[Source]] = {}
        for source in self.sources:
            groups.setdefault(source.group, []).append(source)
        for group in groups.values():
            group.sort(key=lambda source: source.slot or (0, 0))
        return list(groups.values())


@dataclass
class World:
    """What was recorded in the forward."""

    graphs: list[Graph]
    nothing: set[Slot] = field(default_factory=set)
    """Of recvs, slots that a Function gives None for."""

    def live(self, nothing: Iterable[Slot] = ()) -> set[Slot]:
        """The slots that get gradients: those that the roots' gradients flow back to."""
        found: set[Slot] = set()
        by_slot = {s.slot: s for graph in self.graphs for s in graph.sources if s.slot}
        todo = [s for s in self.graphs[0].sources if s.slot is None]
        while todo:
            for slot in todo.pop().reach:
                if slot not in found and slot not in nothing:
                    found.add(slot)
                    todo.append(by_slot[slot])
        return found


def draw(
    chance: random.Random, *, most_workers: int = 4, most_messages: int = 14
) -> World:
    """Messages in order of time; each leads to what arrived before it on the same worker."""
    graphs = [Graph() for _ in range(chance.randint(1, most_workers))]
    is_lossy = chance.random() < 0.3
    for number in range(1, chance.randint(1, most_messages)):
        worker = chance.randrange(len(graphs))
        to = chance.randrange(len(graphs))
        count = chance.choice((1, 1, 1, 2, 3))
        reaches = [reached(chance, graphs[worker]) for _ in range(count)]
        graphs[worker].add(reaches, number, to)
        if not (is_lossy and chance.random() < 0.2):
            for index in range(count):
                graphs[to].recvs[number, index] = worker
    graphs[0].add([reached(chance, graphs[0])], None, -1)
    for graph in graphs:  # some share a node that leads to no recv
        if len(graph.sources) > 1 and chance.random() < 0.3:
            one, other = chance.sample(graph.sources, 2)
            graph.merge(one.group, other.group)
    slots = [slot for graph in graphs for slot in graph.recvs]
    share = chance.choice((0, 0, 0.1, 0.3))
    return World(graphs, {slot for slot in slots if chance.random() < share})


def reached(chance: random.Random, graph: Graph) -> Slots:
    return frozenset(slot for slot in graph.recvs if chance.random() < 0.4)


@dataclass
class Load:
    """What is on its way to a worker."""

    arrived: list[tuple[int, Indexes]] = field(default_factory=list)
    voids: list[int] = field(default_factory=list)
    slots: list[Slot] = field(default_factory=list)

    def add(self, other: Load) -> None:
        self.arrived += other.arrived
        self.voids += other.voids
        self.slots += other.slots


Leaving = dict[int, Load]


@dataclass(eq=False)
class Round:
    """What follows from one request on one worker."""

    worker: Worker
    asker: Round | None
    step: Step
    open: int = 1
    """Runs, and requests that are not answered; and itself, while it is begun."""
    back: Load = field(default_factory=Load)
    parked: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.worker.rounds.append(self)


@dataclass(eq=False)
class Running:
    """A run: what was entered, with gradients or without; the recvs that were run."""

    run: Run
    round: Round
    entered: set[Slot] = field(default_factory=set)
    """Sources that gradients flowed from."""
    seen: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)
    held: Leaving = field(default_factory=dict)
    asleep_for: int | None = None
    """The message that the engine waits for, until it is woken."""


class Worker:
    """One of those that take part."""

    def __init__(self, me: int, graph: Graph) -> None:
        self.me = me
        self.graph = graph
        self._by_source = {
            _number(source): segment
            for segment in graph.segments()
            for source in segment
        }
        self.state = PassState(self)
        self.running: list[Running] = []
        self.rounds: list[Round] = []
        """Those that are not answered."""
        self.has_failed = False

    def segment(self, source: int) -> list[Source]:
        return self._by_source.get(source, [])

    def sources(self, source: int) -> Sequence[int]:
        """See `pass_state.Plan`."""
        return sorted({_number(each) for each in self.segment(source)})

    def kept(self, sources: Mapping[int, Indexes]) -> list[Source]:
        """The sources of one segment, slot by slot."""
        segment = self.segment(next(iter(sources)))
        found = [s for s in segment if _number(s) in sources]
        return [s for s in found if s.slot is None or s.slot[1] in sources[s.slot[0]]]


def _number(source: Source) -> int:
    return ROOTS if source.slot is None else source.slot[0]


def reach_of(sources: Iterable[Source]) -> Slots:
    return frozenset().union(*(source.reach for source in sources))


@dataclass(eq=False)
class Flight:
    """A request on its way, or an answer: of the round that asked."""

    due: float
    what: str
    arrive: Callable[[], None]


class Pass:
    """One pass. Every fourth fails somewhere, or loses a worker, at some step, or at this one."""

    def __init__(
        self,
        seed: int,
        crash_at: int | None = None,
        *,
        world: World | None = None,
        in_order: bool = False,
    ) -> None:
        """`in_order`: nothing is left to chance, what is due first comes first."""
        self.simulation = Simulation(seed)
        self.chance = self.simulation.chance
        self.world = world or draw(self.chance)
        self.flow = self.world.live()
        self.live = self.world.live(self.world.nothing)
        self.workers = [Worker(i, graph) for i, graph in enumerate(self.world.graphs)]
        self.flying: list[Flight] = []
        self.got: set[Slot] = set()
        self.has_ended = False
        self.has_failed = False
        self.messages = 0
        """Requests, each of which has an answer."""
        self.clock = 0.0
        """In ways from a worker to another."""
        self._in_order = in_order
        self._parked: set[int] = set()  # the workers that have parked something
        if crash_at is None and seed % 4 == 3 and not in_order:
            crash_at = self.chance.randrange(40)
        self._fails_at = crash_at

    def run(self) -> None:
        """Until the pass has ended."""
        self.lead(Step.RUN, set())
        while not self.has_ended:
            if self.simulation.steps == self._fails_at:
                self.break_something()
            self.simulation.steps += 1
            moves = self.moves()
            if not moves:
                raise Wrong("it hangs")
            (moves[0] if self._in_order else self.chance.choice(moves))()
        if self.has_failed:
            return
        if self.got != self.live:
            raise Wrong(f"gradients came for {self.got}, not {self.live}")
        if self.flying or any(worker.running for worker in self.workers):
            raise Wrong("it has ended, and somebody is still at work")

    def moves(self) -> list[Callable[[], None]]:
        moves: list[Callable[[], None]] = []
        for worker in self.workers:
            for running in worker.running:
                if self.can_go_on(worker, running):
                    moves.append(partial(self.go_on, worker, running))
                    if self._in_order:
                        return moves
        self.flying.sort(key=lambda flight: flight.due)
        return moves + [partial(self.fly, flight) for flight in self.flying]

    # The leader

    def lead(self, step: Step, parked: set[int]) -> None:
        leader = self.workers[0]
        current = Round(leader, None, step)
        leaving: Leaving = {worker: Load() for worker in parked if worker}
        state = leader.state
        if step is Step.RUN:
            actions = state.came(ROOTS, ())
        else:
            actions = state.announce() if step is Step.ANNOUNCE else state.rest()
        self.go_through(current, actions, leaving)
        self.leave(current)

    def over(self, current: Round) -> None:
        """All requests of the leader are answered."""
        parked = {worker for worker, count in current.parked.items() if count}
        if current.step is Step.RUN:
            self._parked = parked
        leader = self.workers[0]
        is_any = (self._parked or leader.state.parked) and not leader.has_failed
        if current.step is Step.REST or not is_any:
            self.has_ended = True
        else:
            self.lead(Step(current.step + 1), self._parked)

    # The engine

    def look(self, worker: Worker, running: Running) -> tuple[list[int], list[int]]:
        """The messages that a run has not entered, and the recvs that are ready."""
        sources = worker.kept(running.run.sources)
        waiting = [s for s in sources if s.slot and s.slot[0] not in running.seen]
        blocked = {message for message, _ in reach_of(waiting)}
        ready = {message for message, _ in reach_of(sources)} - blocked - running.done
        return sorted({s.slot[0] for s in waiting if s.slot}), sorted(ready)

    def can_go_on(self, worker: Worker, running: Running) -> bool:
        waiting, ready = self.look(worker, running)
        if ready or not waiting or worker.has_failed:
            return True
        if running.asleep_for != waiting[-1]:
            is_known = worker.state.fate(waiting[-1]) is not None
            running.asleep_for = None if is_known else waiting[-1]
        return running.asleep_for is None

    def go_on(self, worker: Worker, running: Running) -> None:
        """Recvs that are ready first, then the newest message, then the end."""
        current = running.round
        if worker.has_failed:
            worker.running.remove(running)
            self.leave(current)
            return
        waiting, ready = self.look(worker, running)
        if ready:
            running.done.add(ready[0])
            self.deliver(worker, running, ready[0])
        elif waiting:
            newest = waiting[-1]
            running.seen.add(newest)
            present = worker.state.fate(newest) or ()
            running.entered |= {(newest, index) for index in present}
        else:
            worker.running.remove(running)
            self.send(current, running.held, at_end=True)
            self.leave(current)

    def deliver(self, worker: Worker, running: Running, message: int) -> None:
        """The gradients of a recv leave, if there are any."""
        sources = worker.kept(running.run.sources)
        entered = [s for s in sources if s.slot is None or s.slot in running.entered]
        reached = reach_of(entered) - self.world.nothing
        present = tuple(sorted(index for m, index in reached if m == message))
        wanted = tuple(sorted(index for m, index in self.live if m == message))
        if present != wanted:
            raise Wrong(f"recv {message} gives gradients for {present}, not {wanted}")
        leaving: Leaving = {} if running.run.waits else running.held
        if present:
            to = self.sender(worker, message)
            leaving.setdefault(to, Load()).arrived.append((message, present))
        else:
            self.do(running.round, worker.state.empty(message), leaving)
        if running.run.waits:
            self.send(running.round, leaving)

    def sender(self, worker: Worker, message: int) -> int:
        return next(w for (m, _), w in worker.graph.recvs.items() if m == message)

    # The driver

    def go_through(
        self, current: Round, actions: Iterable[Action], leaving: Leaving
    ) -> None:
        """Do what is to be done, and send what leaves."""
        self.do(current, actions, leaving)
        self.send(current, leaving)

    def do(self, current: Round, actions: Iterable[Action], leaving: Leaving) -> None:
        worker = current.worker
        for action in actions:
            self.simulation.note(f"worker {worker.me}:", action)
            if type(action) is Run:
                slots = {(m, i) for m, found in action.sources.items() for i in found}
                if not self.flow >= slots:
                    raise Wrong(f"{action} runs what gets no gradient")
                current.open += 1
                worker.running.append(Running(action, current))
            elif type(action) is Narrow:
                recvs = {m for m, _ in reach_of(worker.kept(action.sources))}
                voids = worker.state.narrowed(action.sources, recvs)
                self.do(current, voids, leaving)
            elif type(action) is Reach:
                reached = reach_of(worker.kept(action.sources))
                for slot in worker.state.reached(action.sources, sorted(reached)):
                    to = self.sender(worker, slot[0])
                    leaving.setdefault(to, Load()).slots.append(slot)
            elif type(action) is Wake:
                for running in worker.running:
                    if running.asleep_for == action.send:
                        running.asleep_for = None
            elif type(action) is Void:
                for message in action.recvs:
                    to = self.sender(worker, message)
                    leaving.setdefault(to, Load()).voids.append(message)

    def take(self, current: Round, load: Load, leaving: Leaving) -> None:
        """Something came."""
        worker, state = current.worker, current.worker.state
        actions: list[Action] = []
        before = len(state.parked)
        if current.step is Step.REST:
            actions += state.rest()
        for message, present in load.arrived:
            slots = {(message, index) for index in present}
            if self.got & slots:
                raise Wrong(f"gradients for message {message} came twice")
            self.got |= slots
            actions += state.came(message, present)
            if self.chance.random() < 0.1 and state.came(message, present):
                raise Wrong("what is said again changes something")
        for message in load.voids:
            actions += state.came(message, ())
        if current.step is Step.ANNOUNCE:
            actions += state.announce(load.slots)
            if self.chance.random() < 0.1 and state.announce(load.slots):
                raise Wrong("what is said again changes something")
        if current.step is Step.RUN:
            current.parked[worker.me] += len(state.parked) - before
        self.do(current, actions, leaving)

    def send(self, current: Round, leaving: Leaving, *, at_end: bool = False) -> None:
        me, asker = current.worker.me, current.asker
        while leaving:
            to = next(iter(leaving)) if me not in leaving else me
            load = leaving.pop(to)
            if to == me:
                self.take(current, load, leaving)
            elif (
                asker is not None
                and to == asker.worker.me
                and self.rides(current, at_end=at_end and not leaving)
            ):
                current.back.add(load)
            else:
                self.post(current, to, load)

    def rides(self, current: Round, *, at_end: bool) -> bool:
        """Whether what is for the asker may wait for the answer: in the end nobody else must."""
        if current.step is not Step.REST:
            return True
        return at_end and current.open == 1 and self.chance.random() < 0.8

    def post(self, current: Round, to: int, load: Load) -> None:
        """Ask a worker."""
        self.messages += 1
        current.open += 1
        other = self.workers[to]

        def arrive() -> None:
            asked = Round(other, current, current.step)
            if not other.has_failed:
                leaving: Leaving = {}
                self.take(asked, load, leaving)
                self.send(asked, leaving)
            self.leave(asked)

        what = f"{current.step.name} {current.worker.me} -> {to}: {load}"
        self.fly_off(what, arrive)

    def leave(self, current: Round) -> None:
        """Something of a round is over; if all is, it is answered."""
        current.open -= 1
        if not current.open or current.worker.has_failed:
            self.answer(current)

    def answer(self, current: Round) -> None:
        worker, asker = current.worker, current.asker
        if current not in worker.rounds:
            return
        worker.rounds.remove(current)
        if asker is None:
            self.over(current)
            return

        def arrive() -> None:
            if worker.has_failed:
                self.fail(asker.worker)
            elif not asker.worker.has_failed:
                leaving: Leaving = {}
                asker.parked.update(current.parked)
                self.take(asker, current.back, leaving)
                self.send(asker, leaving)
            self.leave(asker)

        what = f"answer {worker.me} -> {asker.worker.me}: {current.back}"
        self.fly_off(what, arrive)

    def fly_off(self, what: str, arrive: Callable[[], None]) -> None:
        self.flying.append(Flight(self.clock + 1, what, arrive))

    def fly(self, flight: Flight) -> None:
        self.flying.remove(flight)
        self.clock = self.simulation.now = max(self.clock, flight.due)
        self.simulation.note(flight.what)
        flight.arrive()

    # What goes wrong

    def break_something(self) -> None:
        """A backward raises somewhere, or a worker goes away: whoever asks it hears of that."""
        self.fail(self.chance.choice(self.workers))
        if not self.workers[0].has_failed and self.chance.random() < 0.5:
            self.fail(self.workers[0])

    def fail(self, worker: Worker) -> None:
        """Who has asked it hears of it at once."""
        self.simulation.note(f"worker {worker.me} fails")
        self.has_failed = worker.has_failed = True
        for current in list(worker.rounds):
            self.answer(current)


def simulate(seed: int) -> Pass:
    """A pass that this seed decides.

    Raises:
        Wrong: something happened that must not.
    """
    simulated = Pass(seed)
    simulated.run()
    return simulated


def describe(world: World) -> Mapping[str, Any]:
    """A graph, to be read."""
    return {
        f"worker {i}": [(s.slot or "root", s.to, sorted(s.reach)) for s in g.sources]
        for i, g in enumerate(world.graphs)
    }
