"""Calls inside a call, back and forth between workers: how they end, however they end.

The workers live in this process; the sockets between them are real. `A` calls worker 1, where
`T` runs and calls back; `B` runs that on worker 0, and may call worker 1 again.
"""

import random
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire.worker import Worker
from tests.worlds import (
    LIMIT,
    SOON,
    close_world,
    open_world,
    socket_world,
    together,
    vanish,
    wait_until,
)

TRANSPORTS: dict[str, dict[str, Any]] = {
    "shared memory": {},
    "unix": {"shared_memory": False},
    "tcp": {"unix_sockets": False},
}


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


@pytest.fixture(params=TRANSPORTS)
def workers(request: pytest.FixtureRequest) -> Iterator[list[Worker]]:
    with socket_world(2, **TRANSPORTS[request.param]) as world:
        yield world


@pytest.fixture
def pair() -> Iterator[list[Worker]]:
    with socket_world(2) as world:
        yield world


def connect(workers: list[Worker]) -> None:
    """Open the connections for nested calls: on these, a request goes out in any time."""
    assert workers[0].rpc_sync("worker1", descend, (6,)) == 6


def leased(worker: Worker) -> list[Any]:
    """The connections that a worker has leased to callers, or keeps for them."""
    pools = worker._transport._out.values()
    return [connection for pool in pools for connection in pool._leased]


def owed(worker: Worker) -> list[Any]:
    """Those on which a response is still to come."""
    return [connection for connection in leased(worker) if connection.is_owed]


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


# What they bring back


def test_calls_back_and_forth_can_be_deep(workers: list[Worker]) -> None:
    for depth in (1, 2, 3, 4, 60, 200):
        assert workers[0].rpc_sync("worker1", descend, (depth,)) == depth
    for worker in workers:
        assert len(leased(worker)) <= 8, "the others share a connection"


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


def test_threads_of_a_function_can_call_back(pair: list[Worker]) -> None:
    assert pair[0].rpc_sync("worker1", call_from_threads, (8,)) == [*range(8)]


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
    connect(workers)
    start = time.monotonic()
    assert workers[0].rpc_sync("worker1", give_up, ("slow",)) == "gave up"
    assert time.monotonic() - start < SOON
    assert not GATES["slow"].opened.is_set()
    assert len(owed(workers[1])) == 1, "the late response will be read"
    assert workers[0].rpc_sync("worker1", descend, (6,)) == 6
    GATES["slow"].opened.set()
    wait_until(lambda: not owed(workers[0]))
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
    connect(workers)
    end = at_same_time(lambda: workers[0].rpc_sync("worker1", give_up_on_a_caller))
    assert GATES["outer"].entered.wait(SOON)  # T computes, and reads nothing
    GATES["inner"].opened.set()
    wait_until(lambda: SEEN.get("inner") == 2, limit=SOON)
    GATES["outer"].opened.set()
    assert end() == "done"
    assert workers[0].rpc_sync("worker1", descend, (6,)) == 6


def test_late_answers_are_not_taken_for_others(workers: list[Worker]) -> None:
    # B gives up what T' runs; T and A get their responses, and the connection is used again.
    for name in ("a", "b", "c"):
        assert workers[0].rpc_sync("worker1", back, (give_up, name)) == "gave up"
        for i in range(5):
            assert workers[0].rpc_sync("worker1", back, (echo, i)) == i
        GATES[name].opened.set()
        for i in range(5):
            assert workers[0].rpc_sync("worker1", back, (echo, i)) == i
    wait_until(lambda: not owed(workers[0]))


def call_back_twice() -> None:
    SEEN["first"] = back(pass_gate, "first")
    SEEN["second"] = back(descend, 3)


def test_a_caller_that_gives_up_does_not_stop_what_it_began(
    workers: list[Worker],
) -> None:
    connect(workers)
    gate = GATES["first"]
    start = time.monotonic()
    with pytest.raises(gw.CallTimeout):
        workers[0].rpc_sync("worker1", call_back_twice, timeout=0.2)
    assert 0.2 <= time.monotonic() - start < SOON
    assert gate.entered.wait(SOON)  # on a busy machine only now
    gate.opened.set()
    wait_until(lambda: SEEN.get("second") == 3, limit=SOON)
    assert SEEN["first"] == "first"
    wait_until(lambda: not owed(workers[0]))
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
    for name in ("deep", "deepest"):  # some may come there only now
        GATES[name].opened.set()
    wait_until(lambda: not owed(workers[0]))
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


# What breaks


def nest_to_gate(depth: int) -> Any:
    """Call back so often, then wait at the gate; each level leaves what came of its call."""
    if not depth:
        return pass_gate("end")
    return attempt(f"level {depth}", nest_to_gate, depth - 1)


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_connections_that_are_cut_end_all_waits_on_them(
    workers: list[Worker], depth: int
) -> None:
    ended = at_same_time(
        lambda: workers[0].rpc_sync("worker1", nest_to_gate, (depth,), timeout=0)
    )
    assert GATES["end"].entered.wait(SOON)
    for connection in [*leased(workers[0]), *leased(workers[1])]:
        connection.framed.hang_up()
    outcome = ended()
    levels = [f"level {level}" for level in range(1, depth + 1)]
    wait_until(lambda: SEEN.keys() >= set(levels), limit=SOON)
    # Whose connection was cut last may have heard of it from the level inside.
    outcomes = [outcome, *(SEEN[level] for level in levels)]
    assert all("WorkerLostError" in repr(one) for one in outcomes)
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


def test_a_connection_that_broke_while_idle_is_not_taken_for_a_loss(
    workers: list[Worker],
) -> None:
    for _ in range(3):
        assert workers[0].rpc_sync("worker1", echo, (1,)) == 1
        for connection in leased(workers[0]):
            connection.framed.hang_up()
    assert workers[0].rpc_sync("worker1", descend, (4,)) == 4


def test_garbage_inside_a_call_ends_it(pair: list[Worker]) -> None:
    ended = at_same_time(
        lambda: pair[0].rpc_sync("worker1", nest_to_gate, (1,), timeout=0)
    )
    assert GATES["end"].entered.wait(SOON)
    for worker in pair:
        for pool in worker._transport._in.values():
            for connection in list(pool._leased):
                connection.framed.write_bytes(b"no frame" * 16)
    assert "WorkerLostError" in repr(ended())  # or heard of it from the level inside
    wait_until(lambda: "level 1" in SEEN, limit=SOON)
    assert isinstance(SEEN["level 1"], gw.WorkerLostError)
    GATES["end"].opened.set()


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


def test_calls_that_give_up_anywhere_leave_nothing_behind(fuzz_seed: int) -> None:
    def call(worker: Worker, to: str, first: int) -> None:
        for seed in range(first, first + 15):
            assert worker.rpc_sync(to, wander, (seed, 7), timeout=0) == seed

    with socket_world(3, **list(TRANSPORTS.values())[fuzz_seed % 3]) as world:
        ways = [(world[0], "worker1"), (world[1], "worker0")] * 2
        calls = [
            partial(call, *way, 1000 * fuzz_seed + 100 * i)
            for i, way in enumerate(ways)
        ]
        together(*calls)
        wait_until(lambda: not any(map(owed, world)))
        for worker, to in ways:
            assert worker.rpc_sync(to, descend, (6,)) == 6
