"""Progress of a pass, pure: by hand, and in simulated worlds where messages overtake each other."""

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire._autograd.actions import (
    Abort,
    Action,
    Answer,
    Finish,
    Narrow,
    Piece,
    Plan,
    Reach,
    Run,
    Tell,
    Wake,
    Words,
)
from gradwire._autograd.pass_state import Progress

ROOTS = Piece(has_roots=True)
DONE = Answer(is_done=True)


def words(
    voids: Iterable[int] = (), listed: tuple[int, ...] | None = None, awaiting: int = 0
) -> Words:
    return Words(tuple(voids), listed, awaiting)


def asking() -> Progress:
    """A pass whose roots have run, and that waits for the answer of worker 1."""
    pieces = [Piece(recvs=(3,), has_roots=True), Piece(sends=(1,)), Piece(sends=(2,))]
    progress = Progress(0, Plan(pieces, {1: 1, 2: 1}, {3: 1}))
    (run,) = progress.begun()
    assert isinstance(run, Run)
    progress.left(3)
    progress.speak(1)
    assert progress.ran(run) == []
    return progress


# By hand


def test_a_pass_without_messages_runs_its_roots_and_is_over() -> None:
    progress = Progress(0, Plan([ROOTS], {}, {}))
    (run,) = progress.begun()
    assert run == Run(0, (), may_wait=False)
    assert progress.ran(run) == [Finish()]
    assert progress.is_over


def test_gradients_for_the_engager_go_with_the_answer() -> None:
    plan = Plan([Piece(sends=(1,), recvs=(2,))], {1: 0}, {2: 0})
    progress = Progress(1, plan, engager=0)
    progress.heard(0, words(listed=(1,), awaiting=1), [1])
    (run,) = progress.begun()
    assert run == Run(0, (1,), may_wait=False)
    progress.left(2)
    assert progress.ran(run) == [Finish()]


def test_a_void_send_skips_its_piece_and_voids_what_is_behind() -> None:
    plan = Plan([Piece(sends=(1,), recvs=(2,))], {1: 0}, {2: 0})
    progress = Progress(1, plan, engager=0)
    progress.heard(0, words(voids=[1], listed=(1,), awaiting=1), [])
    assert progress.begun() == [Finish()]


def test_a_send_that_never_arrived_is_void() -> None:
    plan = Plan([Piece(sends=(1,))], {1: 0}, {})
    progress = Progress(1, plan, engager=0)
    progress.heard(0, words(listed=(), awaiting=0), [])
    assert progress.begun() == [Finish()]


def test_one_that_waits_for_what_never_arrived_is_told_so() -> None:
    progress = Progress(1, Plan([], {}, {}), engager=0)
    progress.heard(0, words(listed=(), awaiting=1), [])
    assert progress.begun() == [Finish()]  # and that tells it


def test_one_that_waits_for_what_never_arrived_is_told_at_once() -> None:
    progress = Progress(1, Plan([Piece(sends=(1,))], {1: 2}, {}), engager=0)
    progress.heard(0, words(listed=(), awaiting=1), [])
    assert progress.begun() == [Tell(2, Words((), (), 1))]
    assert progress.answer(0) == Words((), (), 0)


def test_a_worker_with_our_sends_is_told_that_the_pass_goes_on() -> None:
    plan = Plan([ROOTS, Piece(sends=(1,))], {1: 1}, {})
    progress = Progress(0, plan)
    (run,) = progress.begun()
    assert isinstance(run, Run)
    assert progress.ran(run) == [Tell(1, Words((), (), 1))]
    assert progress.answered(1, DONE) == [Finish()]


def rooted() -> Progress:
    """A pass whose roots have to be run with a send to worker 1, and reach what came from there."""
    plan = Plan([Piece(sends=(1,), recvs=(2,), has_roots=True)], {1: 1}, {2: 1})
    return Progress(0, plan)


def test_what_could_be_run_but_for_a_send_has_to_ask_first() -> None:
    progress = rooted()
    assert progress.begun() == [Reach(0, ())]
    assert progress.reached([2]) == [Tell(1, Words((), (2,), 1, (2,), asks=True))]
    sure = words()._replace(sure=(1,))
    (run,) = progress.answered(1, Answer((), sure, is_engaged=True))
    assert run == Run(0, (1,), may_wait=True)


def test_who_is_asked_tells_when_it_is_sure() -> None:
    pieces = [Piece(sends=(2,), recvs=(1,)), Piece(sends=(3,))]
    progress = Progress(1, Plan(pieces, {2: 0, 3: 0}, {1: 0}), engager=0)
    progress.heard(0, words(listed=(2, 3), awaiting=1)._replace(asks=True), [])
    assert progress.begun() == []  # the answer is about to leave
    assert progress.answer(0) == Words((), (1,), 2, asks=True)
    progress.heard(0, words(voids=[3])._replace(sure=(2,)), [])
    assert progress.settled() == [Reach(0, (2,))]
    assert progress.reached([1]) == []
    assert progress.answer(0) == Words((), None, 2, sure=(1,))


def test_nobody_is_done_who_still_looks_what_there_is_to_tell() -> None:
    pieces = [Piece(sends=(1, 2), recvs=(3, 4))]
    progress = Progress(1, Plan(pieces, {1: 0, 2: 0}, {3: 0, 4: 2}), engager=0)
    curious = words(listed=(1, 2), awaiting=1)._replace(sure=(1,), asks=True)
    progress.heard(0, curious, [])
    assert progress.begun() == [Reach(0, (1,))]  # takes its time
    progress.answer(0)
    progress.heard(2, words(listed=(), awaiting=1)._replace(asks=True), [])
    assert progress.settled() == [Reach(0, (1,))]  # as does this
    progress.answer(2)
    progress.heard(0, words(voids=[2]), [1])
    (run,) = progress.settled()
    assert run == Run(0, (1,), may_wait=False)
    progress.narrowed(0, (1,), [3])
    progress.left(3)
    assert progress.ran(run) == []
    assert progress.reached([3]) == []
    assert progress.reached([3]) == [Tell(2, Words((4,), (4,), 0))]


def test_what_nothing_reaches_is_void_and_the_rest_is_run_without_it() -> None:
    progress = rooted()
    progress.begun()
    progress.reached([2])
    void = words(voids=[1])
    (run,) = progress.answered(1, Answer((), void, is_engaged=True))
    assert run == Run(0, (), may_wait=False)


def test_gradients_and_voids_may_come_with_an_answer() -> None:
    progress = asking()
    answer = Answer((1,), words(voids=[2]), is_engaged=True)
    (run,) = progress.answered(1, answer)
    assert run == Run(1, (1,), may_wait=False)
    assert progress.fate(2) is False
    assert progress.ran(run) == []  # worker 1 has not ended
    assert progress.ended(1, ()) == [Finish()]


def test_the_answer_says_what_there_is_to_tell() -> None:
    plan = Plan(
        [Piece(sends=(1,), recvs=(3,)), Piece(sends=(2,))], {1: 0, 2: 5}, {3: 0}
    )
    progress = Progress(1, plan, engager=0)
    progress.heard(0, words(voids=[1], listed=(1,), awaiting=1), [])
    assert progress.begun() == [Tell(5, Words((), (), 1))]
    assert progress.answer(0) == Words((3,), (3,), 1)


def test_what_comes_late_from_one_who_has_ended_still_counts() -> None:
    progress = asking()
    assert progress.ended(1, ()) == []  # overtook the answer with the gradients
    assert progress.fate(1) is None
    (run,) = progress.answered(1, Answer((1,), is_engaged=True))
    assert progress.fate(2) is False
    assert isinstance(run, Run)
    assert progress.ran(run) == [Finish()]


def test_voids_wait_for_the_message_that_is_about_to_leave() -> None:
    plan = Plan([Piece(recvs=(1,), has_roots=True)], {}, {1: 1, 2: 1})
    progress = Progress(0, plan)
    (run,) = progress.begun()
    assert isinstance(run, Run)
    progress.left(1)
    assert progress.speak(1) == Words((2,), (1, 2), 0)
    assert progress.ran(run) == []
    assert progress.answered(1, DONE) == [Finish()]


def test_a_piece_starts_with_the_newest_of_its_sends() -> None:
    plan = Plan([Piece(sends=(1, 2), recvs=(3,))], {1: 0, 2: 0}, {3: 0})
    progress = Progress(1, plan, engager=0)
    progress.heard(0, words(listed=(1, 2), awaiting=1), [1])
    assert progress.begun() == []
    progress.heard(0, words(awaiting=1), [2])
    (run,) = progress.settled()
    assert run == Run(0, (1, 2), may_wait=False)


def test_a_piece_may_start_before_all_its_gradients_are_there() -> None:
    plan = Plan([Piece(sends=(1, 2), recvs=(3,))], {1: 0, 2: 0}, {3: 0})
    progress = Progress(1, plan, engager=0)
    sure = words(listed=(1, 2), awaiting=1)._replace(sure=(1,))
    progress.heard(0, sure, [2])
    assert progress.begun() == [Run(0, (1, 2), may_wait=True)]
    progress.heard(0, words(awaiting=1), [1])
    assert progress.settled() == [Wake(1)]


def test_void_sends_are_left_out_and_narrow_the_piece() -> None:
    plan = Plan([Piece(sends=(1, 2), recvs=(3,))], {1: 0, 2: 0}, {3: 5})
    progress = Progress(1, plan, engager=0)
    progress.heard(0, words(voids=[2], listed=(1, 2)), [])
    assert progress.begun() == [Narrow(0, (1,))]
    assert progress.narrowed(0, (1,), []) == [Tell(5, Words((3,), (3,), 0))]
    assert progress.answer(0) is None
    progress.heard(0, words(), [1])
    assert progress.settled() == [Run(0, (1,), may_wait=False)]


def test_what_is_said_again_changes_nothing() -> None:
    plan = Plan([Piece(sends=(1,))], {1: 0}, {})
    progress = Progress(1, plan, engager=0)
    progress.heard(0, words(listed=(1,)), [1])
    (run,) = progress.begun()
    assert isinstance(run, Run)
    progress.heard(0, words(voids=[1], listed=(1,)), [1])
    assert progress.settled() == []
    assert progress.fate(1) is True
    assert progress.ran(run) == [Finish()]


def test_a_failure_wakes_all_who_wait_and_calls_back_those_who_owe() -> None:
    plan = Plan([Piece(sends=(1,), has_roots=True)], {1: 1}, {})
    progress = Progress(0, plan)
    assert len(progress.begun()) == 1
    assert progress.failed() == [Wake(1), Abort(1)]
    assert progress.failed() == []
    assert progress.answered(1, DONE) == []


def test_a_worker_is_needed_as_long_as_something_is_to_come_from_it() -> None:
    plan = Plan([ROOTS, Piece(sends=(1,))], {1: 1}, {})
    progress = Progress(0, plan)
    (run,) = progress.begun()
    assert progress.is_expecting(1)
    assert not progress.is_expecting(2)
    assert isinstance(run, Run)
    progress.ran(run)
    progress.answered(1, DONE)
    assert not progress.is_expecting(1)


# Simulated worlds


Entry = tuple[Run, set[int], set[int]]
"""A run, the recvs it has run and the sends it has entered."""


@dataclass
class Source:
    """A root (no id) or a send; `reach` are the recvs it leads to."""

    reach: frozenset[int]
    group: int
    id: int | None = None
    to: int = -1


@dataclass
class Simulated:
    """A worker of the simulation: its graph, its progress and its runs."""

    me: int
    sources: list[Source] = field(default_factory=list)
    recvs: dict[int, int] = field(default_factory=dict)
    progress: Progress | None = None
    engager: int | None = None
    running: list[Entry] = field(default_factory=list)
    finished: bool = False
    is_told: bool = False
    """The engager knows that it has finished."""
    held: dict[int, list[int]] = field(default_factory=dict)
    """Gradients that wait for a message, an answer or the end, by worker."""
    questions: list[tuple[int, bool]] = field(default_factory=list)
    """Who is to be answered, and whether that message engaged us."""
    got: dict[int, bool] = field(default_factory=dict)

    def plan(self) -> Plan:
        groups: dict[int, list[Source]] = {}
        for source in self.sources:
            groups.setdefault(source.group, []).append(source)
        self.pieces = list(groups.values())
        pieces = [
            Piece(
                tuple(s.id for s in group if s.id is not None),
                tuple(sorted(frozenset().union(*(s.reach for s in group)))),
                any(s.id is None for s in group),
            )
            for group in self.pieces
        ]
        sends = {s.id: s.to for s in self.sources if s.id is not None}
        return Plan(pieces, sends, dict(self.recvs))


class Simulation:
    """Workers that run their pieces and send their messages in an order that chance decides."""

    def __init__(self, chance: random.Random, lost: bool = False) -> None:
        self.chance = chance
        self.workers = [Simulated(i) for i in range(chance.randint(2, 4))]
        self.flying: list[tuple[str, int, int, tuple[int, ...], object]] = []
        self.draw(lost)

    def draw(self, lost: bool) -> None:
        """Sends in order of time; each leads to recvs made before it on the same worker."""
        chance = self.chance
        for number in range(1, chance.randint(1, 14)):
            worker = chance.choice(self.workers)
            to = chance.choice([w for w in self.workers if w is not worker])
            worker.sources.append(self.source(worker, number, to.me))
            if not (lost and chance.random() < 0.2):
                to.recvs[number] = worker.me
        self.workers[0].sources.append(self.source(self.workers[0], None, -1))
        for worker in self.workers:
            self.join(worker)

    def source(self, worker: Simulated, number: int | None, to: int) -> Source:
        reach = [r for r in worker.recvs if self.chance.random() < 0.4]
        return Source(frozenset(reach), len(worker.sources), number, to)

    def join(self, worker: Simulated) -> None:
        """Sources with a common recv are of one group; the roots' pieces are merged above."""
        for one in worker.sources:
            for other in worker.sources:
                if one.reach & other.reach and one.group != other.group:
                    old, new = one.group, other.group
                    for source in worker.sources:
                        if source.group == old:
                            source.group = new

    def expected(self) -> dict[int, bool]:
        """Which sends get gradients: those whose recv is reached from the roots."""
        at = {r: w for w in self.workers for r in w.recvs}
        live: dict[int, bool] = {}
        todo = [s for s in self.workers[0].sources if s.id is None]
        while todo:
            for recv in todo.pop().reach:
                if recv not in live:
                    live[recv] = True
                    sender = self.workers[at[recv].recvs[recv]]
                    todo += [s for s in sender.sources if s.id == recv]
        return live

    def run(self) -> None:
        root = self.workers[0]
        root.progress = Progress(0, root.plan())
        self.do(root, root.progress.begun())
        while not root.finished:
            moves = [lambda i=i: self.fly(i) for i in range(len(self.flying))]
            for worker in self.workers:
                for entry in worker.running:
                    if self.can_go_on(worker, entry):
                        moves.append(lambda w=worker, e=entry: self.go_on(w, e))
                if worker.questions:
                    moves.append(lambda w=worker: self.answer(w))
            assert moves, "it hangs"
            self.chance.choice(moves)()
        assert not [entry for entry in self.flying if entry[0] == "step"]
        assert not any(worker.running for worker in self.workers)

    def look(self, worker: Simulated, entry: Entry) -> tuple[list[Source], list[int]]:
        """Of a run: the sends it has not entered, and the recvs that are ready."""
        run, gone, done = entry
        sources = [s for s in worker.pieces[run.piece] if s.id in (None, *run.sends)]
        ahead = [s for s in sources if s.id is not None and s.id not in done]
        blocked = frozenset().union(*(s.reach for s in ahead))
        reached = frozenset().union(*(s.reach for s in sources))
        return ahead, sorted(reached - blocked - gone)

    def can_go_on(self, worker: Simulated, entry: Entry) -> bool:
        ahead, ready = self.look(worker, entry)
        assert worker.progress is not None
        return (
            bool(ready)
            or not ahead
            or worker.progress.fate(ahead[-1].id or 0) is not None
        )

    def go_on(self, worker: Simulated, entry: Entry) -> None:
        """What the engine does: recvs that are ready first, then the newest send, then the end."""
        run, gone, done = entry
        progress = worker.progress
        assert progress is not None
        ahead, ready = self.look(worker, entry)
        if ready:
            gone.add(ready[0])
            sources = [s for s in worker.pieces[run.piece] if ready[0] in s.reach]
            is_live = any(s.id is None or progress.fate(s.id) for s in sources)
            self.deliver(worker, run, ready[0], is_live)
        elif ahead:
            done.add(ahead[-1].id or 0)
        else:
            worker.running.remove(entry)
            self.send_held(worker)
            self.do(worker, progress.ran(run))
            if not progress.is_over:
                self.send_held(worker, also_engager=True)

    def send_held(self, worker: Simulated, also_engager: bool = False) -> None:
        """What no answer and no end will take along."""
        assert worker.progress is not None
        asking = {sender for sender, _ in worker.questions}
        for to in sorted(worker.held):
            if to not in asking and (also_engager or to != worker.engager):
                words = worker.progress.speak(to)
                held = tuple(worker.held.pop(to))
                self.flying.append(("step", worker.me, to, held, words))

    def answer(self, worker: Simulated) -> None:
        """One of the questions; with what there is, and the end if it is to be told now."""
        index = self.chance.randrange(len(worker.questions))
        sender, engages = worker.questions.pop(index)
        progress = worker.progress
        assert progress is not None
        held = tuple(worker.held.pop(sender, ()))
        if progress.is_over and sender != worker.engager:
            answer = Answer(held, is_done=True)
        elif progress.is_over and not worker.is_told:
            worker.is_told = True
            answer = Answer(held, is_done=True)
        else:
            words = None if progress.is_over else progress.answer(sender)
            answer = Answer(held, words, is_engaged=engages)
        self.flying.append(("answer", worker.me, sender, held, answer))

    def deliver(self, worker: Simulated, run: Run, recv: int, live: bool) -> None:
        assert worker.progress is not None
        if not live:
            self.do(worker, worker.progress.came_empty(recv))
            return
        worker.progress.left(recv)
        to = worker.recvs[recv]
        if not run.may_wait:
            worker.held.setdefault(to, []).append(recv)
            return
        self.flying.append(("step", worker.me, to, (recv,), worker.progress.speak(to)))

    def do(self, worker: Simulated, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Run):
                assert set(action.sends) <= set(self.expected())
                worker.running.append((action, set(), set()))
            if isinstance(action, Run | Narrow):
                ids = (None, *action.sends)
                sources = [s for s in worker.pieces[action.piece] if s.id in ids]
                reach = frozenset().union(*(s.reach for s in sources))
                assert worker.progress is not None
                self.do(
                    worker, worker.progress.narrowed(action.piece, action.sends, reach)
                )
            elif isinstance(action, Reach):
                ids = (None, *action.sends)
                sources = [s for s in worker.pieces[action.piece] if s.id in ids]
                reach = frozenset().union(*(s.reach for s in sources))
                assert worker.progress is not None
                self.do(worker, worker.progress.reached(reach))
            elif isinstance(action, Tell):
                self.flying.append(("step", worker.me, action.to, (), action.words))
            elif isinstance(action, Finish):
                worker.finished = True
                to, asking = worker.engager, [sender for sender, _ in worker.questions]
                if to is not None and to not in asking and not worker.is_told:
                    worker.is_told = True
                    held = tuple(worker.held.pop(to, ()))
                    self.flying.append(("over", worker.me, to, held, None))

    def fly(self, index: int) -> None:
        kind, source, target, delivered, content = self.flying.pop(index)
        worker = self.workers[target]
        for send in delivered:
            worker.got[send] = True
        if isinstance(content, Answer):
            assert worker.progress is not None
            self.do(worker, worker.progress.answered(source, content))
            return
        if kind == "over":
            assert worker.progress is not None
            self.do(worker, worker.progress.ended(source, delivered))
            return
        assert isinstance(content, Words)
        engages = worker.progress is None
        worker.questions.append((source, engages))
        if worker.progress is None:
            worker.engager = source
            worker.progress = Progress(target, worker.plan(), source)
            worker.progress.heard(source, content, delivered)
            self.do(worker, worker.progress.begun())
        elif not worker.progress.is_over:
            worker.progress.heard(source, content, delivered)
            self.do(worker, worker.progress.settled())


@given(st.integers(0, 2**32))
def test_a_pass_ends_everywhere_and_every_send_has_its_fate(seed: int) -> None:
    simulation = Simulation(random.Random(seed))
    simulation.run()
    got = {send for worker in simulation.workers for send in worker.got}
    assert got == set(simulation.expected())
    for worker in simulation.workers:
        if worker.progress is not None:
            assert worker.finished


@given(st.integers(0, 2**32))
def test_messages_that_never_arrived_do_not_hold_up_a_pass(seed: int) -> None:
    simulation = Simulation(random.Random(seed), lost=True)
    simulation.run()
    got = {send for worker in simulation.workers for send in worker.got}
    assert got == set(simulation.expected())


@pytest.mark.parametrize("at", range(8))
def test_a_failure_at_any_moment_ends_the_pass(at: int) -> None:
    simulation = Simulation(random.Random(at))
    root = simulation.workers[0]
    root.progress = Progress(0, root.plan())
    simulation.do(root, root.progress.begun())
    for _ in range(at):
        if simulation.flying:
            simulation.fly(0)
    root.progress.failed()
    assert root.progress.is_over
    assert root.progress.settled() == []
