"""Who reads a shared connection: no waiter misses its response, however threads take turns."""

import random
from collections import deque
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from gradwire._transport.busy_poll import BusyPoll
from gradwire._transport.reader_role import ReaderRole, Step


@dataclass
class Response:
    call: int


@dataclass
class Waiter:
    """A thread that waits for the response to a call."""

    call: int
    is_done: bool = False
    is_asleep: bool = False
    has_left: bool = False
    doing: list[object] = field(default_factory=list)

    def ring(self) -> None:
        self.is_asleep = False


class Simulation:
    """Threads that take turns in an order chosen by a seed, and a socket."""

    def __init__(self, calls: int, seed: int) -> None:
        self.chance = random.Random(seed)
        self.role: ReaderRole[Response, Waiter] = ReaderRole()
        self.waiters = [Waiter(call) for call in range(calls)]
        responses = [Response(call) for call in range(calls)]
        self.chance.shuffle(responses)
        self.socket = deque(responses)
        self.readers = 0
        for _ in self.waiters:
            self.role.enter()

    def run(self) -> None:
        for _ in range(1000):
            able = [w for w in self.waiters if not w.has_left and not w.is_asleep]
            if not able:
                break
            self.turn(self.chance.choice(able))
        assert all(waiter.has_left for waiter in self.waiters), (
            "someone sleeps for ever"
        )
        assert not self.role.in_delivery
        assert not self.role.is_taken

    def turn(self, waiter: Waiter) -> None:
        """A few steps of one thread; between them others may have theirs."""
        if waiter.doing:
            self.go_on(waiter)
            return
        if waiter.is_done:
            waiter.has_left = True
            self.wake(self.role.leave(waiter.call))
            return
        step = self.role.step(waiter.call, waiter)
        if step is Step.READ:
            self.readers += 1
            assert self.readers == 1, "two threads read"
            waiter.doing.append(Step.READ)
        elif step is Step.DELIVER:
            response = self.role.open_next()
            if response is not None:
                waiter.doing.append(response)
        else:
            waiter.is_asleep = True

    def go_on(self, waiter: Waiter) -> None:
        doing = waiter.doing.pop()
        if doing is Step.READ:
            assert self.socket, "a thread reads although all has come"
            for _ in range(self.chance.randint(1, len(self.socket))):
                self.role.unopened.append(self.socket.popleft())
            self.readers -= 1
            self.wake(self.role.give_up())
        else:
            assert isinstance(doing, Response)
            self.role.delivered(doing.call)
            answered = self.waiters[doing.call]
            answered.is_done = True
            answered.ring()

    @staticmethod
    def wake(waiter: Waiter | None) -> None:
        if waiter is not None:
            waiter.ring()


@given(st.integers(1, 6), st.integers(0, 2**32))
def test_every_waiter_gets_its_response(calls: int, seed: int) -> None:
    Simulation(calls, seed).run()


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
