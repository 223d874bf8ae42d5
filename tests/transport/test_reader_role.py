"""Who reads a shared connection, by hand; `tests/simulate/reader.py` has threads that compete."""

from dataclasses import dataclass

from gradwire._transport.busy_poll import BusyPoll
from gradwire._transport.reader_role import ReaderRole, Step


@dataclass
class Response:
    call: int


@dataclass
class Waiter:
    """A thread that waits for the response to a call."""

    call: int

    def ring(self) -> None:
        raise AssertionError("the role rings nobody by itself")


def test_one_thread_reads_at_a_time_and_the_next_is_woken() -> None:
    role: ReaderRole[Response, Waiter] = ReaderRole()
    first, second = Waiter(1), Waiter(2)
    assert role.enter()
    assert not role.enter()
    assert role.step(1, first) is Step.READ
    assert role.step(2, second) is Step.SLEEP
    assert not role.take(), "the poller has to leave it to them"
    role.unopened.append(Response(1))
    assert role.give_up() is second
    assert role.step(2, second) is Step.DELIVER


def test_who_is_being_answered_does_not_read() -> None:
    role: ReaderRole[Response, Waiter] = ReaderRole()
    role.unopened.append(Response(1))
    role.enter()
    assert role.open_next() == Response(1)
    assert role.step(1, Waiter(1)) is Step.SLEEP
    assert role.step(2, Waiter(2)) is Step.READ


def test_polling_is_done_by_one_thread_where_the_last_wait_was_short() -> None:
    poll = BusyPoll(1.0)
    looks = 0

    def found_by_the_third_look() -> bool:
        nonlocal looks
        looks += 1
        assert not poll.found(lambda: True, 0.5), "another thread polls"
        return looks == 3

    assert not poll.found(lambda: True, 2.0)
    assert poll.found(found_by_the_third_look, 0.5)
    poll.crowd(True)
    assert not poll.found(lambda: True, 0.5), "that is long where cores are scarce"
    assert not poll.found(lambda: False, 0.0), "it ends"
    poll.crowd(False)
    assert poll.found(lambda: True, 0.5)


def test_a_worker_told_not_to_poll_does_not() -> None:
    poll = BusyPoll(0.0)
    poll.crowd(False)
    assert not poll.found(lambda: True, 0.0)


def test_where_waits_are_long_one_in_eight_is_polled_for() -> None:
    """They are long also because nobody polls."""
    poll = BusyPoll(1.0)
    found = [poll.found(lambda: True, 2.0) for _ in range(24)]
    assert found == ([None] * 7 + [True]) * 3
