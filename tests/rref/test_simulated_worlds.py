"""References in simulated worlds: hypothesis chooses what happens, and some stories are told.

Messages come in any order, late, twice or never; time-outs happen whenever hypothesis says so, and
workers die. At the end all is delivered and all handles are dropped, and nothing may be left in any
book.
"""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from gradwire._rref.messages import Adopt, Recall
from tests.simulate.packets import Answer, Ask, Gone, Reply, Request, is_ask
from tests.simulate.references import AGAIN, Handle, SimulatedWorker, World

picks = st.integers(0, 99)
few = st.lists(picks, max_size=2)


class Worlds(RuleBasedStateMachine):
    """All that may happen in a world in which messages come in any order, late or never."""

    @initialize(size=st.integers(2, 5), holders=st.integers(0, 2))
    def start(self, size: int, holders: int) -> None:
        """Some may have a reference to a value of the first."""
        self.size = size
        self.world = World(size)
        first, *others = self.world.workers
        first.own()
        for other in others[:holders]:
            first.call(other.me, first.handles)
        self.world.deliver_all()

    # What users do

    @precondition(lambda self: not all(w.handles for w in self.world.living))
    @rule(who=picks)
    def own(self, who: int) -> None:
        pick(who, [w for w in self.world.living if not w.handles]).own()

    @rule(who=picks, to=picks, what=few)
    def remote(self, who: int, to: int, what: list[int]) -> None:
        worker = pick(who, self.world.living)
        others = [w for w in self.known_to(worker) if w != worker.me]
        if others:
            worker.remote(pick(to, others), self.handles(worker, what))

    @rule(who=picks, to=picks, what=few)
    def call(self, who: int, to: int, what: list[int]) -> None:
        worker = pick(who, self.world.living)
        to = pick(to, self.known_to(worker))
        worker.call(to, self.handles(worker, what))

    @precondition(lambda self: any(w.handles for w in self.world.living))
    @rule(who=picks, to=picks, which=picks, keep=st.booleans())
    def pass_on(self, who: int, to: int, which: int, keep: bool) -> None:
        """A call with a reference, by one who has it, and may drop it at once."""
        worker = pick(who, [w for w in self.world.living if w.handles])
        handles = self.handles(worker, [which])
        worker.call(pick(to, self.known_to(worker)), handles)
        if not keep:
            worker.let_go(handles)

    @precondition(lambda self: any(w.running for w in self.world.living))
    @rule(who=picks, what=few, keep=st.booleans())
    def answer(self, who: int, what: list[int], keep: bool) -> None:
        """A function returns references, and may have others to them or not."""
        worker = pick(who, [w for w in self.world.living if w.running])
        handles = self.handles(worker, what)
        worker.answer(worker.running[0], handles)
        if not keep:
            worker.let_go(handles)

    @precondition(lambda self: any(w.running for w in self.world.living))
    @rule(who=picks)
    def fail(self, who: int) -> None:
        worker = pick(who, [w for w in self.world.living if w.running])
        worker.answer(worker.running[-1], [], is_ok=False)

    @precondition(lambda self: any(w.handles for w in self.world.living))
    @rule(who=picks, which=picks)
    def drop(self, who: int, which: int) -> None:
        worker = pick(who, [w for w in self.world.living if w.handles])
        worker.let_go([pick(which, worker.handles)])

    # What the world does

    @precondition(lambda self: self.world.network)
    @rule(which=picks)
    def deliver(self, which: int) -> None:
        self.world.deliver(which % len(self.world.network))

    @precondition(lambda self: self.world.network)
    @rule()
    def deliver_all(self) -> None:
        self.world.deliver_all()

    @precondition(lambda self: any(is_ask(packet) for packet in self.world.network))
    @rule(which=picks)
    def have_answered(self, which: int) -> None:
        """A control message overtakes all others, and so does its answer."""
        asks = [i for i, packet in enumerate(self.world.network) if is_ask(packet)]
        self.world.deliver(pick(which, asks))
        if self.world.network and isinstance(self.world.network[-1].body, Answer):
            self.world.deliver(-1)

    @precondition(lambda self: self.world.network)
    @rule(which=picks)
    def lose(self, which: int) -> None:
        which %= len(self.world.network)
        if not isinstance(self.world.network[which].body, Gone):
            del self.world.network[which]

    @precondition(lambda self: self.world.network)
    @rule(which=picks)
    def repeat(self, which: int) -> None:
        packet = pick(which, self.world.network)
        if isinstance(packet.body, Ask | Answer):
            self.world.network.append(packet)

    # What workers do in their own time

    @rule(ask=st.booleans())
    def tidy(self, ask: bool) -> None:
        for worker in self.world.living:
            worker.tidy(ask=ask)

    @precondition(lambda self: any(w.sent for w in self.world.living))
    @rule(who=picks, which=picks, ask=st.booleans())
    def time_out(self, who: int, which: int, ask: bool) -> None:
        worker = pick(who, [w for w in self.world.living if w.sent])
        worker.time_out(pick(which, list(worker.sent)))
        worker.tidy(ask=ask)

    @precondition(lambda self: any(w.asked for w in self.world.living))
    @rule(who=picks, which=picks)
    def ask_again(self, who: int, which: int) -> None:
        worker = pick(who, [w for w in self.world.living if w.asked])
        worker.answered(pick(which, list(worker.asked)), AGAIN)

    @invariant()
    def all_is_well(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.wind_up()

    def known_to(self, worker: SimulatedWorker) -> list[int]:
        return [w.me for w in self.world.workers if w.me not in worker.gone]

    def handles(self, worker: SimulatedWorker, which: list[int]) -> list[Handle]:
        good = [
            handle
            for handle in worker.handles
            if handle.is_good and handle.holding.owner not in worker.gone
        ]
        return [pick(number, good) for number in which] if good else []


class WorldsWithDeaths(Worlds):
    """The same where workers die, of which the others hear one by one."""

    @precondition(lambda self: len(self.world.dead) < min(2, self.size - 1))
    @rule(who=picks)
    def kill(self, who: int) -> None:
        self.world.kill(pick(who, self.world.living).me)


def pick(number: int, among: list[Any]) -> Any:
    return among[number % len(among)]


busy = settings(
    max_examples=3 * settings.default.max_examples,
    stateful_step_count=50,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestWorlds = Worlds.TestCase
TestWorlds.settings = busy
TestWorldsWithDeaths = WorldsWithDeaths.TestCase
TestWorldsWithDeaths.settings = busy


# Stories, one by one


def tell(size: int = 4) -> tuple[World, Handle]:
    """Worker 0 has a value to which worker 1 alone has a handle."""
    world = World(size)
    world.workers[0].own()
    world.workers[0].call(1, world.workers[0].handles)
    world.deliver_all()
    for worker in world.workers[:2]:
        for running in list(worker.running):
            worker.answer(running, [])
    world.deliver_all()
    world.workers[0].let_go(list(world.workers[0].handles))
    (handle,) = world.workers[1].handles
    return world, handle


def deliver_one(world: World, kind: type) -> None:
    """Of all that is on its way, deliver the first control message or answer of a kind."""
    for place, (_, _, body) in enumerate(world.network):
        if type(body.message if isinstance(body, Ask) else body) is kind:
            world.deliver(place)
            world.check()
            return
    raise AssertionError(f"no {kind.__name__} in {world.network}")


def test_a_child_is_counted_before_its_parent_may_go() -> None:
    world, handle = tell()
    world.workers[1].call(2, [handle])
    world.workers[1].let_go([handle])
    world.workers[1].tidy(ask=True)
    deliver_one(world, Request)
    assert world.workers[2].handles == []  # the function does not run yet
    deliver_one(world, Adopt)
    deliver_one(world, Answer)
    assert len(world.workers[2].handles) == 1
    world.deliver_all()
    world.wind_up()


def test_a_parent_stays_while_its_child_waits_to_be_counted() -> None:
    world, handle = tell()
    world.workers[1].call(2, [handle])
    world.workers[1].let_go([handle])
    deliver_one(world, Request)
    world.workers[1].time_out(*world.workers[1].sent)
    world.workers[1].tidy(ask=True)
    deliver_one(world, Recall)
    deliver_one(world, Answer)
    world.workers[1].tidy(ask=False)
    world.deliver_all()
    assert len(world.workers[2].handles) == 1
    world.wind_up()


def test_a_reference_in_a_reply_is_received_when_it_is_counted() -> None:
    world, handle = tell()
    world.workers[2].call(1, [])
    world.deliver_all()
    world.workers[1].answer(world.workers[1].running[0], [handle])
    world.workers[1].let_go([handle])
    deliver_one(world, Reply)
    world.workers[2].tidy(ask=True)
    assert [type(body.message) for *_, body in world.network] == [Adopt]  # no note yet
    world.deliver_all()
    world.workers[2].tidy(ask=True)
    world.deliver_all()
    assert world.workers[1].user.transits() == {}
    assert len(world.workers[2].handles) == 1
    world.wind_up()


def test_a_request_that_comes_after_it_was_given_up_is_refused() -> None:
    world, handle = tell()
    world.workers[1].call(2, [handle])
    world.workers[1].time_out(*world.workers[1].sent)
    world.workers[1].tidy(ask=True)
    deliver_one(world, Recall)
    deliver_one(world, Answer)
    deliver_one(world, Request)
    assert world.workers[2].handles == []
    assert world.workers[2].arrivals == []
    world.wind_up()


def test_a_reply_to_a_worker_that_is_gone_leaves_nothing() -> None:
    world, handle = tell()
    world.workers[2].call(1, [])
    deliver_one(world, Request)
    world.kill(2)
    world.deliver_all()
    (running,) = world.workers[1].running
    world.workers[1].answer(running, [handle])
    world.wind_up()


def test_a_value_that_was_never_made_is_not_awaited_for_ever() -> None:
    world = World(3)
    world.workers[1].remote(0, [])
    world.workers[1].call(2, world.workers[1].handles)
    del world.network[0]  # the call that makes it
    deliver_one(world, Request)
    world.kill(1)
    deliver_one(world, Gone)
    deliver_one(world, Adopt)
    world.wind_up()
