"""Calls back inside a call, which go by the lane of the call: how they end, however they end.

The workers live in this process; the sockets between them are real. `A` calls worker 1, where
`T` runs and calls back; `B` runs that on worker 0, and may call worker 1 again.
"""

import random
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire._rpc.encoding import prepare
from gradwire._transport import thread_cache
from gradwire._transport.framed_socket import Stream
from gradwire._transport.nesting import LaneEnd
from gradwire._transport.questions import Question
from gradwire._transport.thread_cache import Hosts
from gradwire._wire.frames import Frame, Parcel
from gradwire.worker import Worker
from sockets_world import (
    LIMIT,
    close_world,
    open_world,
    socket_world,
    together,
    vanish,
    wait_until,
)

MANNERS: dict[str, dict[str, Any]] = {
    "shared memory": {},
    "unix": {"shared_memory": False},
    "tcp": {"unix_sockets": False},
}
SOON = 2.0
"""Seconds: far more than it takes, far less than what else would end the wait."""
MOMENT = 0.05
"""Seconds: longer than it takes, mostly."""


class Gate:
    """Holds up whoever comes until it is opened."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.opened = threading.Event()

    def __call__(self) -> None:
        self.entered.set()
        assert self.opened.wait(LIMIT)


GATES: defaultdict[str, Gate] = defaultdict(Gate)
SEEN: dict[str, Any] = {}
"""What functions on the workers leave for the test, by name."""


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    GATES.clear()
    SEEN.clear()
    yield
    for gate in GATES.values():
        gate.opened.set()


class Always(set[int]):
    """The habit of requests that are called back, at whatever depth."""

    def __contains__(self, depth: object) -> bool:
        return True

    def __len__(self) -> int:
        return 1


def look_for_long(patch: pytest.MonkeyPatch, limit: float) -> None:
    """Have all looks find something, if it comes in time."""

    def look(stream: Stream, *_: Any) -> bool:
        try:
            while not stream.reader.frames:
                stream.read(time.monotonic() + limit)
        except TimeoutError:
            return False
        return True

    patch.setattr(Stream, "may_look", lambda *_: True)
    patch.setattr(Stream, "look", look)


def have_stand_ins(patch: pytest.MonkeyPatch) -> None:
    """Have all who ask call a stand-in."""
    real = LaneEnd.wait_for

    def wait_for(
        lane: LaneEnd, question: Question, parcel: Parcel, *others: Any
    ) -> Frame:
        parcel.habit = Always()
        return real(lane, question, parcel, *others)

    patch.setattr(LaneEnd, "wait_for", wait_for)
    look_for_long(patch, MOMENT)


@pytest.fixture(params=[*MANNERS, "stand-ins"])
def workers(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[Worker]]:
    if request.param == "stand-ins":
        have_stand_ins(monkeypatch)
    with socket_world(2, **MANNERS.get(request.param, {})) as world:
        yield world


@pytest.fixture(params=["", "stand-ins"])
def pair(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[Worker]]:
    if request.param:
        have_stand_ins(monkeypatch)
    with socket_world(2) as world:
        yield world


def parting(worker: Worker) -> list[Any]:
    """The lanes of a worker on which something is still to come."""
    lanes = [lane for link in worker._transport._out.values() for lane in link._parting]
    return [lane for lane in lanes if lane.fileno() >= 0]


def at_same_time(function: Callable[[], Any]) -> Callable[[], Any]:
    """Begin something; the result is what to call for its end."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(function())
        except BaseException as error:  # noqa: BLE001 given back
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def end(limit: float = SOON) -> Any:
        thread.join(limit)
        assert outcome, "it hangs"
        return outcome[0]

    return end


# What is run on the workers


def other() -> str:
    return {"worker0": "worker1", "worker1": "worker0"}[gw.get_worker_info().name]


def back(function: Any, *args: Any, **how: Any) -> Any:
    return gw.rpc_sync(other(), function, args, **how)


def descend(depth: int) -> int:
    return 1 + back(descend, depth - 1) if depth else 0


def descend_with(x: torch.Tensor, depth: int) -> torch.Tensor:
    return back(descend_with, x + 1, depth - 1) if depth else x


def echo(x: Any) -> Any:
    return x


def pass_gate(name: str) -> str:
    GATES[name]()
    return name


def attempt(name: str, function: Any, *args: Any, **how: Any) -> Any:
    """Call back; what came of it is also left in `SEEN`."""
    try:
        SEEN[name] = back(function, *args, **how)
    except gw.GradwireError as error:
        SEEN[name] = error
        return f"{name}: {type(error).__name__}"
    return SEEN[name]


def give_up(name: str) -> str:
    """Call back for something that does not end in time."""
    with pytest.raises(gw.CallTimeout):
        back(pass_gate, name, timeout=0.1)
    return "gave up"


# The way they go


def test_a_call_back_goes_by_the_lane_of_the_call(workers: list[Worker]) -> None:
    for depth in (1, 2, 3, 4, 60, 200):
        assert workers[0].rpc_sync("worker1", descend, (depth,)) == depth
    links = [link for worker in workers for link in worker._transport._out.values()]
    # Where threads are slow to get their turn, one or the other takes its own.
    assert sum(len(link._lanes) for link in links) < 10


@pytest.mark.parametrize("length", [0, 10, 30_000, 100_000, 2_000_000])
def test_tensors_go_back_and_forth(workers: list[Worker], length: int) -> None:
    for turn in range(4):  # the first of a size goes another way than the next
        x = torch.arange(length) + turn
        found = workers[0].rpc_sync("worker1", descend_with, (x, 5))
        assert torch.equal(found, x + 5)


def make(length: int) -> torch.Tensor:
    return torch.arange(length)


def test_answers_inside_a_call_may_be_large(workers: list[Worker]) -> None:
    for _ in range(4):
        x = workers[0].rpc_sync("worker1", back, (back, make, 1_000_000))
        assert torch.equal(x, torch.arange(1_000_000))


def test_what_is_raised_inside_comes_out(workers: list[Worker]) -> None:
    with pytest.raises(ZeroDivisionError):
        workers[0].rpc_sync("worker1", back, (back, divmod, 1, 0))
    assert workers[0].rpc_sync("worker1", descend, (3,)) == 3


LOCK = threading.RLock()
LOCAL = threading.local()


def look_around() -> tuple[bool, bool]:
    free = LOCK.acquire(blocking=False)
    if free:
        LOCK.release()
    return free, hasattr(LOCAL, "value")


def test_a_call_back_sees_nothing_of_the_thread_that_waits(pair: list[Worker]) -> None:
    LOCAL.value = 1
    with LOCK:
        found = pair[0].rpc_sync("worker1", back, (look_around,))
    del LOCAL.value
    assert found == (False, False)


def test_calls_from_other_threads_of_a_function_take_their_own_lanes(
    pair: list[Worker],
) -> None:
    assert pair[0].rpc_sync("worker1", call_from_threads, (8,)) == [*range(8)]
    assert pair[1]._transport._out, "they cannot all have gone by one lane"


def call_from_threads(count: int) -> list[Any]:
    def call(i: int) -> Any:
        enter(me)
        return back(echo, i)

    me = gw.api.current_worker()
    enter = gw.api.enter
    return together(*(lambda i=i: call(i) for i in range(count)))  # type: ignore[misc]


def test_many_threads_nest_at_the_same_time(workers: list[Worker]) -> None:
    def call(worker: Worker, to: str) -> None:
        for depth in range(12):
            assert worker.rpc_sync(to, descend, (depth,)) == depth

    ways = [(workers[0], "worker1"), (workers[1], "worker0")] * 4
    together(*(lambda w=w, to=to: call(w, to) for w, to in ways))  # type: ignore[misc]


def around(names: list[str]) -> list[str]:
    here = gw.get_worker_info().name
    return [here, *(gw.rpc_sync(names[0], around, (names[1:],)) if names else [])]


def test_three_workers_call_each_other_around() -> None:
    with socket_world(3) as world:
        way = ["worker2", "worker0", "worker1", "worker0", "worker2", "worker2"]
        assert world[0].rpc_sync("worker1", around, (way,)) == ["worker1", *way]


class Counter:
    def count(self) -> str:
        return str(back(pass_gate, "meanwhile"))


def test_a_call_back_is_run_while_the_caller_does_something_else(
    pair: list[Worker],
) -> None:
    before = gw.api.enter(pair[0])
    try:
        counter = gw.remote("worker1", Counter)
        for _ in range(2):
            GATES.clear()

            def release() -> None:
                assert GATES["meanwhile"].entered.wait(SOON)
                GATES["meanwhile"].opened.set()

            assert counter.rpc_meanwhile(release).count() == "meanwhile"
        del counter
    finally:
        gw.api.enter(before)


# Who gives up


def test_an_answer_comes_at_once_though_what_was_given_up_still_runs(
    workers: list[Worker],
) -> None:
    start = time.monotonic()
    assert workers[0].rpc_sync("worker1", give_up, ("slow",)) == "gave up"
    assert time.monotonic() - start < SOON
    assert not GATES["slow"].opened.is_set()
    assert len(parting(workers[0])) == 1, "the late answer comes by that lane"
    assert workers[0].rpc_sync("worker1", descend, (6,)) == 6
    GATES["slow"].opened.set()
    wait_until(lambda: not parting(workers[0]))
    assert workers[0].rpc_sync("worker1", descend, (6,)) == 6


def pass_then_call() -> None:
    GATES["inner"]()
    SEEN["inner"] = back(max, 1, 2)


def give_up_on_a_caller() -> str:
    with pytest.raises(gw.CallTimeout):
        back(pass_then_call, timeout=0.1)
    GATES["outer"]()
    return "done"


def test_who_was_given_up_can_still_call_while_nobody_waits_for_it(
    workers: list[Worker],
) -> None:
    end = at_same_time(lambda: workers[0].rpc_sync("worker1", give_up_on_a_caller))
    assert GATES["outer"].entered.wait(SOON)  # T computes, and reads nothing
    GATES["inner"].opened.set()
    wait_until(lambda: SEEN.get("inner") == 2, limit=SOON)
    GATES["outer"].opened.set()
    assert end() == "done"
    assert workers[0].rpc_sync("worker1", descend, (6,)) == 6


def test_late_answers_are_not_taken_for_others(workers: list[Worker]) -> None:
    # B gives up what T' runs; T and A get their answers, and the lane is used again.
    for name in ("a", "b", "c"):
        assert workers[0].rpc_sync("worker1", back, (give_up, name)) == "gave up"
        for i in range(5):
            assert workers[0].rpc_sync("worker1", back, (echo, i)) == i
        GATES[name].opened.set()
        for i in range(5):
            assert workers[0].rpc_sync("worker1", back, (echo, i)) == i
    wait_until(lambda: not parting(workers[0]))


def call_back_twice() -> None:
    SEEN["first"] = back(pass_gate, "first")
    SEEN["second"] = back(descend, 3)


def test_a_caller_that_gives_up_does_not_stop_what_it_began(
    workers: list[Worker],
) -> None:
    gate = GATES["first"]
    start = time.monotonic()
    with pytest.raises(gw.CallTimeout):
        workers[0].rpc_sync("worker1", call_back_twice, timeout=0.2)
    assert 0.2 <= time.monotonic() - start < SOON
    assert gate.entered.wait(SOON)  # on a busy machine only now
    gate.opened.set()
    wait_until(lambda: SEEN.get("second") == 3, limit=SOON)
    assert SEEN["first"] == "first"
    wait_until(lambda: not parting(workers[0]))
    assert workers[0].rpc_sync("worker1", descend, (6,)) == 6


def call_back_thrice() -> None:
    for name in ("first", "second", "third"):
        SEEN[name] = back(echo, name)


@pytest.mark.parametrize("when", ["before", "after"])
def test_who_gives_up_as_the_reading_is_given_back_does_not_keep_it(
    workers: list[Worker], when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, given, gave_up = LaneEnd._give_role, [], threading.Event()

    def give_role(lane: LaneEnd, asker: Question) -> None:
        is_first = lane._station is workers[0]._transport._station and not given
        if is_first and when == "before":
            assert gave_up.wait(LIMIT)
        real(lane, asker)
        if is_first:
            given.append(lane._has_role(asker))
            assert gave_up.wait(LIMIT)

    monkeypatch.setattr(LaneEnd, "_give_role", give_role)
    with pytest.raises(gw.CallTimeout):
        workers[0].rpc_sync("worker1", call_back_thrice, timeout=0.2)
    gave_up.set()
    wait_until(lambda: "third" in SEEN, limit=SOON)
    assert given == [when == "after"]
    wait_until(lambda: not parting(workers[0]))
    assert workers[0].rpc_sync("worker1", descend, (6,)) == 6


LONG = 8 << 20
"""Bytes: more than a socket takes while nobody reads."""


def answer_at_length(name: str) -> bytes:
    pass_gate(name)
    return bytes(LONG)


def answer_at_length_too() -> bytes:
    """Gives up a call back, and answers at the same time as that one is answered."""
    with pytest.raises(gw.CallTimeout):
        back(answer_at_length, "inner", timeout=0.1)
    GATES["inner"].opened.set()
    return bytes(LONG)


def test_two_long_answers_at_the_same_time_do_not_wait_for_each_other(
    workers: list[Worker],
) -> None:
    for _ in range(3):
        GATES.clear()
        start = time.monotonic()
        answer = workers[0].rpc_sync("worker1", answer_at_length_too, timeout=LIMIT)
        assert len(answer) == LONG
        assert time.monotonic() - start < SOON


def test_all_give_up_from_the_inside_out(workers: list[Worker]) -> None:
    nest = (back, back, back, pass_gate, "deep")
    with pytest.raises(gw.CallTimeout):
        workers[0].rpc_sync("worker1", back, nest, timeout=0.2)
    for timeout in (0.01, 0.05):
        said = workers[0].rpc_sync("worker1", give_up_in_turn, (4, timeout))
        assert said == "gave up"
    for gate in list(GATES.values()):
        gate.opened.set()
    wait_until(lambda: not parting(workers[0]))
    assert workers[0].rpc_sync("worker1", descend, (6,)) == 6


def give_up_in_turn(depth: int, timeout: float) -> str:
    """Each level waits longer than the one inside it."""
    if not depth:
        return pass_gate("deepest")
    try:
        back(give_up_in_turn, depth - 1, timeout, timeout=timeout * depth)
    except gw.CallTimeout:
        pass
    return "gave up"


def test_ctrl_c_ends_the_wait_for_a_call_back(pair: list[Worker]) -> None:
    def interrupt() -> None:
        assert GATES["first"].entered.wait(SOON)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    sent = at_same_time(interrupt)
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        pair[0].rpc_sync("worker1", call_back_twice)
    assert time.monotonic() - start < SOON
    sent()
    GATES["first"].opened.set()
    wait_until(lambda: SEEN.get("second") == 3, limit=SOON)
    assert pair[0].rpc_sync("worker1", descend, (6,)) == 6


def call_back_later() -> None:
    pass_gate("later")
    SEEN["later"] = back(descend, 3)


@pytest.mark.parametrize("look", [1, 2])
def test_ctrl_c_before_a_look_leaves_no_letter_lying(
    pair: list[Worker], look: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Letters are expected by then. The second look is that after the first was in vain."""
    real, looks, me = Stream.look, [], threading.current_thread()

    def interrupted(stream: Stream, *others: Any) -> Any:
        if threading.current_thread() is me:
            looks.append(stream)
            if len(looks) == look:
                raise KeyboardInterrupt
        return real(stream, *others)

    assert pair[0].rpc_sync("worker1", descend, (3,)) == 3
    monkeypatch.setattr(Stream, "look", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pair[0].rpc_sync("worker1", call_back_later)
    monkeypatch.undo()
    GATES["later"].opened.set()
    wait_until(lambda: SEEN.get("later") == 3, limit=SOON)


# Stand-ins


@pytest.fixture
def two() -> Iterator[list[Worker]]:
    with socket_world(2) as world:
        yield world


def called(patch: pytest.MonkeyPatch, name: str) -> list[Any]:
    """How often something of `LaneEnd` is called that has something to do."""
    real, calls = getattr(LaneEnd, name), []

    def call(lane: LaneEnd, *args: Any) -> Any:
        if args[0]:
            calls.append(args)
        return real(lane, *args)

    patch.setattr(LaneEnd, name, call)
    return calls


def back_perhaps(is_meant: bool) -> str:
    return back(echo, "back") if is_meant else "not"


def test_a_stand_in_runs_what_is_called_back_as_the_last_time(
    two: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    look_for_long(monkeypatch, LIMIT)
    stand_ins, handed_over = [
        called(monkeypatch, name) for name in ("_stand_in", "_start")
    ]
    found = []
    for is_meant in (True, True, False, False, True, True):
        stand_ins.clear()
        handed_over.clear()
        said = two[0].rpc_sync("worker1", back_perhaps, (is_meant,))
        assert said == ("back" if is_meant else "not")
        found.append((len(stand_ins), len(handed_over)))
    # The third was expected to call back, and did not.
    assert found == [(0, 1), (1, 0), (1, 0), (0, 0), (0, 1), (1, 0)]


def test_what_is_expected_depends_on_the_depth(
    two: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    look_for_long(monkeypatch, LIMIT)
    assert two[0].rpc_sync("worker1", descend, (3,)) == 3
    stand_ins, handed_over = [
        called(monkeypatch, name) for name in ("_stand_in", "_start")
    ]
    assert two[0].rpc_sync("worker1", descend, (3,)) == 3
    assert (len(stand_ins), len(handed_over)) == (3, 0)  # the last is not called back


def hold_back_stand_ins(
    patch: pytest.MonkeyPatch, then: Callable[[Callable[[], object]], None]
) -> None:
    real = Hosts.run

    def run(threads: Hosts, task: Any) -> None:
        if task.func.__name__ == "_stand_in":
            then(task)
        else:
            real(threads, task)

    patch.setattr(Hosts, "run", run)


@pytest.mark.parametrize("args", [(descend, 5), (echo, 5)])
def test_a_stand_in_that_is_late_is_not_waited_for(
    two: list[Worker], monkeypatch: pytest.MonkeyPatch, args: Any
) -> None:
    have_stand_ins(monkeypatch)
    held: list[Callable[[], object]] = []
    hold_back_stand_ins(monkeypatch, held.append)
    for _ in range(3):
        assert two[0].rpc_sync("worker1", *[args[0], args[1:]], timeout=LIMIT) == 5
    assert held
    for stand_in in held:
        stand_in()  # finds nothing to do
    assert two[0].rpc_sync("worker1", descend, (6,)) == 6
    assert len(two[0]._transport._out[1]._lanes) == 1


@pytest.mark.parametrize("step", ["_has_role", "_pass_role"])
def test_ctrl_c_while_a_stand_in_is_dismissed_leaves_nothing_behind(
    two: list[Worker], monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    have_stand_ins(monkeypatch)
    hold_back_stand_ins(monkeypatch, lambda task: None)
    real, lanes = getattr(LaneEnd, step), []

    def interrupted(lane: LaneEnd, who: object) -> Any:
        dismissing = sys._getframe(1).f_code.co_name == "_dismiss_stand_in"
        if dismissing and not lanes:
            lanes.append(lane)
            raise KeyboardInterrupt
        return real(lane, who)

    monkeypatch.setattr(LaneEnd, step, interrupted)
    with pytest.raises(KeyboardInterrupt):
        two[0].rpc_sync("worker1", call_back_later)
    monkeypatch.undo()
    GATES["later"].opened.set()
    wait_until(lambda: SEEN.get("later") == 3, limit=SOON)
    wait_until(lambda: lanes[0].fileno() < 0, limit=SOON)


def test_without_more_threads_there_is_no_stand_in(
    two: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(task: object) -> None:
        raise RuntimeError("can't start new thread")

    have_stand_ins(monkeypatch)
    hold_back_stand_ins(monkeypatch, refuse)
    assert two[0].rpc_sync("worker1", descend, (6,)) == 6


def test_what_there_is_to_do_meanwhile_is_not_left_to_a_stand_in(
    two: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    have_stand_ins(monkeypatch)
    stand_ins = called(monkeypatch, "_stand_in")
    agent, threads = two[0]._agent, []
    call = prepare(echo, (5,), None)
    answer = agent.caller.call_sync(
        agent.peer("worker1"),
        call,
        LIMIT,
        lambda: threads.append(threading.get_ident()),
    )
    assert answer == 5
    assert threads == [threading.get_ident()]
    assert not stand_ins


@pytest.mark.parametrize("how", ["timeout", "Ctrl-C"])
def test_who_leaves_while_its_stand_in_looks_leaves_nothing_behind(
    two: list[Worker], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    have_stand_ins(monkeypatch)
    lanes, gate, real = [], Gate(), LaneEnd._stand_in

    def stand_in(lane: LaneEnd, question: Question, duty: Any) -> None:
        if not lanes:  # the first has begun, and takes long
            lanes.append(lane)
            duty.parcel.afterwards = (gate,)
        real(lane, question, duty)

    def leave() -> None:
        assert gate.entered.wait(SOON)
        if how == "Ctrl-C":
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    monkeypatch.setattr(LaneEnd, "_stand_in", stand_in)
    left = at_same_time(leave)
    start = time.monotonic()
    limit = 0.2 if how == "timeout" else LIMIT
    with pytest.raises(gw.CallTimeout if how == "timeout" else KeyboardInterrupt):
        two[0].rpc_sync("worker1", descend, (3,), timeout=limit)
    assert time.monotonic() - start < SOON
    left()
    assert lanes[0].fileno() >= 0  # its stand-in will look
    gate.opened.set()
    wait_until(lambda: lanes[0].fileno() < 0, limit=SOON)
    assert two[0].rpc_sync("worker1", descend, (6,)) == 6


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("how", ["cut", "error"])
def test_a_stand_in_that_fails_keeps_nobody_waiting(
    two: list[Worker], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    def fail() -> None:
        if how == "error":
            raise ValueError("something is wrong")
        failed[0].hang_up()

    have_stand_ins(monkeypatch)
    real, failed = LaneEnd._stand_in, []

    def stand_in(lane: LaneEnd, question: Question, duty: Any) -> None:
        if not failed:
            failed.append(lane)
            duty.parcel.afterwards = (fail,)
        real(lane, question, duty)

    monkeypatch.setattr(LaneEnd, "_stand_in", stand_in)
    with pytest.raises(gw.WorkerLostError, match="connection closed"):
        two[0].rpc_sync("worker1", descend, (3,))
    wait_until(lambda: failed[0].fileno() < 0, limit=SOON)
    assert two[0].rpc_sync("worker1", descend, (6,)) == 6


# What breaks


def nest_to_gate(depth: int) -> Any:
    """Call back so often, then wait at the gate; each level leaves what came of its call."""
    if not depth:
        return pass_gate("end")
    return attempt(f"level {depth}", nest_to_gate, depth - 1)


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
@pytest.mark.parametrize("end", [0, 1])
def test_a_lane_that_is_cut_ends_all_waits_on_it(
    workers: list[Worker], depth: int, end: int
) -> None:
    ended = at_same_time(
        lambda: workers[0].rpc_sync("worker1", nest_to_gate, (depth,), timeout=0)
    )
    assert GATES["end"].entered.wait(SOON)
    link = [workers[0]._transport._out[1], *workers[1]._transport._in.values()][end]
    for lane in list(link._lanes):
        lane.hang_up()
    assert isinstance(ended(), gw.WorkerLostError)
    levels = [f"level {level}" for level in range(1, depth + 1)]
    wait_until(lambda: SEEN.keys() >= set(levels), limit=SOON)
    assert all(isinstance(SEEN[level], gw.WorkerLostError) for level in levels)
    GATES["end"].opened.set()
    assert workers[0].rpc_sync("worker1", descend, (6,)) == 6


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_worker_that_dies_ends_all_waits_for_it(depth: int, lost: int) -> None:
    workers = open_world(2)
    ended = at_same_time(
        lambda: workers[0].rpc_sync("worker1", nest_to_gate, (depth,), timeout=0)
    )
    assert GATES["end"].entered.wait(SOON)
    gone = at_same_time(lambda: vanish(workers[lost]))
    assert isinstance(ended(), gw.GradwireError)
    levels = {f"level {level}" for level in range(1, depth + 1)}
    wait_until(lambda: SEEN.keys() >= levels, limit=SOON)
    assert all(isinstance(SEEN[level], gw.GradwireError) for level in levels)
    GATES["end"].opened.set()
    gone(LIMIT)
    close_world([workers[1 - lost]], graceful=False)


def test_garbage_inside_a_call_ends_it(pair: list[Worker]) -> None:
    ended = at_same_time(
        lambda: pair[0].rpc_sync("worker1", nest_to_gate, (1,), timeout=0)
    )
    assert GATES["end"].entered.wait(SOON)
    (link,) = pair[1]._transport._in.values()
    for lane in list(link._lanes):
        lane._stream.writer.write_bytes(b"no frame" * 16)
    assert isinstance(ended(), gw.WorkerLostError)
    wait_until(lambda: "level 1" in SEEN, limit=SOON)
    assert isinstance(SEEN["level 1"], gw.WorkerLostError)


# The threads


def run_all(threads: Hosts, count: int) -> set[int]:
    """Run tasks one after the other; the threads they ran in."""
    idents = set()
    for _ in range(count):
        done = threading.Event()
        threads.run(lambda done=done: (idents.add(threading.get_ident()), done.set()))  # type: ignore[misc]
        assert done.wait(SOON)
        wait_until(lambda: threads._idle)
    return idents


def start(task: Callable[[], object]) -> None:
    threading.Thread(target=task, name="host").start()


@pytest.mark.parametrize("without", ["", "eventfd"])
def test_a_thread_without_a_task_takes_the_next(
    monkeypatch: pytest.MonkeyPatch, without: str
) -> None:
    if without:
        monkeypatch.delattr("os.eventfd", raising=False)
    threads = Hosts(start)
    assert len(run_all(threads, 5)) == 1
    threads.close()


def test_tasks_do_not_wait_for_each_other() -> None:
    threads, meeting = Hosts(start), threading.Barrier(5)
    for _ in range(4):
        threads.run(lambda: meeting.wait(SOON))
    meeting.wait(SOON)
    threads.close()
    threads.run(lambda: meeting.wait(SOON))  # also now: it just does not stay
    threads.run(lambda: [meeting.wait(SOON) for _ in range(1)])
    for _ in range(2):
        threads.run(lambda: meeting.wait(SOON))
    meeting.wait(SOON)


def test_threads_go_when_there_is_nothing_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(thread_cache, "_IDLE", 0.01)
    threads = Hosts(start)
    run_all(threads, 1)
    wait_until(lambda: not threads._idle)
    wait_until(lambda: "host" not in {t.name for t in threading.enumerate()})
    run_all(threads, 1)
    threads.close()


@pytest.mark.parametrize("step", ["give", "ring"])
def test_ctrl_c_while_a_task_is_given_loses_no_thread(
    monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    monkeypatch.setattr(thread_cache, "_IDLE", MOMENT)
    threads, done = Hosts(start), threading.Event()
    run_all(threads, 1)
    (host,) = threads._idle

    def interrupted(*_: Any) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(host if step == "give" else host.bell, step, interrupted)
    with pytest.raises(KeyboardInterrupt):
        threads.run(done.set)
    if step == "ring":
        assert done.wait(SOON)  # it was given, and is found
    is_over = [t for t in threading.enumerate() if t.name == "host"]
    wait_until(lambda: not any(t.is_alive() for t in is_over), limit=SOON)
    threads.close()


# All at once


def wander(seed: int, depth: int) -> int:
    """Call back at random, with timeouts that are often too short."""
    chance = random.Random(seed)
    for _ in range(chance.randrange(3) if depth else 0):
        args = (chance.getrandbits(32), depth - 1)
        timeout = chance.choice([0.0, 0.0, 0.0, 1e-4, 1e-3, 5e-3, 2e-2])
        how = chance.randrange(8)
        try:
            if how == 0:
                gw.rpc_async(other(), wander, args, timeout=timeout).wait()
            elif how == 1:
                gw.rpc_sync("worker2", wander_from_outside, args, timeout=timeout)
            else:
                back(wander, *args, timeout=timeout)
        except gw.CallTimeout:
            SEEN["late"] = SEEN.get("late", 0) + 1
    if chance.random() < 0.1:
        time.sleep(chance.choice([1e-4, 1e-3, 1e-2]))  # nobody relies on it
    return seed


def wander_from_outside(seed: int, depth: int) -> int:
    to = f"worker{seed % 2}"
    return int(gw.rpc_sync(to, wander, (seed, depth - 1))) if depth > 0 else seed


@pytest.mark.parametrize("stand_ins", [False, True])
def test_calls_that_give_up_anywhere_leave_nothing_behind(
    fuzz_seed: int, stand_ins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if stand_ins:
        have_stand_ins(monkeypatch)

    def call(worker: Worker, to: str, first: int) -> None:
        for seed in range(first, first + 15):
            assert worker.rpc_sync(to, wander, (seed, 7), timeout=0) == seed

    with socket_world(3, **list(MANNERS.values())[fuzz_seed % 3]) as world:
        ways = [(world[0], "worker1"), (world[1], "worker0")] * 2
        calls = [
            partial(call, *way, 1000 * fuzz_seed + 100 * i)
            for i, way in enumerate(ways)
        ]
        together(*calls)
        wait_until(lambda: not any(map(parting, world)))
        for worker, to in ways:
            assert worker.rpc_sync(to, descend, (6,)) == 6


def test_what_is_rung_before_anybody_waits_is_not_lost() -> None:
    for _ in range(200):
        question = Question()
        start = threading.Barrier(2)

        def ring(question: Question = question, start: Any = start) -> None:
            start.wait(SOON)
            question.bell.ring()

        rung = at_same_time(ring)
        start.wait(SOON)
        assert question.bell.wait(SOON)
        rung()
