"""A simulated shared connection: the real reader role, and threads that wait for responses.

`Connection` does step by step what `_transport/connection.py` does, and may be preempted wherever
that holds no lock; sockets, threads, poller, timer and clock are simulated. Responses come late, in
any order, twice or never, and the connection may end at any step. Callers give up, callbacks take
their time, make calls of their own on the same connection, or never return. What must hold:

*   One thread reads at a time, and none blocks in the socket for what has been read already.
*   A response is delivered once.
*   No wake-up is lost: once nothing more comes, each caller has its response, its timeout or the
    end of the connection; nothing lies in the socket unread; and whoever is to read next will.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from gradwire._transport.base import Answer
from gradwire._transport.exchange import Exchange
from gradwire._transport.reader_role import ReaderRole, Step

from .simulation import Simulation, Wrong
from .threads import Bell, Steps, Threads, Wait

_HOLD = 0.002
_MOST_IN_PASSING = 64


class Broken(Exception):
    """The connection is over."""


@dataclass(eq=False)
class Response:
    """A frame."""

    call: int
    is_delivered: bool = False


class Socket:
    """What has come and was not read, and who waits for more."""

    def __init__(self, simulation: Simulation) -> None:
        self.frames: deque[Response] = deque()
        self.is_over = False
        self.when_readable: list[Callable[[], None]] = []
        self._simulation = simulation

    @property
    def is_readable(self) -> bool:
        return bool(self.frames) or self.is_over

    def came(self, frame: Response) -> None:
        if not self.is_over:
            self.frames.append(frame)
            self._wake()

    def hang_up(self) -> None:
        """What has come can still be read."""
        self.is_over = True
        self._wake()

    def wait(self, deadline: float | None) -> Wait:
        """Until there is something to read."""
        bell = Bell(self._simulation)
        if self.is_readable:
            bell.ring()
        else:
            self.when_readable.append(bell.ring)
        return bell.wait(deadline)

    def pull(self) -> list[Response]:
        """Some of what is there."""
        if not self.frames:
            if self.is_over:
                raise Broken
            return []
        count = self._simulation.chance.randint(1, len(self.frames))
        return [self.frames.popleft() for _ in range(count)]

    def _wake(self) -> None:
        waiting, self.when_readable = self.when_readable, []
        for wake in waiting:
            wake()


class Future:
    """The answer to a posted request (an `Answer` of `_transport/base.py`)."""

    def __init__(self) -> None:
        self.is_done = False
        self._wakes: list[Callable[[], None]] = []

    def done(self) -> bool:
        return self.is_done

    def on_done(self, wake: Callable[[], None]) -> None:
        if self.is_done:
            wake()
        else:
            self._wakes.append(wake)

    def complete(self) -> None:
        self.is_done = True
        for wake in self._wakes:
            wake()


class Connection:
    """The connector's end of a shared connection."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.now = lambda: world.simulation.now
        self.socket = Socket(world.simulation)
        self.frames: deque[Response] = deque()
        self.role: ReaderRole[Response, Bell] = ReaderRole(self.frames)
        self.exchanges: dict[int, Exchange] = {}
        self.posted = self.answered = 0
        self.has_ended = False
        self.is_watched = False
        self.timer_runs = False
        self.answered_then = 0
        self.end_is_told = False
        self.readers = 0

    # The poller: tells once when something came

    def watch(self) -> None:
        if not self.is_watched and not self.has_ended:
            self.is_watched = True
            self._poll()

    def _poll(self) -> None:
        if not self.is_watched:
            return
        if self.socket.is_readable:
            self.is_watched = False
            self.world.start("poller", self._read_ready())
        else:
            self.socket.when_readable.append(self._poll)

    def _read_ready(self) -> Steps:
        if self.has_ended or not self.role.take():
            return
        broken = False
        self._begin_to_read(None)
        yield
        try:
            self.frames.extend(self.socket.pull())
        except Broken:
            broken = True
        yield
        self.readers -= 1
        next_reader = self._free(self.role.give_up)
        if broken:
            yield from self.end()
            return
        yield
        for _ in range(len(self.frames)):
            self.world.submit(self._deliver_next)
        yield from self._hand_over(next_reader)

    # Callers

    def post(self, call: int) -> Steps:
        self.posted += 1
        is_burst = self.posted - self.answered > self.world.many
        if is_burst and not self.timer_runs:
            self.is_watched = False
            self._start_timer()
        yield
        self.world.request(call)
        if self.has_ended:
            raise Broken

    def exchange(self, call: int, deadline: float | None) -> Steps:
        exchange = self.exchanges[call] = Exchange()
        try:
            yield from self.post(call)
            while not exchange.done():
                if self._is_past(deadline):
                    return
                if not self.has_ended:
                    yield from self.attend(call, exchange, deadline)
                else:
                    yield from self.sleep(exchange, deadline)
        finally:
            del self.exchanges[call]

    def sleep(self, answer: Answer, deadline: float | None) -> Steps:
        """Wait for what some other thread brings."""
        bell = Bell(self.world.simulation)
        yield
        answer.on_done(bell.ring)
        yield bell.wait(deadline)

    def attend(self, call: int, answer: Answer, deadline: float | None) -> Steps:
        bell = Bell(self.world.simulation)
        if self.has_ended:
            return
        if self.role.enter():
            self.is_watched = False
        yield
        is_bell_known = False
        while not answer.done():
            yield
            step = Step.SLEEP if self.has_ended else self.role.step(call, bell)
            yield
            if step is Step.DELIVER:
                self._start_timer()
                yield from self._deliver_next()
            elif step is Step.READ:
                yield from self._read(call, answer, deadline)
            elif not is_bell_known:
                is_bell_known = True
                answer.on_done(bell.ring)
            else:
                yield bell.wait(deadline)
            if self._is_past(deadline):
                break
        else:
            for _ in range(min(len(self.frames), _MOST_IN_PASSING)):
                self._start_timer()
                yield from self._deliver_next()
        next_reader = self._free(partial(self.role.leave, call))
        yield
        if next_reader is None and (self.frames or self.posted > self.answered):
            self._start_timer()
        else:
            yield from self._hand_over(next_reader)

    def _read(self, call: int, answer: Answer, deadline: float | None) -> Steps:
        broken = False
        self._begin_to_read(call)
        if not answer.done():
            yield self.socket.wait(deadline)
            try:
                self.frames.extend(self.socket.pull())
            except Broken:
                broken = True
        yield
        self.readers -= 1
        next_reader = self._free(self.role.give_up)
        yield
        if next_reader is not None:
            next_reader.ring()
        if broken:
            yield from self.end()

    def _begin_to_read(self, call: int | None) -> None:
        self.readers += 1
        if self.readers > 1:
            raise Wrong("two threads read")
        if call is None:
            return  # the poller, which does not block
        if self.frames:
            raise Wrong("a waiter reads, and what was read is not delivered")
        if self.role.in_delivery[call]:
            raise Wrong("a waiter reads, and its response is being delivered")

    def _free(self, leave_role: Callable[[], Bell | None]) -> Bell | None:
        """Who is to be woken as a thread leaves; R3 says who that may be."""
        role, before = self.role, dict(self.role.sleeping)
        next_reader = leave_role()
        able = [c for c in before if role.unopened or not role.in_delivery[c]]
        if next_reader is not None and next_reader not in map(before.get, able):
            raise Wrong("a waiter is woken who has nothing to do")
        is_free = next_reader is None and not role.is_taken
        if is_free and not role.sleeping.keys().isdisjoint(able):
            raise Wrong("nobody is woken, and some sleep who have something to do")
        return next_reader

    def _hand_over(self, next_reader: Bell | None) -> Steps:
        if next_reader is not None:
            next_reader.ring()
            return
        yield
        if not self.has_ended and not self.role.is_taken:
            self.watch()

    def _start_timer(self) -> None:
        if not self.timer_runs:
            self.timer_runs = True
            self.answered_then = self.answered
            self.world.call_later(_HOLD, self._time_is_up)

    def _time_is_up(self) -> Steps:
        self.timer_runs = False
        yield
        if self.frames and self.answered == self.answered_then:
            for _ in range(len(self.frames)):
                self.world.submit(self._deliver_next)
        elif self.frames:
            self._start_timer()
        yield from self._hand_over(None)

    def _deliver_next(self) -> Steps:
        frame = self.role.open_next()
        if frame is None:
            return
        if frame.is_delivered:
            raise Wrong(f"{frame} is delivered again")
        frame.is_delivered = True
        yield
        self.answered += 1
        exchange = self.exchanges.get(frame.call)
        if exchange is not None:
            exchange.complete(frame)
        else:
            yield from self.world.complete(frame.call)
        yield
        self.role.delivered(frame.call)

    def end(self) -> Steps:
        if self.has_ended:
            return
        self.has_ended = True
        yield
        self.is_watched = False
        self.socket.hang_up()
        yield from self._fail_rest()

    def _fail_rest(self) -> Steps:
        if self.frames:
            self.world.call_later(_HOLD, self._fail_rest)
            while self.frames:
                yield from self._deliver_next()
        yield
        if self.end_is_told:
            return
        self.end_is_told = True
        yield
        self.world.connection_ended()
        for exchange in list(self.exchanges.values()):
            exchange.fail("connection closed")
        yield
        sleepers, self.role.sleeping = self.role.sleeping, {}
        for bell in sleepers.values():
            bell.ring()

    def _is_past(self, deadline: float | None) -> bool:
        return deadline is not None and self.now() >= deadline


class World:
    """Callers, the connection they share, and who responds at its other end."""

    def __init__(self, seed: int, crash_at: int | None = None) -> None:
        """`crash_at`: the step at which the connection ends; None leaves it to the seed."""
        self.simulation = Simulation(seed)
        chance = self.simulation.chance
        self.many = chance.choice((2, 16))
        self.is_lossy = chance.random() < 0.2
        self.repeats = chance.choice((0.0, 0.0, 0.2))
        self.blocks = chance.choice((0.0, 0.0, 0.1))
        self.is_cut = False
        if crash_at is None and chance.random() < 0.3:
            crash_at = chance.randrange(200)
        if crash_at is not None:
            self.simulation.at_step[crash_at] = self.cut
        self.threads = Threads(self.simulation)
        self.connection = Connection(self)
        self.pending: dict[int, Future] = {}
        self.responses: list[Response] = []
        """Those under way."""
        self.stuck: set[str] = set()
        """Threads that never return from a callback."""
        self._calls = itertools.count(1)
        self._names = itertools.count(1)

    def start(self, name: str, steps: Steps) -> None:
        self.threads.start(f"{name} {next(self._names)}", self._guard(steps))

    def submit(self, function: Callable[[], Steps]) -> None:
        """Have a thread of the executor run it, when there is one."""
        chance = self.simulation.chance
        seconds = chance.choice((0.0, 0.0, 0.001)) * chance.random()
        self.simulation.after(seconds, lambda: self.start("task", function()))

    def call_later(self, seconds: float, function: Callable[[], Steps]) -> None:
        self.simulation.after(seconds, lambda: self.start("timer", function()))

    def _guard(self, steps: Steps) -> Steps:
        try:
            yield from steps
        except Broken:
            pass  # whoever called is told

    def run(self) -> None:
        """Until nothing more happens.

        Raises:
            Wrong: something happened that must not.
        """
        self.connection.watch()
        for _ in range(self.simulation.chance.randint(1, 5)):
            self.start("caller", self._caller())
        self.simulation.run()
        self._check_end()

    # What users do

    def _caller(self) -> Steps:
        chance = self.simulation.chance
        for _ in range(chance.randint(1, 4)):
            if self.connection.has_ended:
                return
            yield from chance.choice((self._call, self._call, self._post_some))()
            yield from self._pass_time(chance.choice((0.0, 0.0005, 0.005)))

    def _call(self) -> Steps:
        yield from self.connection.exchange(next(self._calls), self._deadline())

    def _post_some(self) -> Steps:
        """Some requests at once, of which some are waited for, in any order."""
        chance, posted = self.simulation.chance, []
        for _ in range(chance.choice((1, 1, 2, 5))):
            call = next(self._calls)
            self.pending[call] = future = Future()
            posted.append((call, future))
            yield from self.connection.post(call)
        yield from self._pass_time(chance.choice((0.0, 0.001)))
        for call, future in chance.sample(posted, chance.randint(0, len(posted))):
            yield from self._wait_for(call, future)

    def _wait_for(self, call: int, future: Future) -> Steps:
        deadline = self._deadline()
        while not future.done():
            if deadline is not None and self.simulation.now >= deadline:
                self.pending.pop(call, None)
                return
            yield from self.connection.attend(call, future, deadline)
            if not future.done():
                yield from self.connection.sleep(future, deadline)

    def _deadline(self) -> float | None:
        chance = self.simulation.chance
        if self.is_lossy or chance.random() < 0.2:
            return self.simulation.now + chance.choice((0.0005, 0.003, 0.02))
        return None

    def _pass_time(self, seconds: float) -> Steps:
        if seconds:
            time = seconds * self.simulation.chance.random()
            yield Bell(self.simulation).wait(self.simulation.now + time)

    def complete(self, call: int) -> Steps:
        """The response to a posted request came: the user's callback runs."""
        future = self.pending.pop(call, None)
        if future is None:
            return  # too late, or repeated
        future.complete()
        chance = self.simulation.chance
        if chance.random() < self.blocks:
            self.simulation.note(f"the callback of {call} never returns")
            self.stuck.add(self.threads.current)
            yield Bell(self.simulation).wait(None)
        elif chance.random() < 0.2 and not self.connection.has_ended:
            yield from self._guard(self._call())
        else:
            yield from self._pass_time(chance.choice((0.0, 0.0, 0.003)))

    # The other end

    def request(self, call: int) -> None:
        """Have it answered: late, in any order, twice or not at all."""
        chance = self.simulation.chance
        if self.is_lossy and chance.random() < 0.3:
            return
        for _ in range(1 + (chance.random() < self.repeats)):
            delay = chance.choice((0.0001, 0.001, 0.01)) * chance.random()
            response = Response(call)
            self.responses.append(response)
            self.simulation.after(delay, lambda r=response: self._respond(r))

    def _respond(self, response: Response) -> None:
        if response in self.responses:
            self.responses.remove(response)
            self.simulation.note(f"response {response.call} comes")
            self.connection.socket.came(response)

    def cut(self) -> None:
        """The other end hangs up; of its responses, some still come."""
        for response in self.responses[: self.simulation.chance.randint(0, 3)]:
            self._respond(response)
        self.simulation.note("the connection is cut")
        self.is_cut = True
        self.connection.socket.hang_up()

    def connection_ended(self) -> None:
        """Whoever waits is told that no response will come."""
        pending, self.pending = self.pending, {}
        for future in pending.values():
            future.complete()

    def _check_end(self) -> None:
        connection, role = self.connection, self.connection.role
        if hanging := self.threads.alive.keys() - self.stuck:
            raise Wrong(f"{sorted(hanging)} wait without end")
        if connection.frames:
            raise Wrong(f"{connection.frames} were read, and nobody delivers them")
        if connection.has_ended != self.is_cut:
            raise Wrong(f"was the connection cut? {self.is_cut}; nobody knows of it")
        if not self.is_cut and not connection.is_watched:
            raise Wrong("nobody watches the connection")
        if self.is_cut and self.pending:
            raise Wrong(f"{sorted(self.pending)} were not told of the end")
        if connection.socket.frames:
            raise Wrong(f"{connection.socket.frames} have come, and nobody reads them")
        if role.is_taken or role.sleeping:
            raise Wrong(f"nothing happens any more, and {role}")
        if not self.stuck and (role.waiters or role.in_delivery):
            raise Wrong(f"nobody waits any more, and {role}")
