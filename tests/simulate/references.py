"""Simulated worlds of references: the real ledgers, a made-up network.

A world is the protocol in one place: workers with the real ledgers and, around them, the least of a
driver (owned_values, held_forks, notifier, serialization and service without locks, threads and
clocks). What they say to each other lies in one list, from which anything may be delivered next,
lost, or repeated. At each step:

*   What a living worker has a good handle to is there, and its owner counts that worker in.
*   No fork is counted after its end (G1), and no value comes back after its end (G2).
*   A reference is refused only if its sender died or gave it up, or its value was never made.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gradwire._rref.held_forks import Outbox
from gradwire._rref.ledger import Holding, OwnerLedger, Transit, UserLedger
from gradwire._rref.messages import (
    Adopt,
    Notes,
    Recall,
    fork_id,
    maker_of,
    spell,
)
from tests.simulate.packets import Answer, Ask, Body, Gone, Packet, Ref, Reply, Request

# One worker


@dataclass(eq=False)
class Handle:
    """What a user has; fork 0 at the owner."""

    holding: Holding
    is_good: bool = True


@dataclass(eq=False)
class Arrival:
    """The references of a message that came. It is used when the owners have counted all in."""

    sender: int
    is_reply: bool
    use: Callable[[], None]
    refuse: Callable[[], None]
    handles: list[Handle] = field(default_factory=list)
    adoptions: int = 0
    is_refused: bool = False


class Sent(NamedTuple):
    """A call under way."""

    to: int
    tokens: list[int]
    made: Handle | None


class Running(NamedTuple):
    """A call that is being run here."""

    sender: int
    call: int
    makes: int


class Asked(NamedTuple):
    """A control message that is not answered yet; then: what is done with the answer."""

    to: int
    message: Adopt | Notes | Recall
    then: Callable[[Any], None]


AGAIN = object()  # in place of an answer: there was none in time
LOST = object()  # there will be none, as the worker is gone


class SimulatedWorker:
    """A worker: its ledger, and what its drivers keep beside them."""

    def __init__(self, me: int, world: World) -> None:
        self.me = me
        self.world = world
        self.owner = OwnerLedger()
        self.user = UserLedger(me)
        self.outbox = Outbox()
        self.gone: set[int] = set()
        # OwnedValues
        self.numbers = itertools.count(1)
        self.kept: set[int] = set()
        self.awaited: set[int] = set()
        self.made: set[int] = set()
        self.ended_values: set[int] = set()
        self.ended_forks: set[int] = set()
        # HeldForks, notifier
        self.dropped: list[tuple[int, int]] = []
        self.doubts: set[int] = set()
        self.asked: dict[int, Asked] = {}
        # Calls
        self.sent: dict[int, Sent] = {}
        self.running: list[Running] = []
        # What users have, and messages that wait for owners
        self.handles: list[Handle] = []
        self.arrivals: list[Arrival] = []

    # OwnedValues: the values of this worker

    def is_here(self, value: int) -> bool:
        """Whether a value is referred to: by the ledger, by a handle, by the call that makes it."""
        return value in self.values_here()

    def values_here(self) -> set[int]:
        opened = [*self.handles, *(h for a in self.arrivals for h in a.handles)]
        used = {h.holding.value for h in opened if h.holding.owner == self.me}
        return self.kept | self.awaited | used | {r.makes for r in self.running}

    def own(self) -> None:
        """`RRef(value)`."""
        value = fork_id(self.me, next(self.numbers))
        assert not self.owner.fork_released(value, value)
        self.made.add(value)
        self.handles.append(Handle(Holding(self.me, value, 0)))

    def find(self, value: int) -> bool:
        """Whether a value is here or may come; then it is awaited."""
        if not self.is_here(value):
            if not self.owner.may_come(value):
                return False
            self.awaited.add(value)
        return True

    def begin(self, value: int, creator: int) -> None:
        """The call that makes a value has come."""
        self.made.add(value)
        self.awaited.discard(value)
        if self.owner.fork_added(value, value, creator):
            self.kept.add(value)

    def adopt(self, value: int, fork: int, holder: int) -> bool:
        if not self.find(value):
            self.owner.fork_released(value, fork)
            return False
        if not self.owner.fork_added(value, fork, holder):
            return False
        self.kept.add(value)
        return True

    def release(self, forks: list[tuple[int, int]]) -> None:
        for value, fork in forks:
            self.ended_forks.add(fork)
            if self.owner.fork_released(value, fork):
                self.kept.remove(value)

    def creation_failed(self, value: int) -> None:
        """The call that makes a value has come, or never will."""
        if value in self.awaited or not self.is_here(value):
            self.awaited.discard(value)
            self.release([(value, value)])

    # ReferenceCarrier: references leave and come

    def load(self, handle: Handle, to: int, *, is_reply: bool) -> Ref:
        owner, value, parent = handle.holding
        if owner == self.me:
            fork = fork_id(self.me, next(self.numbers))
            if self.owner.fork_added(value, fork, to):
                self.kept.add(value)
        else:
            fork = 0 if to == owner else self.user.new_fork(owner)
        child = Holding(owner, value, fork)
        token = self.user.child_left(Transit(child, parent, to, is_reply))
        if is_reply:
            self.doubts.add(token)
        return Ref(owner, value, fork, token)

    def open(self, arrival: Arrival, refs: list[Ref]) -> None:
        """The references of a message that came."""
        self.arrivals.append(arrival)
        for ref in refs:
            if not self.unload(arrival, ref):
                self.refuse(arrival)
                return
        self.use_when_ready(arrival)

    def unload(self, arrival: Arrival, ref: Ref) -> bool:
        owner, value, fork, token = ref
        if not self.user.child_came(arrival.sender, token):
            assert not arrival.is_reply, "a reply that was waited for is refused"
            return False
        handle = Handle(Holding(owner, value, 0 if owner == self.me else fork))
        is_counted = arrival.sender == owner
        if owner == self.me:
            if (fork and self.owner.is_over(fork)) or not self.find(value):
                self.world.refused(arrival.sender, owner, value)
                return False
            arrival.handles.append(handle)
            if fork:
                self.release([(value, fork)])
        else:
            if owner in self.gone:
                return False
            arrival.handles.append(handle)
            self.user.fork_came(handle.holding, is_counted=is_counted)
        if owner != self.me and not is_counted:
            arrival.adoptions += 1
            self.ask_to_adopt(arrival, ref)
        elif arrival.is_reply:
            self.outbox.add_received(arrival.sender, token)
        return True

    def ask_to_adopt(self, arrival: Arrival, ref: Ref) -> None:
        def answered(is_counted: Any) -> None:
            if arrival.is_refused:
                return
            if is_counted is AGAIN:
                self.ask_to_adopt(arrival, ref)
            elif is_counted is True:
                self.adopted(arrival, ref)
            else:
                if is_counted is False:
                    self.world.refused(arrival.sender, ref.owner, ref.value)
                self.refuse(arrival)

        self.ask(ref.owner, Adopt(ref.value, ref.fork), answered)

    def adopted(self, arrival: Arrival, ref: Ref) -> None:
        self.user.fork_counted(ref.owner, ref.fork)
        if arrival.is_reply:
            self.outbox.add_received(arrival.sender, ref.token)
        arrival.adoptions -= 1
        self.use_when_ready(arrival)

    def use_when_ready(self, arrival: Arrival) -> None:
        if not arrival.adoptions:
            self.arrivals.remove(arrival)
            self.handles += arrival.handles
            arrival.use()

    def refuse(self, arrival: Arrival) -> None:
        self.arrivals.remove(arrival)
        arrival.is_refused = True
        for handle in arrival.handles:
            self.drop(handle)
        arrival.refuse()

    def let_go(self, handles: list[Handle]) -> None:
        """The user has these no more."""
        for handle in handles:
            if handle in self.handles:
                self.handles.remove(handle)
                self.drop(handle)

    def drop(self, handle: Handle) -> None:
        """A handle ends; at the owner that is plain garbage collection."""
        if handle.holding.fork:
            self.dropped.append((handle.holding.owner, handle.holding.fork))

    # Service: calls

    def call(self, to: int, handles: list[Handle]) -> None:
        self._send_call(to, handles, None)

    def remote(self, to: int, handles: list[Handle]) -> None:
        """The reference is there before the value is."""
        number = self.user.new_fork(to)
        made = Handle(Holding(to, number, number))
        self.user.fork_came(made.holding)
        self.handles.append(made)
        self._send_call(to, handles, made)

    def _send_call(self, to: int, handles: list[Handle], made: Handle | None) -> None:
        call = next(self.world.calls)
        refs = [self.load(handle, to, is_reply=False) for handle in handles]
        self.sent[call] = Sent(to, [ref.token for ref in refs], made)
        value = made.holding.value if made else 0
        self.world.post(self.me, to, Request(call, refs, value))

    def called(self, sender: int, request: Request) -> None:
        running = Running(sender, request.call, request.makes)

        def run() -> None:
            self.running.append(running)
            if request.makes:
                self.begin(request.makes, sender)

        def fail() -> None:
            self.world.post(self.me, sender, Reply(request.call, [], is_ok=False))

        self.open(Arrival(sender, False, run, fail), request.refs)

    def answer(
        self, running: Running, handles: list[Handle], *, is_ok: bool = True
    ) -> None:
        """The function returns these, or raises."""
        self.running.remove(running)
        if running.makes or not is_ok:
            handles = []
        is_ok = is_ok or bool(running.makes)  # the value keeps the error
        refs = [self.load(handle, running.sender, is_reply=True) for handle in handles]
        self.world.post(self.me, running.sender, Reply(running.call, refs, is_ok))

    def replied(self, sender: int, reply: Reply) -> None:
        sent = self.sent.pop(reply.call, None)
        if sent is None:
            return  # too late: what is in it was not received
        if reply.is_ok:
            for token in sent.tokens:
                self.settle(token, arrived=True)
        else:
            self.fail_call(sent)
        nothing = Arrival(sender, True, lambda: None, lambda: None)
        self.open(nothing, reply.refs)

    def time_out(self, call: int) -> None:
        self.fail_call(self.sent.pop(call))

    def fail_call(self, sent: Sent) -> None:
        self.doubts.update(sent.tokens)
        if sent.made is not None:
            owner, value, _ = sent.made.holding
            sent.made.is_good = False
            self.world.not_made.add((owner, value))
            self.outbox.add_failed(owner, value, "no answer")

    # HeldForks and notifier: what is said in its own time

    def settle(self, token: int, arrived: bool) -> None:
        self.doubts.discard(token)
        transit = self.user.transits().get(token)
        if transit is not None and arrived:
            self.world.check_counted(transit.child)
        self.say_released(self.user.child_settled(token, arrived))

    def say_released(self, holdings: list[Holding]) -> None:
        self.release([(h.value, h.fork) for h in holdings if h.owner == self.me])
        for holding in holdings:
            if holding.owner != self.me:
                self.outbox.add_released(holding)

    def tidy(self, *, ask: bool) -> None:
        """Say what there is to say, and ask about references in doubt if it is time to."""
        dropped, self.dropped = self.dropped, []
        for key in dropped:
            self.say_released(self.user.handle_dropped(*key))
        for to, notes in self.outbox.take().items():
            self.send_notes(to, notes)
        if ask:
            doubts, self.doubts = self.doubts, set()
            transits = self.user.transits()
            for token in sorted(doubts & transits.keys()):
                self.recall(token, transits[token])

    def send_notes(self, to: int, notes: Notes) -> None:
        def answered(outcome: Any) -> None:
            if outcome is AGAIN and to not in self.gone:
                self.outbox.put_back(to, notes)

        self.ask(to, notes, answered)

    def recall(self, token: int, transit: Transit) -> None:
        def answered(arrived: Any) -> None:
            if arrived is None or arrived is AGAIN:
                self.doubts.add(token)
            else:
                self.settle(token, arrived is True)

        owner, _, fork = transit.child
        self.ask(transit.to, Recall(owner, fork, token), answered)

    def ask(
        self,
        to: int,
        message: Adopt | Notes | Recall,
        then: Callable[[Any], None],
    ) -> None:
        if to in self.gone:
            then(LOST)
            return
        number = next(self.world.calls)
        self.asked[number] = Asked(to, message, then)
        self.world.post(self.me, to, Ask(number, message))

    def answered(self, number: int, outcome: Any) -> None:
        asked = self.asked.pop(number, None)
        if asked is not None:  # or it is repeated, or too late
            asked.then(outcome)

    def handle(self, sender: int, message: Adopt | Notes | Recall) -> bool | None:
        """The answer to a control message."""
        if isinstance(message, Adopt):
            return self.adopt(message.value, message.fork, sender)
        if isinstance(message, Recall):
            key = message.owner, message.fork
            underway = {call for call, sent in self.sent.items() if sent.to == sender}
            return self.user.fork_asked(sender, message.token, key, underway)
        self.release(message.released)
        for token in message.received:
            self.settle(token, arrived=True)
        for value, _ in message.failed:
            self.creation_failed(value)
        return None

    def worker_gone(self, worker: int) -> None:
        self.gone.add(worker)
        for call in [call for call, sent in self.sent.items() if sent.to == worker]:
            self.time_out(call)
        for number in [n for n, asked in self.asked.items() if asked.to == worker]:
            self.answered(number, LOST)
        self.kept.difference_update(self.owner.worker_gone(worker))
        self.awaited = {v for v in self.awaited if maker_of(v) != worker}
        self.outbox.worker_gone(worker)
        self.say_released(self.user.worker_gone(worker))

    def receive(self, sender: int, body: Body) -> None:
        if isinstance(body, Request):
            self.called(sender, body)
        elif isinstance(body, Reply):
            self.replied(sender, body)
        elif isinstance(body, Ask):
            answer = Answer(body.number, self.handle(sender, body.message))
            self.world.post(self.me, sender, answer)
        elif isinstance(body, Answer):
            self.answered(body.number, body.outcome)
        else:
            self.worker_gone(sender)


# All of them


class World:
    """Workers and what is on its way between them."""

    def __init__(self, size: int) -> None:
        self.calls: Iterator[int] = itertools.count(1)
        self.network: list[Packet] = []
        self.workers = [SimulatedWorker(number, self) for number in range(size)]
        self.dead: set[int] = set()
        self.not_made: set[tuple[int, int]] = set()
        """Values, by owner and number, that their creators have given up."""

    @property
    def living(self) -> list[SimulatedWorker]:
        return [worker for worker in self.workers if worker.me not in self.dead]

    def post(self, sender: int, to: int, body: Body) -> None:
        self.network.append(Packet(sender, to, body))

    def deliver(self, which: int) -> None:
        sender, to, body = self.network.pop(which)
        if to not in self.dead:
            self.workers[to].receive(sender, body)

    def deliver_all(self) -> None:
        while self.network:
            self.deliver(0)
            self.check()

    def kill(self, worker: int) -> None:
        self.dead.add(worker)
        for survivor in self.living:
            self.post(worker, survivor.me, Gone())

    def refused(self, sender: int, owner: int, value: int) -> None:
        """A reference that came was refused, which needs a reason."""
        assert sender in self.dead or (owner, value) in self.not_made, (
            f"{spell(value)} of {owner}, sent by {sender}, was refused for no reason"
        )

    def check(self) -> None:
        for worker in self.living:
            self.check_around(worker)

    def check_around(self, changed: SimulatedWorker) -> None:
        """What may be wrong after a worker has done something."""
        for worker in self.living:
            for handle in worker.handles:
                owner = self.workers[handle.holding.owner]
                is_concerned = changed in (worker, owner)
                if is_concerned and handle.is_good and owner.me not in self.dead:
                    self.check_handle(worker, owner, handle.holding)
        self.check_values(changed)

    def check_handle(
        self, worker: SimulatedWorker, owner: SimulatedWorker, holding: Holding
    ) -> None:
        _, value, fork = holding
        assert value not in owner.ended_values, f"{holding} is freed early"
        if fork and (fork != value or value in owner.made):
            assert owner.owner.holders(value).get(fork) == worker.me
            assert value in owner.kept

    def check_counted(self, child: Holding) -> None:
        """Who lets go of a parent now has passed on a child that its owner knows."""
        owner = self.workers[child.owner]
        if child.fork and owner.me not in self.dead:
            is_counted = child.fork in owner.owner.holders(child.value)
            assert is_counted or owner.owner.is_over(child.fork), (
                f"{child} is forgotten"
            )

    def check_values(self, worker: SimulatedWorker) -> None:
        here = worker.made & worker.values_here()
        assert not here & worker.ended_values, "a value has come back"
        worker.ended_values |= worker.made - here
        assert len(worker.owner) == len(worker.kept)
        forks = {fork for v in worker.kept for fork in worker.owner.holders(v)}
        assert not forks & worker.ended_forks, "a fork is counted after its end"
        assert not any(worker.owner.is_over(fork) for fork in forks)

    # The end

    def wind_up(self) -> None:
        """Lose nothing more, let go of everything, and tidy until all is quiet."""
        for _ in range(50):
            self.deliver_all()
            for worker in self.living:
                for running in list(worker.running):
                    worker.answer(running, [])
                worker.let_go(list(worker.handles))
            if not self.network:
                self.let_all_time_out()  # what was lost before
            for worker in self.living:
                worker.tidy(ask=True)
            if not self.network and not any(worker.outbox for worker in self.living):
                break
        self.check()
        for worker in self.living:
            self.check_empty(worker)

    def let_all_time_out(self) -> None:
        for worker in self.living:
            for number in list(worker.asked):
                worker.answered(number, AGAIN)
            for call in list(worker.sent):
                worker.time_out(call)

    def check_empty(self, worker: SimulatedWorker) -> None:
        assert not self.network, "it never gets quiet"
        assert not worker.kept
        assert not worker.awaited
        assert not worker.arrivals
        assert not worker.asked
        assert len(worker.owner) == 0
        assert len(worker.user) == 0
        assert not worker.user.transits()
        assert not worker.user._asked
        assert len(worker.outbox) == 0
        # What the ledgers never forget is a number per worker; only the dead leave gaps.
        for maker, seen in worker.owner._over.items():
            assert maker in self.dead or not seen._above, f"forks of {maker}: {seen}"
        for sender, seen in worker.user._came.items():
            assert self.dead or not seen._above, f"references of {sender}: {seen}"
