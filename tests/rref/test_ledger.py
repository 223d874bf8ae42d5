"""The books about references, by themselves: forks, values, transits, and what is to be said."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gradwire._rref.held_forks import Outbox
from gradwire._rref.ledger import Holding, OwnerLedger, Transit, UserLedger
from gradwire._rref.messages import (
    Notes,
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
