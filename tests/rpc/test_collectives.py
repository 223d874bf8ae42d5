"""All workers of a world together: gathering, coming and going, and the end."""

import threading
from functools import partial
from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire._transport import connection
from gradwire._transport.base import Card
from gradwire._transport.loopback import LoopbackNetwork, LoopbackTransport
from gradwire._transport.rendezvous import Part
from gradwire.options import Options
from gradwire.testing import World
from gradwire.threads import Executor
from gradwire.worker import Worker
from tests.rpc.functions import add, held, holding, never, say, whoami
from tests.worlds import (
    LIMIT,
    in_flight,
    meanwhile,
    orders,
    socket_world,
    together,
    wait_until,
)

# Gathering


def test_everyone_gets_what_everyone_gave(world: World) -> None:
    all_parts = world.run(lambda worker: worker.all_gather(worker.id * 10))
    assert all_parts == [{"worker0": 0, "worker1": 10, "worker2": 20}] * 3


def test_tensors_can_be_gathered(world: World) -> None:
    results = world.run(lambda w: w.all_gather(torch.full((1000,), float(w.id))))
    for parts in results:
        for number in range(3):
            assert (parts[f"worker{number}"] == number).all()


@pytest.mark.parametrize("last", [0, 1, 2])
def test_a_gathering_waits_for_the_last_whoever_it_is(world: World, last: int) -> None:
    gate = threading.Event()

    def gather(worker: gw.Worker) -> list[Any]:
        if worker.id == last:
            assert gate.wait(LIMIT)
        else:
            gate.set()
        return [*worker.all_gather(worker.name).values()]

    assert world.run(gather) == [["worker0", "worker1", "worker2"]] * 3


def test_gatherings_that_follow_each_other_do_not_mix(world: World) -> None:
    def gather(worker: gw.Worker) -> list[list[Any]]:
        return [[*worker.all_gather((turn, worker.id)).values()] for turn in range(20)]

    for turns in world.run(gather):
        assert turns == [[(turn, i) for i in range(3)] for turn in range(20)]


def test_nobody_passes_a_barrier_before_all_are_there(world: World) -> None:
    arrived: list[int] = []

    def pass_barrier(worker: gw.Worker) -> int:
        arrived.append(worker.id)
        gw.barrier()
        return len(arrived)

    assert world.run(pass_barrier) == [3, 3, 3]


def test_one_worker_alone_waits_for_nobody() -> None:
    with World(1) as world:
        world[0].barrier()
        assert world[0].all_gather(1) == {"worker0": 1}


def test_nobody_leaves_a_barrier_before_the_others_have_been_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever answers may end its process right after, as programs do that never shut down."""
    with socket_world(3) as workers:
        # As if many requests had come at once, whose responses leave together, a moment later.
        monkeypatch.setattr(Executor, "backlog", 5)
        monkeypatch.setattr(connection, "_HOLD", 3600.0)
        together(*(partial(worker.barrier, 5.0) for worker in workers))
        monkeypatch.undo()


def test_a_barrier_others_do_not_come_to_times_out(world: World) -> None:
    for worker in (world[0], world[2]):
        with pytest.raises(gw.CallTimeout, match=r"timed out after 0\.01 s"):
            worker.barrier(timeout=0.01)
    world[1].barrier()  # the others are there


def test_a_part_given_in_vain_counts_when_the_others_come(world: World) -> None:
    with pytest.raises(gw.CallTimeout):
        world[1].all_gather("early", timeout=0.01)

    def gather(worker: gw.Worker) -> Any:
        return None if worker.id == 1 else worker.all_gather(worker.id)

    first, _, third = world.run(gather)
    assert first == third == {"worker0": 0, "worker1": "early", "worker2": 2}


def test_a_gathering_does_not_wait_for_a_worker_that_is_lost(world: World) -> None:
    results: dict[int, Any] = {}

    def gather(index: int) -> None:
        results[index] = world[index].all_gather(index)

    with meanwhile(lambda: gather(0), lambda: gather(1)):
        world.kill(2)
    assert results[0] == results[1] == {"worker0": 0, "worker1": 1}


def test_a_gathering_keeps_the_part_of_a_worker_lost_since() -> None:
    with World(3) as world:
        with pytest.raises(gw.CallTimeout):
            world[2].all_gather("last words", timeout=0.01)
        gatherings = world[0]._collectives._gatherings._open.values()
        wait_until(lambda: any(2 in gathering.parts for gathering in [*gatherings]))
        world.kill(2)
        results: list[Any] = []
        with meanwhile(lambda: results.append(world[1].all_gather(1))):
            assert world[0].all_gather(0) == {
                "worker0": 0,
                "worker1": 1,
                "worker2": "last words",
            }
        assert len(results) == 1


def test_a_gathering_fails_with_the_worker_that_collects(world: World) -> None:
    def gather(index: int) -> None:
        with pytest.raises(gw.WorkerLostError, match="lost worker 'worker0'"):
            world[index].all_gather(index)
        failed.wait(LIMIT)

    failed = threading.Barrier(3)
    with meanwhile(lambda: gather(1), lambda: gather(2)):
        wait_until(
            lambda: in_flight(world[1]) == in_flight(world[2]) == "1 calls in flight"
        )
        world.kill(0)
        failed.wait(LIMIT)
    result = world.run(lambda w: None if w.is_closed else w.all_gather(w.id))
    assert result[1:] == [{"worker1": 1, "worker2": 2}] * 2


# Coming and going


def test_others_hear_of_a_worker_that_leaves_or_is_lost(world: World) -> None:
    heard: list[gw.WorkerInfo] = []
    world[0].on_leave(heard.append)
    world.kill(2)
    world[1].shutdown(graceful=False)
    assert heard == [gw.WorkerInfo("worker2", 2), gw.WorkerInfo("worker1", 1)]
    assert world[0].get_worker_infos() == [gw.WorkerInfo("worker0", 0)]


def test_one_can_stop_listening(world: World) -> None:
    heard: list[gw.WorkerInfo] = []
    with world.as_worker(0):
        stop = gw.on_leave(heard.append)
        gw.on_join(heard.append)
        stop()
    world.kill(1)
    assert heard == []


def test_a_listener_that_raises_is_logged_and_stops_nobody(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[gw.WorkerInfo] = []
    world[0].on_leave(lambda info: 1 // 0)
    world[0].on_leave(heard.append)
    world.kill(1)
    assert len(heard) == 1
    assert "a callback for gone raised" in caplog.text


class Board:
    """Where the workers of an elastic world write down who they are."""

    is_elastic = True

    def __init__(self) -> None:
        self.network = LoopbackNetwork()
        self.cards: dict[int, Card] = {}

    def find(self, name: str) -> Card | None:
        return next((c for c in self.cards.values() if c.name == name), None)

    def card(self, number: int) -> Card | None:
        return self.cards.get(number)

    def leave(self, number: int) -> None:
        self.cards.pop(number, None)

    def was_here(self, name: str) -> bool:
        return False

    def note(self, name: str, part: Part) -> None:
        """Nobody serves here."""

    def join(self, name: str, number: int) -> Worker:
        def make_transport(executor: Executor) -> LoopbackTransport:
            return LoopbackTransport(self.network, executor)

        worker = Worker(name, number, options=Options(), make_transport=make_transport)
        self.cards[number] = worker.card
        worker.start([*self.cards.values()], tuple, self)
        return worker


def test_workers_hear_of_a_newcomer_that_greets_them() -> None:
    board = Board()
    with board.join("first", 0) as first:
        came: list[gw.WorkerInfo] = []
        went: list[gw.WorkerInfo] = []
        first.on_join(came.append)
        first.on_leave(went.append)
        with board.join("second", 1) as second:
            second.greet()
            assert came == [second.info]
            assert first.rpc_sync("second", add, (1, 2)) == 3
        assert went == [second.info]
        with pytest.raises(gw.WorkerLostError, match="it has left"):
            first.rpc_sync("second", add, (1, 2))


def test_a_newcomer_can_be_called_before_it_has_said_anything() -> None:
    board = Board()
    with board.join("first", 0) as first, board.join("second", 1) as second:
        assert first.get_worker_infos() == [first.info]
        assert first.rpc_sync("second", add, (1, 2)) == 3
        assert first.get_worker_infos() == [first.info, second.info]


def test_a_name_can_be_used_again_by_another_worker() -> None:
    board = Board()
    with board.join("first", 0) as first:
        with board.join("second", 1):
            first.rpc_sync("second", add, (1, 2))
        with board.join("second", 2) as successor:
            successor.greet()
            assert first.rpc_sync("second", add, (1, 2)) == 3
            assert first.get_worker_info("second").id == 2
            with pytest.raises(gw.WorkerLostError):
                first.rpc_sync(1, add, (1, 2))


def test_a_successor_can_be_called_before_it_has_said_anything() -> None:
    board = Board()
    with board.join("first", 0) as first:
        with board.join("second", 1):
            first.rpc_sync("second", add, (1, 2))
        with board.join("second", 2):
            assert first.rpc_sync("second", add, (1, 2)) == 3


def test_a_message_from_nowhere_is_dropped_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    board = Board()
    with board.join("first", 0) as first, board.join("second", 1) as second:
        board.cards.clear()
        with pytest.raises(gw.CallTimeout):
            second.rpc_sync("first", add, (1, 2), timeout=0.01)
        assert first.get_worker_infos() == [first.info]
    assert "dropped a request: worker 1 is unknown here" in caplog.text


# Losing a worker


def test_a_lost_worker_fails_all_that_wait_for_it_and_nobody_else(
    world: World,
) -> None:
    doomed = [world[i % 2 * 2].rpc_async("worker1", never, timeout=0) for i in range(6)]
    caught: list[gw.WorkerLostError] = []

    def wait_in_vain() -> None:
        with pytest.raises(gw.WorkerLostError) as info:
            world[0].rpc_sync("worker1", never, timeout=0)
        caught.append(info.value)

    with holding() as hold:
        other = world[0].rpc_async("worker2", held, ("fine",))
        with meanwhile(wait_in_vain, wait_in_vain):
            # All have been sent: who begins to call a worker that is gone hears something else.
            wait_until(lambda: world[1].statistics()["calls_run"] == 8)
            assert in_flight(world[0]) == "6 calls in flight"
            world.kill(1)
        for future in doomed:
            with pytest.raises(gw.WorkerLostError, match="lost worker 'worker1'"):
                future.wait()
        assert not other.done()
        hold.release.set()
        assert other.wait() == "fine"
    assert [(e.worker, e.reason) for e in caught] == [("worker1", "it was killed")] * 2
    assert in_flight(world[0]) == "0 calls in flight"


@pytest.mark.parametrize("to", ["worker1", 1, gw.WorkerInfo("worker1", 1)])
def test_later_calls_to_a_lost_worker_fail_at_once(world: World, to: Any) -> None:
    world.kill(1)
    for call in (world[0].rpc_sync, world[0].rpc_async):
        with pytest.raises(gw.WorkerLostError, match="'worker1': it was killed"):
            call(to, whoami)
    assert world[0].rpc_sync("worker2", whoami) == "worker2"


def test_a_loss_is_logged_once_by_each_who_is_left(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with World(3) as world:
        world.kill(1)
    texts = [r.getMessage() for r in caplog.records]
    assert texts == ["lost worker 'worker1': it was killed"] * 2


def test_calls_of_a_lost_worker_that_still_run_harm_nobody(world: World) -> None:
    with holding() as hold:
        future = world[1].rpc_async("worker0", held)
        assert hold.entered.wait(LIMIT)
        world.kill(1)
        hold.release.set()
        with pytest.raises(gw.ClosedError):
            future.wait()
    assert world[0].rpc_sync("worker2", whoami) == "worker2"


# The end


def test_all_wait_at_the_end_for_a_call_under_way(world: World) -> None:
    def end(worker: gw.Worker) -> None:
        worker.shutdown()
        say(worker.name)

    with holding() as hold:
        future = world[0].rpc_async("worker1", held)
        future.then(lambda _: say("done"))
        assert hold.entered.wait(LIMIT)
        with meanwhile(*[lambda w=worker: end(w) for worker in world]):
            hold.release.set()
        assert future.done()
        assert hold.said[0] == "done"
        assert sorted(hold.said[1:]) == ["worker0", "worker1", "worker2"]


def pass_on(left: int) -> None:
    say(left)
    if left:
        gw.rpc_async((gw.get_worker_info().id + 1) % 3, pass_on, (left - 1,))


@pytest.mark.parametrize("seed", [None, *range(5)])
def test_all_wait_at_the_end_for_calls_started_by_calls(seed: int | None) -> None:
    with holding() as hold:
        with World(3, seed=seed) as world:
            world[0].rpc_async("worker1", pass_on, (30,))
            world[2].rpc_async("worker2", pass_on, (20,))
        assert sorted(hold.said) == sorted([*range(31), *range(21)])


class HeldTimeout(float):
    """Looking at it takes as long as it is held: a call that is slow to get going."""

    def __ge__(self, other: object) -> bool:
        return bool(held(True))


def start_slowly() -> None:
    gw.rpc_async("worker0", start_another, timeout=HeldTimeout(LIMIT))


second_round = threading.Event()
third_round = threading.Event()


def start_another() -> None:
    assert second_round.wait(LIMIT)
    gw.rpc_async("worker1", take_long).then(lambda f: say(f.value()))


def take_long() -> str:
    assert third_round.wait(LIMIT)
    return "ended well"


def test_all_wait_at_the_end_for_a_call_that_is_slow_to_get_going() -> None:
    second_round.clear()
    third_round.clear()
    with World(2) as world, holding() as hold:
        rounds = world[0]._collectives._gatherings._open
        world[0].rpc_async("worker1", start_slowly)
        assert hold.entered.wait(LIMIT)
        with meanwhile(world[1].shutdown):
            wait_until(lambda: "end/0/0" in rounds)  # worker1 takes itself to be quiet
            hold.release.set()
            with meanwhile(world[0].shutdown):
                wait_until(lambda: "end/0/1" in rounds)
                second_round.set()
                wait_until(lambda: "end/0/2" in rounds or world[0].is_closed)
                third_round.set()
    assert hold.said == ["ended well"]


def test_all_wait_at_the_end_for_the_last_to_want_it(world: World) -> None:
    def end(worker: gw.Worker) -> bool:
        if worker.id == 1:
            assert worker.rpc_sync("worker0", whoami) == "worker0"
            assert worker.rpc_sync("worker2", whoami) == "worker2"
        worker.shutdown()
        return worker.is_closed

    assert world.run(end) == [True] * 3


def test_the_end_does_not_wait_for_a_worker_that_is_lost(world: World) -> None:
    with meanwhile(world[0].shutdown, world[1].shutdown):
        world.kill(2)
    assert world[0].is_closed
    assert world[1].is_closed


@pytest.mark.parametrize("early", [1, 2])
def test_the_end_comes_although_the_worker_that_collects_is_lost(early: int) -> None:
    with World(3) as world:
        with meanwhile(world[early].shutdown):
            wait_until(lambda: in_flight(world[early]) == "1 calls in flight")
            world.kill(0)
            world[3 - early].shutdown()
        assert all(worker.is_closed for worker in world)


def test_an_end_others_do_not_come_to_times_out_and_closes(world: World) -> None:
    for worker in [*world][:2]:
        with pytest.raises(gw.CallTimeout):
            worker.shutdown(timeout=0.01)
        assert worker.is_closed
    with pytest.raises(gw.WorkerLostError, match="it has left"):
        world[2].rpc_sync("worker0", whoami)


def test_an_end_does_not_wait_longer_for_calls_than_it_is_told(world: World) -> None:
    waiting = [world[0].rpc_async("worker1", never, timeout=0)]
    with pytest.raises(
        gw.CallTimeout, match=r"shutdown on worker 'worker0'.* in flight"
    ):
        world[0].shutdown(timeout=0.05)
    assert world[0].is_closed
    with pytest.raises(gw.ClosedError):
        waiting[0].wait()


def test_an_end_does_not_wait_longer_for_other_threads_than_it_is_told(
    world: World,
) -> None:
    def wait_in_vain() -> None:
        with pytest.raises(gw.ClosedError):
            world[0].rpc_sync("worker1", never, timeout=0)

    with meanwhile(wait_in_vain):
        wait_until(lambda: in_flight(world[0]) == "1 calls in flight")
        with pytest.raises(gw.CallTimeout, match="in flight"):
            world[0].shutdown(timeout=0.05)


def test_leaving_at_once_fails_the_calls_in_flight(world: World) -> None:
    futures = [world[0].rpc_async(to, never, timeout=0) for to in range(3)]

    def wait_in_vain() -> None:
        with pytest.raises(gw.ClosedError):
            world[0].rpc_sync("worker1", never, timeout=0)

    with meanwhile(wait_in_vain):
        wait_until(lambda: in_flight(world[0]) == "4 calls in flight")
        world[0].shutdown(graceful=False)
    for future in futures:
        with pytest.raises(gw.ClosedError, match="this worker was shut down"):
            future.wait()
    assert world[1].rpc_sync("worker2", whoami) == "worker2"


def test_who_calls_a_worker_that_leaves_is_told(world: World) -> None:
    future = world[0].rpc_async("worker1", never, timeout=0)
    world[1].shutdown(graceful=False)
    with pytest.raises(gw.WorkerLostError, match="'worker1': it has left"):
        future.wait()


def test_an_answer_given_before_leaving_arrives() -> None:
    with World(2, threads=1) as world, holding() as hold:
        busy = world[0].rpc_async("worker0", held)  # its only thread
        assert hold.entered.wait(LIMIT)
        future = world[0].rpc_async("worker1", whoami)
        wait_until(lambda: world._transports[0]._pending)  # the answer lies there
        world[1].shutdown(graceful=False)
        assert future.wait() == "worker1"
        hold.release.set()
        busy.wait()


def test_a_closed_worker_says_so(world: World) -> None:
    worker = world[0]
    worker.shutdown(graceful=False)
    for use in (
        lambda: worker.rpc_sync("worker1", whoami),
        lambda: worker.rpc_async("worker1", whoami),
        lambda: worker.rpc_sync("worker0", whoami),
        lambda: worker.get_worker_info("worker1"),
        worker.barrier,
        lambda: worker.all_gather(1),
    ):
        with pytest.raises(gw.ClosedError, match="worker 'worker0' is shut down"):
            use()
    assert repr(worker) == "<Worker 'worker0', id 0: closed>"


def test_closing_is_idempotent(world: World) -> None:
    for graceful in (False, True, False):
        world[0].shutdown(graceful)
        world[0].close()
    world.shutdown()
    world.shutdown()


def test_the_current_worker_can_be_shut_down(world: World) -> None:
    with world.as_worker(0):
        gw.shutdown(graceful=False)
        with pytest.raises(gw.ClosedError, match="worker 'worker0' is shut down"):
            gw.rpc_sync("worker1", whoami)


def test_a_worker_in_a_with_block_leaves_at_once_on_an_error(world: World) -> None:
    with pytest.raises(KeyError), world[0] as worker:
        {}["missing"]
    assert worker.is_closed


def shut_down_here() -> None:
    gw.shutdown(graceful=False)


def test_a_function_can_shut_down_the_worker_it_runs_on(world: World) -> None:
    with pytest.raises(gw.WorkerLostError, match="'worker1': it has left"):
        world[0].rpc_sync("worker1", shut_down_here)
    assert world[1].is_closed


@orders
def test_a_world_can_be_made_again_and_again(seed: int | None) -> None:
    for _ in range(10):
        with World(4, seed=seed) as world:
            assert world.run(lambda w: w.rpc_sync((w.id + 1) % 4, whoami)) == [
                "worker1",
                "worker2",
                "worker3",
                "worker0",
            ]
