"""Calls over a transport that drops, repeats, delays and cuts, by a seed."""

import itertools
import operator
import threading
from collections import Counter
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import gradwire as gw
from gradwire._rpc.messages import GATHER
from gradwire._transport.base import Card
from gradwire._transport.faulty import Faults, FaultyTransport
from gradwire._wire.frames import Parcel
from gradwire._wire.messages import CALL, FAILURE, RESULT
from gradwire.testing import World
from tests.rpc.functions import Boom, boom, never
from tests.worlds import LIMIT, in_flight, meanwhile, wait_until

REQUESTS = frozenset({CALL})
ANSWERS = frozenset({RESULT, FAILURE})

runs: Counter[Any] = Counter()
_counting = threading.Lock()


def count(key: Any) -> Any:
    """Called once, it is counted once."""
    with _counting:
        runs[key] += 1
    return key


@pytest.fixture(autouse=True)
def no_runs() -> None:
    runs.clear()


def outcomes(futures: list[Any]) -> Counter[str]:
    """How calls ended: with a result, or the name of an error."""
    ends: Counter[str] = Counter()
    for future in futures:
        try:
            future.wait()
            ends["result"] += 1
        except gw.GradwireError as error:
            ends[type(error).__name__] += 1
    return ends


# One fault at a time


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kinds", [REQUESTS, ANSWERS, None])
def test_what_comes_twice_is_run_once(seed: int, kinds: frozenset[int] | None) -> None:
    faults = Faults(repeat=1, kinds=kinds)
    with World(2, seed=seed, faults=faults) as world:
        futures = [world[0].rpc_async("worker1", count, (i,)) for i in range(30)]
        assert [future.wait() for future in futures] == list(range(30))
        assert [world[1].rpc_sync("worker0", count, (-i,)) for i in range(1, 9)]
    assert set(runs.values()) == {1}
    assert len(runs) == 38


def test_a_failure_that_comes_twice_is_raised_once() -> None:
    with World(2, faults=Faults(repeat=1)) as world:
        future = world[0].rpc_async("worker1", boom)
        for _ in range(3):
            with pytest.raises(Boom):
                future.wait()
        assert in_flight(world[0]) == "0 calls in flight"


@pytest.mark.parametrize("kinds", [REQUESTS, ANSWERS])
def test_what_is_dropped_ends_in_a_timeout(kinds: frozenset[int]) -> None:
    with World(2, faults=Faults(drop=1, kinds=kinds)) as world:
        with pytest.raises(gw.CallTimeout, match="on worker 'worker1' timed out"):
            world[0].rpc_sync("worker1", count, ("x",), timeout=0.01)
        assert in_flight(world[0]) == "0 calls in flight"
        assert world[0].rpc_sync("worker0", count, ("self",)) == "self"  # needs no link
    assert runs["x"] == (kinds is ANSWERS)


@pytest.mark.parametrize("seed", range(3))
def test_what_is_delayed_arrives_all_the_same(seed: int) -> None:
    faults = Faults(delay=0.7, longest_delay=0.02)
    with World(3, seed=seed, faults=faults) as world:
        pairs = [*itertools.permutations(range(3), 2)] * 10
        futures = [
            world[a].rpc_async(b, operator.add, (10 * i, b))
            for i, (a, b) in enumerate(pairs)
        ]
        results = [future.wait() for future in futures]
    assert results == [10 * i + b for i, (_, b) in enumerate(pairs)]


def test_a_delay_lets_later_messages_overtake() -> None:
    order: list[int] = []
    faults = Faults(delay=0.5, longest_delay=0.05)
    with World(2, seed=3, faults=faults) as world:
        futures = [world[0].rpc_async("worker1", count, (i,)) for i in range(30)]
        for i, future in enumerate(futures):
            future.add_done_callback(lambda _, i=i: order.append(i))
        for future in futures:
            future.wait()
    assert sorted(order) == list(range(30))
    assert order != list(range(30))


def test_a_cut_link_loses_the_worker_behind_it_for_both(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with World(3, faults=Faults(cut=1, kinds=frozenset({GATHER}))) as world:
        waiting = [
            world[0].rpc_async("worker2", never, timeout=0),
            world[2].rpc_async("worker0", never, timeout=0),
        ]
        caught: list[str] = []

        def wait_in_vain() -> None:
            with pytest.raises(gw.WorkerLostError) as info:
                world[0].rpc_sync("worker2", never, timeout=0)
            caught.append(info.value.worker)

        with meanwhile(wait_in_vain):
            wait_until(lambda: in_flight(world[0]) == "2 calls in flight")
            with pytest.raises(gw.WorkerLostError, match="'worker0': the link was cut"):
                world[2].barrier(timeout=0)
        assert caught == ["worker2"]
        assert outcomes(waiting) == {"WorkerLostError": 2}
        for here, there in ((0, 2), (2, 0)):
            with pytest.raises(gw.WorkerLostError):
                world[here].rpc_sync(there, count, ("late",))
        assert world[0].rpc_sync("worker1", count, ("x",)) == "x"
        assert world[2].rpc_sync("worker1", count, ("y",)) == "y"
    assert "lost worker 'worker0': the link was cut" in caplog.text


def test_an_answer_can_be_the_one_that_is_cut_off() -> None:
    with World(2, faults=Faults(cut=1, kinds=ANSWERS)) as world:
        with pytest.raises(gw.WorkerLostError, match="lost worker 'worker1'"):
            world[0].rpc_sync("worker1", count, ("x",), timeout=0)
        with pytest.raises(gw.WorkerLostError, match="lost worker 'worker0'"):
            world[1].rpc_sync("worker0", count, ("y",))
    assert runs == {"x": 1}


@pytest.mark.parametrize("name", ["drop", "repeat", "delay", "cut"])
@pytest.mark.parametrize("value", [-0.1, 1.1])
def test_what_is_no_probability_is_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name}={value}: not a probability"):
        Faults(**{name: value})


class Recorder:
    """The transport below: notes which calls were sent."""

    def __init__(self) -> None:
        self.sent: list[int] = []

    def post(self, to: Card, call: int, parcel: Parcel) -> None:
        self.sent.append(call)


def sent(seed: int, faults: Faults) -> Counter[int]:
    recorder: Any = Recorder()
    nobody: Any = None
    faulty = FaultyTransport(recorder, nobody, seed=seed, faults=faults)
    for call in range(50):
        faulty.post(Card(name="there", id=1), call, Parcel(CALL, 1, b""))
    return Counter(recorder.sent)


@given(st.integers(), st.integers())
def test_the_seed_decides_which_are_dropped(seed: int, other: int) -> None:
    faults = Faults(drop=0.5)
    assert sent(seed, faults) == sent(seed, faults)
    assert sent(seed, faults) != sent(other, faults) or seed == other


@given(st.integers(), st.floats(0, 1))
def test_one_fault_more_does_not_change_the_others(seed: int, drop: float) -> None:
    dropping, repeating = Faults(drop=drop), Faults(drop=drop, repeat=0.5)
    assert set(sent(seed, dropping)) == set(sent(seed, repeating))


def test_kinds_that_are_not_meant_are_left_alone() -> None:
    assert sent(0, Faults(drop=1, kinds=ANSWERS)) == Counter(range(50))
    assert sent(0, Faults(drop=1, kinds=REQUESTS)) == Counter()


# All of them

probability = st.sampled_from([0.0, 0.1, 0.3, 1.0])
faults = st.builds(
    Faults,
    drop=probability,
    repeat=probability,
    delay=probability,
    longest_delay=st.just(0.005),
)


@settings(max_examples=settings.default.max_examples // 3)
@given(seed=st.integers(0, 2**16), faults=faults)
@example(seed=0, faults=Faults(drop=0.3, repeat=1, delay=1, longest_delay=0.005))
def test_every_call_ends_and_none_is_run_twice(seed: int, faults: Faults) -> None:
    runs.clear()
    with World(2, seed=seed, faults=faults, timeout=0.05) as world:
        futures = [world[i % 2].rpc_async(1 - i % 2, count, (i,)) for i in range(20)]
        ends = outcomes(futures)
        flights = {in_flight(worker) for worker in world}
        done = {future.wait() for future in futures if not failed(future)}
    assert flights == {"0 calls in flight"}
    assert set(ends) <= {"result", "CallTimeout"}
    assert set(runs.values()) <= {1}
    assert done <= set(runs)


def failed(future: Any) -> bool:
    try:
        future.wait()
    except gw.GradwireError:
        return True
    return False


@settings(max_examples=settings.default.max_examples // 4)
@given(
    seed=st.integers(0, 2**16),
    repeat=probability,
    delay=probability,
    size=st.integers(2, 4),
)
def test_without_losses_every_result_is_right(
    seed: int, repeat: float, delay: float, size: int
) -> None:
    faults = Faults(repeat=repeat, delay=delay, longest_delay=0.003)
    with World(size, seed=seed, faults=faults, timeout=LIMIT) as world:

        def ask(me: gw.Worker) -> list[int]:
            futures = [me.rpc_async(i % size, square_at, (i % 3, i)) for i in range(9)]
            return [future.wait() for future in futures]

        def square_at(back: int, x: int) -> int:
            return gw.rpc_sync(back % size, operator.mul, (x, x))

        assert world.run(ask) == [[i * i for i in range(9)]] * size
        gathered = world.run(lambda worker: worker.all_gather(worker.id))
        assert gathered == [{f"worker{i}": i for i in range(size)}] * size


@settings(max_examples=settings.default.max_examples // 4)
@given(seed=st.integers(0, 2**16), cut=st.sampled_from([0.05, 0.2, 0.5]))
def test_links_that_break_at_any_time_leave_nobody_waiting(
    seed: int, cut: float
) -> None:
    runs.clear()
    with World(3, seed=seed, faults=Faults(cut=cut, repeat=0.2)) as world:
        futures: list[Any] = []
        for i in range(30):
            try:
                futures.append(world[i % 3].rpc_async((i + 1) % 3, count, (i,)))
            except gw.WorkerLostError:
                pass  # known to be lost already
        ends = outcomes(futures)
        assert {in_flight(worker) for worker in world} == {"0 calls in flight"}
    assert set(ends) <= {"result", "WorkerLostError"}
    assert set(runs.values()) <= {1}


def test_a_world_with_faults_ends_although_messages_are_on_their_way() -> None:
    with World(2, faults=Faults(delay=1, longest_delay=60)) as world:
        future = world[0].rpc_async("worker1", count, ("x",))
    with pytest.raises(gw.ClosedError):
        future.wait()
    assert not runs
