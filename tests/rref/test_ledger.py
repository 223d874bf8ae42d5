"""The books about references: by themselves, and in simulated worlds.

A simulated world is the protocol in one place: workers with the real books and, around them, the
least of a driver (owned_values, held_forks, notifier, serialization and service without locks,
threads and clocks). What they say to each other lies in one bag, from which anything may be
delivered next, lost, or repeated; time-outs happen whenever hypothesis says so, and workers die. At
each step:

*   What a living worker has a good handle to is there, and its owner counts that worker in.
*   No fork is counted after its end (G1), and no value comes back after its end (G2).
*   A reference is refused only if its sender died or gave it up, or its value was never made.

At the end all is delivered and all handles are dropped, and nothing may be left in any book.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from gradwire._rref.held_forks import Outbox
from gradwire._rref.ledger import Holding, OwnerLedger, Transit, UserLedger
from gradwire._rref.messages import (
    Adopt,
    Notes,
    Recall,
    fork_id,
    maker_of,
    number_of,
    spell,
)

# Numbers


@given(maker=st.integers(0, 2**20), number=st.integers(1, 2**40 - 1))
def test_a_fork_id_tells_its_maker_and_its_number(maker: int, number: int) -> None:
    fork = fork_id(maker, number)
    assert (maker_of(fork), number_of(fork)) == (maker, number)
    assert spell(fork) == f"{maker}.{number}"
    assert fork != 0  # which stands for none


# What an owner knows

A, B, C = 1, 2, 3  # workers; the values and forks below are those of owner 0
VALUE = fork_id(A, 1)  # of worker 0, made by A
OF_B = fork_id(A, 2)  # a fork that A made for B


def test_a_value_is_dropped_when_its_last_fork_is_released() -> None:
    ledger = OwnerLedger()
    assert ledger.fork_added(VALUE, VALUE, A)
    assert ledger.fork_added(VALUE, OF_B, B)
    assert ledger.holders(VALUE) == {VALUE: A, OF_B: B}
    assert not ledger.fork_released(VALUE, VALUE)
    assert ledger.holders(VALUE) == {OF_B: B}
    assert ledger.fork_released(VALUE, OF_B)
    assert len(ledger) == 0


def test_a_fork_that_comes_after_its_release_is_not_counted() -> None:
    ledger = OwnerLedger()
    assert not ledger.fork_released(VALUE, OF_B)
    assert not ledger.fork_added(VALUE, OF_B, B)
    assert ledger.holders(VALUE) == {}


def test_the_release_of_an_uncounted_fork_takes_nothing_from_others() -> None:
    ledger = OwnerLedger()
    ledger.fork_added(VALUE, VALUE, A)
    assert not ledger.fork_released(VALUE, OF_B)
    assert ledger.holders(VALUE) == {VALUE: A}


def test_a_value_may_come_until_its_first_fork_is_over_or_its_creator_gone() -> None:
    ledger = OwnerLedger()
    assert ledger.may_come(VALUE)
    ledger.fork_released(VALUE, VALUE)
    assert ledger.is_over(VALUE)
    assert not ledger.may_come(VALUE)
    assert ledger.may_come(fork_id(C, 1))
    ledger.worker_gone(C)
    assert not ledger.may_come(fork_id(C, 1))


def test_the_loss_of_a_worker_drops_what_it_alone_held() -> None:
    ledger = OwnerLedger()
    other = fork_id(A, 3)
    ledger.fork_added(VALUE, VALUE, A)
    ledger.fork_added(VALUE, OF_B, B)
    ledger.fork_added(other, other, A)
    assert ledger.worker_gone(A) == [other]
    assert ledger.worker_gone(A) == []
    assert ledger.holders(VALUE) == {OF_B: B}
    assert not ledger.fork_added(VALUE, fork_id(B, 1), A)
    assert ledger.fork_added(VALUE, fork_id(A, 4), B)  # made by A, but not A's


@given(data=st.data())
def test_messages_in_any_order_and_number_drop_a_value_once(
    data: st.DataObject,
) -> None:
    forks = {VALUE: A, OF_B: B, fork_id(B, 1): C}
    said = [(event, fork) for fork in forks for event in ("add", "release")]
    more = data.draw(st.lists(st.sampled_from(said), max_size=12))
    ledger, drops = OwnerLedger(), []
    ledger.fork_added(VALUE, fork_id(C, 1), C)  # what keeps the value meanwhile
    for event, fork in data.draw(st.permutations(said + more)):
        if event == "add":
            ledger.fork_added(VALUE, fork, forks[fork])
        else:
            drops.append(ledger.fork_released(VALUE, fork))
    assert drops.count(True) == 0
    assert ledger.fork_released(VALUE, fork_id(C, 1))
    assert len(ledger) == 0


def test_forks_that_are_over_take_no_memory() -> None:
    ledger = OwnerLedger()
    for number in range(1000):
        fork = fork_id(A, (number ^ 1) + 1)  # out of order: 2, 1, 4, 3, ...
        ledger.fork_added(VALUE, fork, B)
        ledger.fork_released(VALUE, fork)
    assert ledger._over[A]._above == set()


# What a holder knows

MINE = Holding(owner=0, value=VALUE, fork=VALUE)
FOR_B = Transit(Holding(0, VALUE, OF_B), parent=VALUE, to=B, is_reply=False)
FOR_OWNER = Transit(Holding(0, VALUE, 0), parent=VALUE, to=0, is_reply=False)


def holder_of_mine() -> UserLedger:
    ledger = UserLedger(A)
    ledger.fork_came(MINE, "here.py:1")
    return ledger


def test_forks_are_numbered_by_owner() -> None:
    ledger = UserLedger(A)
    made = [ledger.new_fork(0), ledger.new_fork(B), ledger.new_fork(0)]
    assert made == [fork_id(A, 1), fork_id(A, 1), fork_id(A, 2)]


def test_a_fork_is_released_once_when_its_handle_is_dropped() -> None:
    ledger = holder_of_mine()
    assert ledger.holdings() == {MINE: "here.py:1"}
    assert ledger.handle_dropped(0, VALUE) == [MINE]
    assert ledger.handle_dropped(0, VALUE) == []
    assert len(ledger) == 0


def test_a_parent_stays_until_all_its_children_are_settled() -> None:
    ledger = holder_of_mine()
    first, second = ledger.child_left(FOR_B), ledger.child_left(FOR_OWNER)
    assert ledger.transits() == {first: FOR_B, second: FOR_OWNER}
    assert ledger.handle_dropped(0, VALUE) == []
    assert ledger.holdings() == {}  # no handle; but it is held
    assert ledger.child_settled(first, arrived=True) == []
    assert ledger.child_settled(first, arrived=True) == []
    assert ledger.child_settled(second, arrived=False) == [MINE]
    assert ledger.transits() == {}


def test_a_child_that_did_not_arrive_is_released_by_its_sender() -> None:
    ledger = holder_of_mine()
    token = ledger.child_left(FOR_B)
    assert ledger.child_settled(token, arrived=False) == [FOR_B.child]
    assert ledger.holdings() == {MINE: "here.py:1"}


def test_tokens_are_numbered_by_receiver() -> None:
    ledger = holder_of_mine()
    tokens = [ledger.child_left(transit) for transit in (FOR_B, FOR_OWNER, FOR_B)]
    assert tokens == [fork_id(B, 1), fork_id(0, 1), fork_id(B, 2)]


def test_a_fork_that_came_is_said_to_be_there_when_its_owner_has_counted_it() -> None:
    ledger, (_, value, fork) = UserLedger(B), FOR_B.child
    assert ledger.child_came(A, 1)
    ledger.fork_came(Holding(0, value, fork), is_counted=False)
    assert ledger.fork_asked(A, 1, (0, fork), set()) is None
    ledger.fork_counted(0, fork)
    assert ledger.fork_asked(A, 1, (0, fork), set()) is True
    ledger.handle_dropped(0, fork)
    assert ledger.fork_asked(A, 1, (0, fork), {7}) is False


def test_a_reference_that_was_denied_is_refused_when_it_comes() -> None:
    ledger = UserLedger(B)
    assert ledger.fork_asked(A, 1, (0, OF_B), set()) is False
    assert ledger.fork_asked(A, 1, (0, OF_B), {7}) is False
    assert not ledger.child_came(A, 1)
    assert ledger.child_came(A, 2)
    assert ledger.child_came(C, 1)


def test_a_reference_may_come_by_calls_under_way_when_it_was_first_asked_for() -> None:
    ledger = UserLedger(B)
    assert ledger.fork_asked(A, 1, (0, OF_B), {7, 8}) is None
    assert ledger.fork_asked(A, 1, (0, OF_B), {8, 9}) is None
    assert ledger.fork_asked(A, 1, (0, OF_B), {9}) is False


def test_what_comes_after_it_was_asked_for_leaves_nothing_behind() -> None:
    ledger = UserLedger(B)
    assert ledger.fork_asked(A, 1, (0, OF_B), {7}) is None
    assert ledger.child_came(A, 1)
    assert ledger._asked == {}
    assert ledger.fork_asked(A, 1, (0, OF_B), {7}) is False  # asked late, or twice
    assert ledger._asked == {}


def test_nothing_is_kept_about_questions_of_and_about_the_dead() -> None:
    ledger = UserLedger(B)
    assert ledger.fork_asked(A, 1, (0, OF_B), {7}) is None
    ledger.worker_gone(C)
    assert ledger.fork_asked(A, 1, (C, OF_B), {7}) is False
    assert ledger.fork_asked(C, 1, (0, OF_B), {7}) is False
    assert ledger._asked == {}


def test_the_loss_of_an_owner_ends_its_forks_without_a_word() -> None:
    ledger = holder_of_mine()
    ledger.child_left(FOR_B)
    assert ledger.worker_gone(0) == []
    assert (len(ledger), ledger.transits()) == (0, {})
    assert ledger.handle_dropped(0, VALUE) == []


def test_the_loss_of_a_receiver_releases_what_was_on_its_way_to_it() -> None:
    ledger = holder_of_mine()
    ledger.child_left(FOR_B)
    token = ledger.child_left(FOR_OWNER)
    ledger.handle_dropped(0, VALUE)
    assert ledger.worker_gone(B) == [FOR_B.child]
    assert ledger.child_settled(token, arrived=True) == [MINE]


# What is to be said


def test_notes_to_a_worker_go_together_and_once() -> None:
    outbox = Outbox()
    outbox.add_released(MINE)
    outbox.add_released(FOR_B.child)
    outbox.add_received(B, 5)
    outbox.add_failed(0, VALUE, "why")
    assert len(outbox) == 2
    to_owner = Notes([(VALUE, VALUE), (VALUE, OF_B)], [], [(VALUE, "why")])
    assert outbox.take() == {0: to_owner, B: Notes([], [5], [])}
    assert (len(outbox), outbox.take()) == (0, {})


def test_notes_without_an_answer_are_said_again_with_those_since() -> None:
    outbox = Outbox()
    outbox.add_received(B, 5)
    (notes,) = outbox.take().values()
    outbox.add_received(B, 6)
    outbox.put_back(B, notes)
    assert outbox.take() == {B: Notes([], [6, 5], [])}


def test_to_a_lost_worker_nothing_is_said() -> None:
    outbox = Outbox()
    outbox.add_received(B, 5)
    outbox.add_received(C, 6)
    outbox.worker_gone(B)
    outbox.worker_gone(B)
    assert outbox.take() == {C: Notes([], [6], [])}


# Simulated worlds: what is in the bag


class Ref(NamedTuple):
    """What stands for a reference on its way."""

    owner: int
    value: int
    fork: int
    token: int


class Request(NamedTuple):
    """Call a function with these references; keep what it returns as this value, or 0."""

    call: int
    refs: list[Ref]
    makes: int


class Reply(NamedTuple):
    """What a function returned; if it is not ok, it raised."""

    call: int
    refs: list[Ref]
    is_ok: bool


class Ask(NamedTuple):
    """A control message; it is answered, and sent again if the answer does not come."""

    number: int
    message: Adopt | Notes | Recall


class Answer(NamedTuple):
    number: int
    outcome: Any


class Gone(NamedTuple):
    """To each survivor: the sender has died. This one is never lost."""


Body = Request | Reply | Ask | Answer | Gone


class Letter(NamedTuple):
    sender: int
    to: int
    body: Body


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


class Sim:
    """A worker: its books, and what its drivers keep beside them."""

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
        """Whether a value is referred to: by the books, by a handle, by the call that makes it."""
        opened = [*self.handles, *(h for a in self.arrivals for h in a.handles)]
        return (
            value in self.kept
            or value in self.awaited
            or any(h.holding == Holding(self.me, value, 0) for h in opened)
            or any(r.makes == value for r in self.running)
        )

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
    """Workers and the bag of what is on its way between them."""

    def __init__(self, size: int) -> None:
        self.calls: Iterator[int] = itertools.count(1)
        self.bag: list[Letter] = []
        self.workers = [Sim(number, self) for number in range(size)]
        self.dead: set[int] = set()
        self.not_made: set[tuple[int, int]] = set()
        """Values, by owner and number, that their creators have given up."""

    @property
    def living(self) -> list[Sim]:
        return [worker for worker in self.workers if worker.me not in self.dead]

    def post(self, sender: int, to: int, body: Body) -> None:
        self.bag.append(Letter(sender, to, body))

    def deliver(self, which: int) -> None:
        sender, to, body = self.bag.pop(which)
        if to not in self.dead:
            self.workers[to].receive(sender, body)

    def deliver_all(self) -> None:
        while self.bag:
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
            for handle in worker.handles:
                owner = self.workers[handle.holding.owner]
                if handle.is_good and owner.me not in self.dead:
                    self.check_handle(worker, owner, handle.holding)
            self.check_values(worker)

    def check_handle(self, worker: Sim, owner: Sim, holding: Holding) -> None:
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

    def check_values(self, worker: Sim) -> None:
        here = {value for value in worker.made if worker.is_here(value)}
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
            if not self.bag:
                self.let_all_time_out()  # what was lost before
            for worker in self.living:
                worker.tidy(ask=True)
            if not self.bag and not any(worker.outbox for worker in self.living):
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

    def check_empty(self, worker: Sim) -> None:
        assert not self.bag, "it never gets quiet"
        assert not worker.kept
        assert not worker.awaited
        assert not worker.arrivals
        assert not worker.asked
        assert len(worker.owner) == 0
        assert len(worker.user) == 0
        assert not worker.user.transits()
        assert not worker.user._asked
        assert len(worker.outbox) == 0
        # What the books remember for ever is a number per worker; only the dead leave gaps.
        for maker, seen in worker.owner._over.items():
            assert maker in self.dead or not seen._above, f"forks of {maker}: {seen}"
        for sender, seen in worker.user._came.items():
            assert self.dead or not seen._above, f"references of {sender}: {seen}"


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

    @precondition(lambda self: self.world.bag)
    @rule(which=picks)
    def deliver(self, which: int) -> None:
        self.world.deliver(which % len(self.world.bag))

    @precondition(lambda self: self.world.bag)
    @rule()
    def deliver_all(self) -> None:
        self.world.deliver_all()

    @precondition(lambda self: any(is_ask(letter) for letter in self.world.bag))
    @rule(which=picks)
    def have_answered(self, which: int) -> None:
        """A control message overtakes all others, and so does its answer."""
        asks = [i for i, letter in enumerate(self.world.bag) if is_ask(letter)]
        self.world.deliver(pick(which, asks))
        if self.world.bag and isinstance(self.world.bag[-1].body, Answer):
            self.world.deliver(-1)

    @precondition(lambda self: self.world.bag)
    @rule(which=picks)
    def lose(self, which: int) -> None:
        which %= len(self.world.bag)
        if not isinstance(self.world.bag[which].body, Gone):
            del self.world.bag[which]

    @precondition(lambda self: self.world.bag)
    @rule(which=picks)
    def repeat(self, which: int) -> None:
        letter = pick(which, self.world.bag)
        if isinstance(letter.body, Ask | Answer):
            self.world.bag.append(letter)

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

    def known_to(self, worker: Sim) -> list[int]:
        return [w.me for w in self.world.workers if w.me not in worker.gone]

    def handles(self, worker: Sim, which: list[int]) -> list[Handle]:
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


def is_ask(letter: Letter) -> bool:
    return isinstance(letter.body, Ask)


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
    for place, (_, _, body) in enumerate(world.bag):
        if type(body.message if isinstance(body, Ask) else body) is kind:
            world.deliver(place)
            world.check()
            return
    raise AssertionError(f"no {kind.__name__} in {world.bag}")


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
    assert [type(body.message) for *_, body in world.bag] == [Adopt]  # no note yet
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
    del world.bag[0]  # the call that makes it
    deliver_one(world, Request)
    world.kill(1)
    deliver_one(world, Gone)
    deliver_one(world, Adopt)
    world.wind_up()
