"""Simulated backward passes: real progress on every worker, a made-up graph and network.

Workers run their pieces as torch's engine does, and say to each other what `pass_driver.py` would.
Chance decides the graph, which message arrives next, who goes on next, and what goes wrong.
Whoever runs is checked: gradients go exactly where the roots' gradients flow, slot by slot.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gradwire._autograd.actions import (
    Abort,
    Action,
    Answer,
    Arrived,
    Finish,
    Narrow,
    Piece,
    Plan,
    Reach,
    Run,
    Slot,
    Tell,
    Wake,
    Words,
)
from gradwire._autograd.pass_state import Progress

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
        """Slots of one message, or roots, which are one piece each."""
        group = len(self.sources)
        for index, reach in enumerate(reaches):
            slot = None if message is None else (message, index)
            self.sources.append(Source(reach, group, slot, to))
        self.join()

    def join(self) -> None:
        """Sources that lead to a common recv are one piece."""
        first: dict[int, int] = {}
        for source in self.sources:
            for message, _ in source.reach:
                self.merge(first.setdefault(message, source.group), source.group)

    def merge(self, one: int, other: int) -> None:
        for source in self.sources:
            if source.group == other:
                source.group = one

    def pieces(self) -> list[list[Source]]:
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

    def live(self) -> set[Slot]:
        """The slots that get gradients: those that the roots' gradients flow back to."""
        found: set[Slot] = set()
        by_slot = {s.slot: s for graph in self.graphs for s in graph.sources if s.slot}
        todo = [s for s in self.graphs[0].sources if s.slot is None]
        while todo:
            for slot in todo.pop().reach:
                if slot not in found:
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
    return World(graphs)


def reached(chance: random.Random, graph: Graph) -> Slots:
    return frozenset(slot for slot in graph.recvs if chance.random() < 0.4)


@dataclass
class Running:
    """A run: the messages whose gradients have left, and those that were entered."""

    run: Run
    left: set[int] = field(default_factory=set)
    entered: set[int] = field(default_factory=set)


@dataclass
class Worker:
    me: int
    graph: Graph
    pieces: list[list[Source]] = field(default_factory=list)
    progress: Progress | None = None
    engager: int | None = None
    running: list[Running] = field(default_factory=list)
    has_ended: bool = False
    """Its end has come, and is told, or about to be."""
    is_told: bool = False
    """The engager knows that it has ended."""
    held: dict[int, list[Arrived]] = field(default_factory=dict)
    """Gradients that wait for a message, an answer or the end, by worker."""
    questions: list[tuple[int, bool]] = field(default_factory=list)
    """Who is to be answered, and whether that message engaged us."""
    is_gone: bool = False
    knows: bool = False
    """It has been told that the pass has failed."""

    def begin(self, engager: int | None) -> Progress:
        self.engager = engager
        self.pieces = self.graph.pieces()
        pieces = [
            Piece(
                tuple([s.slot for s in group if s.slot]),
                tuple(sorted(frozenset().union(*(s.reach for s in group)))),
                any(s.slot is None for s in group),
            )
            for group in self.pieces
        ]
        sends = {s.slot: s.to for s in self.graph.sources if s.slot}
        plan = Plan(pieces, sends, dict(self.graph.recvs))
        self.progress = Progress(self.me, plan, engager)
        return self.progress

    def kept(self, piece: int, sends: Iterable[Slot]) -> list[Source]:
        slots = (None, *sends)
        return [source for source in self.pieces[piece] if source.slot in slots]


def reach_of(sources: Iterable[Source]) -> Slots:
    return frozenset().union(*(source.reach for source in sources))


@dataclass
class Flight:
    """Something on its way: a step, the answer to one, the word that a worker has ended, or that
    the pass has failed."""

    kind: str
    source: int
    target: int
    arrived: tuple[Arrived, ...] = ()
    content: Words | Answer | None = None
    due: float = 0.0


class Wrong(AssertionError):
    """What must not happen."""


class Simulation:
    """One pass. `fails`: it may fail somewhere, or a worker go away, at some step."""

    def __init__(
        self, seed: int, world: World | None = None, *, fails: bool = False
    ) -> None:
        self.chance = random.Random(seed)
        self.world = world or draw(self.chance)
        self.live = self.world.live()
        self.workers = [Worker(i, graph) for i, graph in enumerate(self.world.graphs)]
        self.flying: list[Flight] = []
        self.got: set[Slot] = set()
        self.has_failed = False
        self.messages = 0
        """Steps, with which their answers, and ends that were told by themselves."""
        self.clock = 0.0
        self._fails_at = self.chance.randrange(40) if fails else -1

    def run(self) -> None:
        """Until the pass has ended everywhere."""
        root = self.workers[0]
        self.do(root, root.begin(None).begun())
        steps = 0
        while not self.is_over():
            if steps == self._fails_at:
                self.break_something()
            steps += 1
            moves = self.moves()
            if not moves:
                if self.is_over():
                    break
                raise Wrong("it hangs")
            self.chance.choice(moves)()
        self.check_end()

    def is_over(self) -> bool:
        if self.has_failed:
            began = [
                w for w in self.workers if w.progress is not None and not w.is_gone
            ]
            return all(w.has_ended or w.progress.is_over for w in began if w.progress)
        return self.workers[0].has_ended

    def check_end(self) -> None:
        if self.has_failed:
            return
        if self.got != self.live:
            raise Wrong(f"gradients came for {self.got}, not {self.live}")
        if any(flight.kind == "step" for flight in self.flying):
            raise Wrong("it has ended, and not all was heard")
        for worker in self.workers:
            if worker.running or (worker.progress is not None and not worker.has_ended):
                raise Wrong(f"worker {worker.me} has not ended")

    def moves(self) -> list[Any]:
        moves: list[Any] = [lambda f=f: self.fly(f) for f in self.flying]
        for worker in self.workers:
            if worker.is_gone:
                continue
            for running in worker.running:
                if self.can_go_on(worker, running):
                    moves.append(lambda w=worker, r=running: self.go_on(w, r))
            if worker.questions:
                moves.append(lambda w=worker: self.answer(w))
        return moves

    # The engine

    def look(self, worker: Worker, running: Running) -> tuple[list[int], list[int]]:
        """The messages that a run has not entered, and the recvs that are ready."""
        sources = worker.kept(running.run.piece, running.run.sends)
        waiting = [s for s in sources if s.slot and s.slot[0] not in running.entered]
        blocked = {message for message, _ in reach_of(waiting)}
        ready = {message for message, _ in reach_of(sources)} - blocked - running.left
        return sorted({s.slot[0] for s in waiting if s.slot}), sorted(ready)

    def can_go_on(self, worker: Worker, running: Running) -> bool:
        waiting, ready = self.look(worker, running)
        progress = _begun(worker)
        if ready or not waiting or progress.is_over:
            return True
        return progress.fate(waiting[-1]) is not None

    def go_on(self, worker: Worker, running: Running) -> None:
        """Recvs that are ready first, then the newest message, then the end."""
        progress = _begun(worker)
        if progress.is_over:
            worker.running.remove(running)
            return
        waiting, ready = self.look(worker, running)
        if ready:
            running.left.add(ready[0])
            sources = worker.kept(running.run.piece, running.run.sends)
            self.deliver(worker, running.run, ready[0], reach_of(sources))
        elif waiting:
            running.entered.add(waiting[-1])
        else:
            worker.running.remove(running)
            self.send_held(worker)
            self.do(worker, progress.ran(running.run))
            if not progress.is_over:
                self.send_held(worker, also_engager=True)

    def deliver(self, worker: Worker, run: Run, message: int, reached: Slots) -> None:
        """The gradients of a recv leave."""
        progress = _begun(worker)
        present = tuple(sorted(index for m, index in reached if m == message))
        wanted = tuple(sorted(index for m, index in self.live if m == message))
        if present != wanted:
            raise Wrong(f"recv {message} gives gradients for {present}, not {wanted}")
        to = next(w for (m, _), w in worker.graph.recvs.items() if m == message)
        progress.left(message)
        if to == worker.me:
            self.take([(message, present)])
            self.do(worker, progress.delivered_here((message, present)))
        elif run.may_wait:
            self.send(worker.me, to, [(message, present)], progress.speak(to))
        else:
            worker.held.setdefault(to, []).append((message, present))

    # What is said

    def send(
        self, source: int, target: int, arrived: Iterable[Arrived], words: Words
    ) -> None:
        self.messages += 1
        self.fly_off(Flight("step", source, target, tuple(arrived), words))

    def fly_off(self, flight: Flight) -> None:
        flight.due = self.clock + 1
        self.flying.append(flight)

    def send_held(self, worker: Worker, *, also_engager: bool = False) -> None:
        """What no answer and no end will take along."""
        progress = _begun(worker)
        asking = {sender for sender, _ in worker.questions}
        for to in sorted(worker.held):
            if to not in asking and (also_engager or to != worker.engager):
                words = progress.speak(to)
                self.send(worker.me, to, worker.held.pop(to), words)

    def answer(self, worker: Worker) -> None:
        """Answer a question; with what there is, and the end if it is to be told now."""
        index = self.chance.randrange(len(worker.questions))
        sender, engages = worker.questions.pop(index)
        progress = _begun(worker)
        held = tuple(worker.held.pop(sender, ()))
        if progress.has_failed:
            self.fly_off(Flight("failed", worker.me, sender))
            return
        if progress.is_over and sender != worker.engager:
            answer = Answer(held, is_done=True)
        elif progress.is_over and not worker.is_told:
            worker.is_told = True
            answer = Answer(held, is_done=True)
        else:
            words = None if progress.is_over else progress.answer(sender)
            answer = Answer(held, words, is_engaged=engages)
        self.fly_off(Flight("answer", worker.me, sender, held, answer))

    def fly(self, flight: Flight) -> None:
        """It arrives."""
        self.flying.remove(flight)
        self.clock = max(self.clock, flight.due)
        worker, source = self.workers[flight.target], flight.source
        if worker.is_gone:
            if flight.kind == "step" and not self.workers[source].is_gone:
                self.fail(self.workers[source])
            return
        progress = worker.progress
        if flight.kind == "failed":
            worker.knows = True
            if progress is not None:
                self.fail(worker)
            return
        if worker.knows or (progress is not None and progress.has_failed):
            if flight.kind == "step":
                self.fly_off(Flight("failed", worker.me, source))
            return
        self.take(flight.arrived)
        if flight.kind == "answer":
            assert isinstance(flight.content, Answer)
            self.do(worker, _begun(worker).answered(source, flight.content))
        elif flight.kind == "over":
            self.do(worker, _begun(worker).ended(source, flight.arrived))
        else:
            assert isinstance(flight.content, Words)
            self.step(worker, source, flight.content, flight.arrived)

    def step(
        self, worker: Worker, source: int, words: Words, arrived: Iterable[Arrived]
    ) -> None:
        worker.questions.append((source, worker.progress is None))
        if worker.progress is None:
            progress = worker.begin(source)
            progress.heard(source, words, arrived)
            self.do(worker, progress.begun())
        elif not worker.progress.is_over:
            worker.progress.heard(source, words, arrived)
            self.do(worker, worker.progress.settled())

    def take(self, arrived: Iterable[Arrived]) -> None:
        for message, present in arrived:
            slots = {(message, index) for index in present}
            if self.got & slots:
                raise Wrong(f"gradients for message {message} came twice")
            self.got |= slots

    # What is done

    def do(self, worker: Worker, actions: Iterable[Action]) -> None:
        progress = _begun(worker)
        for action in actions:
            if isinstance(action, Run):
                if not self.live.issuperset(action.sends):
                    raise Wrong(f"{action} runs what gets no gradient")
                worker.running.append(Running(action))
            if isinstance(action, Run | Narrow):
                recvs = reach_of(worker.kept(action.piece, action.sends))
                self.do(worker, progress.narrowed(action.piece, action.sends, recvs))
            elif isinstance(action, Reach):
                recvs = reach_of(worker.kept(action.piece, action.sends))
                self.do(worker, progress.reached(recvs))
            elif isinstance(action, Tell):
                self.send(worker.me, action.to, (), action.words)
            elif isinstance(action, Finish):
                self.end(worker)

    def end(self, worker: Worker) -> None:
        worker.has_ended = True
        to, asking = worker.engager, [sender for sender, _ in worker.questions]
        if to is not None and to not in asking and not worker.is_told:
            worker.is_told = True
            held = tuple(worker.held.pop(to, ()))
            self.messages += 1
            self.fly_off(Flight("over", worker.me, to, held))

    # What goes wrong

    def break_something(self) -> None:
        """A backward raises somewhere; or a worker goes away, and all hear of it."""
        began = [w for w in self.workers if w.progress is not None]
        worker = self.chance.choice(began)
        if worker.progress is None or worker.progress.is_over:
            return
        self.has_failed = True
        if worker.me and self.chance.random() < 0.5:
            worker.is_gone = True
            self.flying = [f for f in self.flying if f.source != worker.me]
            for other in began:
                progress = _begun(other)
                is_needed = progress.is_expecting(worker.me)
                if other is not worker and not progress.is_over and is_needed:
                    self.fail(other)
            return
        self.fail(worker)

    def fail(self, worker: Worker) -> None:
        """The pass has failed here: who gave us work is told, and those who have some of ours."""
        progress = _begun(worker)
        if progress.is_over:
            return
        actions = progress.failed()
        if worker.engager is not None:
            self.fly_off(Flight("failed", worker.me, worker.engager))
        for action in actions:
            if isinstance(action, Abort):
                self.fly_off(Flight("failed", worker.me, action.to))
            elif not isinstance(action, Wake):
                raise Wrong(f"{action} after a failure")


def _begun(worker: Worker) -> Progress:
    assert worker.progress is not None
    return worker.progress


def simulate(seed: int) -> Simulation:
    """A pass that this seed decides.

    Raises:
        Wrong: something happened that must not.
    """
    simulation = Simulation(seed, fails=seed % 4 == 3)
    simulation.run()
    return simulation


def describe(world: World) -> Mapping[str, Any]:
    """A graph, to be read."""
    return {
        f"worker {i}": [(s.slot or "root", s.to, sorted(s.reach)) for s in g.sources]
        for i, g in enumerate(world.graphs)
    }
