"""Progress of a pass, pure: by hand, and in simulated worlds (`tests/simulate/passes.py`)."""

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from gradwire._autograd.actions import (
    Abort,
    Answer,
    Arrived,
    Finish,
    Narrow,
    Piece,
    Plan,
    Reach,
    Run,
    Slot,
    Tell,
    Wake,
    Words,
)
from gradwire._autograd.pass_state import Progress
from tests.simulate.passes import simulate

DONE = Answer(is_done=True)


def at(*messages: int) -> tuple[Slot, ...]:
    """The slots of messages of one tensor each."""
    return tuple((message, 0) for message in messages)


def came(*messages: int) -> list[Arrived]:
    """All gradients of these."""
    return [(message, (0,)) for message in messages]


def piece(
    sends: tuple[int, ...] = (), recvs: tuple[int, ...] = (), has_roots: bool = False
) -> Piece:
    return Piece(at(*sends), at(*recvs), has_roots)


ROOTS = piece(has_roots=True)


def plan_of(pieces: list[Piece], sends: dict[int, int], recvs: dict[int, int]) -> Plan:
    by_slot = [{(m, 0): w for m, w in known.items()} for known in (sends, recvs)]
    return Plan(pieces, *by_slot)


def run_of(index: int, sends: tuple[int, ...], may_wait: bool) -> Run:
    return Run(index, at(*sends), may_wait)


def narrow(index: int, sends: tuple[int, ...]) -> Narrow:
    return Narrow(index, at(*sends))


def reach(index: int, sends: tuple[int, ...]) -> Reach:
    return Reach(index, at(*sends))


def words(
    voids: Iterable[int] = (), listed: tuple[int, ...] | None = None, awaiting: int = 0
) -> Words:
    return Words(at(*voids), listed, awaiting)


def said(
    voids: tuple[int, ...],
    listed: tuple[int, ...] | None,
    awaiting: int,
    confirmed: tuple[int, ...] = (),
    asks: bool = False,
) -> Words:
    return Words(at(*voids), listed, awaiting, at(*confirmed), asks)


def asking() -> Progress:
    """A pass whose roots have run, and that waits for the answer of worker 1."""
    pieces = [piece(recvs=(3,), has_roots=True), piece(sends=(1,)), piece(sends=(2,))]
    progress = Progress(0, plan_of(pieces, {1: 1, 2: 1}, {3: 1}))
    (run,) = progress.begun()
    assert isinstance(run, Run)
    progress.left(3)
    progress.speak(1)
    assert progress.ran(run) == []
    return progress


# By hand


def test_a_pass_without_messages_runs_its_roots_and_is_over() -> None:
    progress = Progress(0, plan_of([ROOTS], {}, {}))
    (run,) = progress.begun()
    assert run == run_of(0, (), may_wait=False)
    assert progress.ran(run) == [Finish()]
    assert progress.is_over


def test_gradients_for_the_engager_go_with_the_answer() -> None:
    plan = plan_of([piece(sends=(1,), recvs=(2,))], {1: 0}, {2: 0})
    progress = Progress(1, plan, engager=0)
    progress.heard(0, words(listed=(1,), awaiting=1), came(1))
    (run,) = progress.begun()
    assert run == run_of(0, (1,), may_wait=False)
    progress.left(2)
    assert progress.ran(run) == [Finish()]


def test_a_void_send_skips_its_piece_and_voids_what_is_behind() -> None:
    plan = plan_of([piece(sends=(1,), recvs=(2,))], {1: 0}, {2: 0})
    progress = Progress(1, plan, engager=0)
    progress.heard(0, words(voids=[1], listed=(1,), awaiting=1), came())
    assert progress.begun() == [Finish()]


def test_a_send_that_never_arrived_is_void() -> None:
    plan = plan_of([piece(sends=(1,))], {1: 0}, {})
    progress = Progress(1, plan, engager=0)
    progress.heard(0, words(listed=(), awaiting=0), came())
    assert progress.begun() == [Finish()]


def test_one_that_waits_for_what_never_arrived_is_told_so() -> None:
    progress = Progress(1, plan_of([], {}, {}), engager=0)
    progress.heard(0, words(listed=(), awaiting=1), came())
    assert progress.begun() == [Finish()]  # and that tells it


def test_one_that_waits_for_what_never_arrived_is_told_at_once() -> None:
    progress = Progress(1, plan_of([piece(sends=(1,))], {1: 2}, {}), engager=0)
    progress.heard(0, words(listed=(), awaiting=1), came())
    assert progress.begun() == [Tell(2, said((), (), 1))]
    assert progress.answer(0) == said((), (), 0)


def test_a_worker_with_our_sends_is_told_that_the_pass_goes_on() -> None:
    plan = plan_of([ROOTS, piece(sends=(1,))], {1: 1}, {})
    progress = Progress(0, plan)
    (run,) = progress.begun()
    assert isinstance(run, Run)
    assert progress.ran(run) == [Tell(1, said((), (), 1))]
    assert progress.answered(1, DONE) == [Finish()]


def rooted() -> Progress:
    """A pass whose roots have to be run with a send to worker 1, and reach what came from there."""
    plan = plan_of([piece(sends=(1,), recvs=(2,), has_roots=True)], {1: 1}, {2: 1})
    return Progress(0, plan)


def test_what_could_be_run_but_for_a_send_has_to_ask_first() -> None:
    progress = rooted()
    assert progress.begun() == [reach(0, ())]
    assert progress.reached(at(2)) == [Tell(1, said((), (2,), 1, (2,), asks=True))]
    confirmed = words()._replace(confirmed=at(1))
    (run,) = progress.answered(1, Answer((), confirmed, is_engaged=True))
    assert run == run_of(0, (1,), may_wait=True)


def test_who_is_asked_tells_when_it_is_sure() -> None:
    pieces = [piece(sends=(2,), recvs=(1,)), piece(sends=(3,))]
    progress = Progress(1, plan_of(pieces, {2: 0, 3: 0}, {1: 0}), engager=0)
    progress.heard(0, words(listed=(2, 3), awaiting=1)._replace(asks=True), came())
    assert progress.begun() == []  # the answer is about to leave
    assert progress.answer(0) == said((), (1,), 2, asks=True)
    progress.heard(0, words(voids=[3])._replace(confirmed=at(2)), came())
    assert progress.settled() == [reach(0, (2,))]
    assert progress.reached(at(1)) == []
    assert progress.answer(0) == said((), None, 2, confirmed=(1,))


def test_nobody_is_done_who_still_looks_what_there_is_to_tell() -> None:
    pieces = [piece(sends=(1, 2), recvs=(3, 4))]
    progress = Progress(1, plan_of(pieces, {1: 0, 2: 0}, {3: 0, 4: 2}), engager=0)
    curious = words(listed=(1, 2), awaiting=1)._replace(confirmed=at(1), asks=True)
    progress.heard(0, curious, came())
    assert progress.begun() == [reach(0, (1,))]  # takes its time
    progress.answer(0)
    progress.heard(2, words(listed=(), awaiting=1)._replace(asks=True), came())
    assert progress.settled() == [reach(0, (1,))]  # as does this
    progress.answer(2)
    progress.heard(0, words(voids=[2]), came(1))
    (run,) = progress.settled()
    assert run == run_of(0, (1,), may_wait=False)
    progress.narrowed(0, at(1), at(3))
    progress.left(3)
    assert progress.ran(run) == []
    assert progress.reached(at(3)) == []
    assert progress.reached(at(3)) == [Tell(2, said((4,), (4,), 0))]


def test_what_nothing_reaches_is_void_and_the_rest_is_run_without_it() -> None:
    progress = rooted()
    progress.begun()
    progress.reached(at(2))
    void = words(voids=[1])
    (run,) = progress.answered(1, Answer((), void, is_engaged=True))
    assert run == run_of(0, (), may_wait=False)


def test_gradients_and_voids_may_come_with_an_answer() -> None:
    progress = asking()
    answer = Answer(came(1), words(voids=[2]), is_engaged=True)
    (run,) = progress.answered(1, answer)
    assert run == run_of(1, (1,), may_wait=False)
    assert progress.fate(2) is False
    assert progress.ran(run) == []  # worker 1 has not ended
    assert progress.ended(1, ()) == [Finish()]


def test_the_answer_says_what_there_is_to_tell() -> None:
    plan = plan_of(
        [piece(sends=(1,), recvs=(3,)), piece(sends=(2,))], {1: 0, 2: 5}, {3: 0}
    )
    progress = Progress(1, plan, engager=0)
    progress.heard(0, words(voids=[1], listed=(1,), awaiting=1), came())
    assert progress.begun() == [Tell(5, said((), (), 1))]
    assert progress.answer(0) == said((3,), (3,), 1)


def test_what_comes_late_from_one_who_has_ended_still_counts() -> None:
    progress = asking()
    assert progress.ended(1, ()) == []  # overtook the answer with the gradients
    assert progress.fate(1) is None
    (run,) = progress.answered(1, Answer(came(1), is_engaged=True))
    assert progress.fate(2) is False
    assert isinstance(run, Run)
    assert progress.ran(run) == [Finish()]


def test_voids_wait_for_the_message_that_is_about_to_leave() -> None:
    plan = plan_of([piece(recvs=(1,), has_roots=True)], {}, {1: 1, 2: 1})
    progress = Progress(0, plan)
    (run,) = progress.begun()
    assert isinstance(run, Run)
    progress.left(1)
    assert progress.speak(1) == said((2,), (1, 2), 0)
    assert progress.ran(run) == []
    assert progress.answered(1, DONE) == [Finish()]


def test_a_piece_starts_with_the_newest_of_its_sends() -> None:
    plan = plan_of([piece(sends=(1, 2), recvs=(3,))], {1: 0, 2: 0}, {3: 0})
    progress = Progress(1, plan, engager=0)
    progress.heard(0, words(listed=(1, 2), awaiting=1), came(1))
    assert progress.begun() == []
    progress.heard(0, words(awaiting=1), came(2))
    (run,) = progress.settled()
    assert run == run_of(0, (1, 2), may_wait=False)


def test_a_piece_may_start_before_all_its_gradients_are_there() -> None:
    plan = plan_of([piece(sends=(1, 2), recvs=(3,))], {1: 0, 2: 0}, {3: 0})
    progress = Progress(1, plan, engager=0)
    confirmed = words(listed=(1, 2), awaiting=1)._replace(confirmed=at(1))
    progress.heard(0, confirmed, came(2))
    assert progress.begun() == [run_of(0, (1, 2), may_wait=True)]
    progress.heard(0, words(awaiting=1), came(1))
    assert progress.settled() == [Wake(1)]


def test_void_sends_are_left_out_and_narrow_the_piece() -> None:
    plan = plan_of([piece(sends=(1, 2), recvs=(3,))], {1: 0, 2: 0}, {3: 5})
    progress = Progress(1, plan, engager=0)
    progress.heard(0, words(voids=[2], listed=(1, 2)), came())
    assert progress.begun() == [narrow(0, (1,))]
    assert progress.narrowed(0, at(1), at()) == [Tell(5, said((3,), (3,), 0))]
    assert progress.answer(0) is None
    progress.heard(0, words(), came(1))
    assert progress.settled() == [run_of(0, (1,), may_wait=False)]


def test_what_is_said_again_changes_nothing() -> None:
    plan = plan_of([piece(sends=(1,))], {1: 0}, {})
    progress = Progress(1, plan, engager=0)
    progress.heard(0, words(listed=(1,)), came(1))
    (run,) = progress.begun()
    assert isinstance(run, Run)
    progress.heard(0, words(voids=[1], listed=(1,)), came(1))
    assert progress.settled() == []
    assert progress.fate(1) is True
    assert progress.ran(run) == [Finish()]


def test_a_failure_wakes_all_who_wait_and_calls_back_those_who_owe() -> None:
    plan = plan_of([piece(sends=(1,), has_roots=True)], {1: 1}, {})
    progress = Progress(0, plan)
    assert len(progress.begun()) == 1
    assert progress.failed() == [Wake(1), Abort(1)]
    assert progress.failed() == []
    assert progress.answered(1, DONE) == []


def test_a_worker_is_needed_as_long_as_something_is_to_come_from_it() -> None:
    plan = plan_of([ROOTS, piece(sends=(1,))], {1: 1}, {})
    progress = Progress(0, plan)
    (run,) = progress.begun()
    assert progress.is_expecting(1)
    assert not progress.is_expecting(2)
    assert isinstance(run, Run)
    progress.ran(run)
    progress.answered(1, DONE)
    assert not progress.is_expecting(1)


# Simulated


@given(st.integers(0, 2**32))
def test_simulated_passes_end_and_give_gradients_where_they_flow(seed: int) -> None:
    simulate(seed)


def test_one_tensor_of_a_message_is_void_and_another_is_not() -> None:
    """Both can wait: who subscribed is told of each."""
    plan = Plan(
        [Piece(sends=((1, 0),), recvs=((2, 0),), has_roots=True)],
        {(1, 0): 1},
        {(2, 0): 1, (2, 1): 1},
    )
    progress = Progress(0, plan)
    assert progress.begun() == [Reach(0, ())]
    ((tell),) = progress.reached([(2, 0)])
    assert isinstance(tell, Tell)
    assert (tell.words.voids, tell.words.confirmed) == (((2, 1),), ((2, 0),))
    assert tell.words.listed == (2,)


def test_a_void_slot_has_no_message_of_its_own_if_another_will_get_a_gradient() -> None:
    plan = Plan([Piece(recvs=((2, 0),), has_roots=True)], {}, {(2, 0): 1, (2, 1): 1})
    progress = Progress(0, plan)
    (run,) = progress.begun()
    assert isinstance(run, Run)
    progress.left(2)
    assert progress.speak(1) == Words((), (2,), 0)
    assert progress.ran(run) == []


def test_a_piece_is_run_without_its_void_slots() -> None:
    plan = Plan([Piece(sends=((1, 0), (1, 1)))], {(1, 0): 0, (1, 1): 0}, {})
    progress = Progress(1, plan, engager=0)
    progress.heard(0, words(listed=(1,)), [(1, (1,))])
    assert progress.begun() == [Run(0, ((1, 1),), may_wait=False)]
