"""Stories of references in simulated worlds, one by one.

`tests/simulate/ledger.py` has worlds in which a seed decides what happens.
"""

from __future__ import annotations

from gradwire._rref.messages import Adopt, Recall
from tests.simulate.packets import Answer, Ask, Gone, Reply, Request
from tests.simulate.references import Handle, World


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
    for place, (_, _, body) in enumerate(world.network):
        if type(body.message if isinstance(body, Ask) else body) is kind:
            world.deliver(place)
            world.check()
            return
    raise AssertionError(f"no {kind.__name__} in {world.network}")


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
    assert [type(body.message) for *_, body in world.network] == [Adopt]  # no note yet
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
    del world.network[0]  # the call that makes it
    deliver_one(world, Request)
    world.kill(1)
    deliver_one(world, Gone)
    deliver_one(world, Adopt)
    world.wind_up()
