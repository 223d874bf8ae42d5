"""The state of a pass, pure: by hand, and in simulated worlds (`tests/simulate/passes.py`)."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from gradwire._autograd.pass_state import (
    ROOTS,
    Narrow,
    PassState,
    Reach,
    Run,
    Step,
    Void,
    Wake,
)
from tests.simulate.passes import simulate


class Segments:
    """A plan by hand."""

    def __init__(self, *segments: Sequence[int]) -> None:
        self._segments = segments

    def sources(self, source: int) -> Sequence[int]:
        return next((each for each in self._segments if source in each), ())


def state_of(*segments: Sequence[int]) -> PassState:
    return PassState(Segments(*segments))


def run(*sources: int, waits: bool = False) -> Run:
    return Run({n: () if n == ROOTS else (0,) for n in sources}, waits)


# The first step


def test_roots_by_themselves_are_run() -> None:
    assert state_of([ROOTS]).came(ROOTS, ()) == [run(ROOTS)]


def test_a_segment_of_one_message_is_run_when_its_gradients_come() -> None:
    state = state_of([1], [2])
    assert state.came(2, (0,)) == [run(2)]
    assert state.came(1, (0,)) == [run(1)]
    assert not state.parked


def test_a_segment_is_run_with_the_slots_that_have_gradients() -> None:
    assert state_of([1]).came(1, (0, 2)) == [Run({1: (0, 2)})]


def test_a_segment_of_several_is_run_when_all_have_come() -> None:
    state = state_of([ROOTS, 1, 2])
    assert state.came(ROOTS, ()) == []
    assert state.came(2, (0,)) == []
    assert state.parked == {ROOTS: (), 2: (0,)}
    assert state.came(1, (0,)) == [run(ROOTS, 1, 2)]
    assert not state.parked


def test_a_message_without_any_gradient_is_not_run() -> None:
    state = state_of([1, 2])
    assert state.came(1, ()) == []
    assert not state.parked
    assert state.came(2, (0,)) == [run(2)]


def test_what_comes_twice_changes_nothing() -> None:
    state = state_of([1], [2, 3])
    assert state.came(1, (0,)) == [run(1)]
    assert state.came(1, (0,)) == []
    assert state.came(2, (0,)) == []
    assert state.came(2, ()) == []
    assert state.parked == {2: (0,)}


def test_what_left_after_the_pass_began_is_no_part_of_it() -> None:
    state = state_of([1])
    assert state.came(7, (0,)) == []
    assert state.announce([(7, 0)]) == []
    assert state.fate(7) is None


# What will get gradients


def test_what_is_parked_announces_what_it_reaches_once() -> None:
    state = state_of([1, 2], [3])
    state.came(1, (0,))
    assert state.announce() == [Reach({1: (0,)})]
    assert state.announce() == []
    assert state.step is Step.ANNOUNCE


def test_what_is_announced_announces_in_turn_slot_by_slot() -> None:
    state = state_of([1, 2], [3])
    assert state.announce([(1, 0), (3, 0)]) == [Reach({1: (0,)}), Reach({3: (0,)})]
    assert state.announce([(1, 0), (1, 1)]) == [Reach({1: (1,)})]


def test_what_has_run_announces_nothing() -> None:
    state = state_of([1])
    state.came(1, (0,))
    assert state.announce([(1, 0)]) == []


# The last step


def announced(*slots: tuple[int, int]) -> PassState:
    """Roots and messages in one segment; these slots will get gradients."""
    state = state_of([ROOTS, 1, 2])
    state.came(ROOTS, ())
    state.announce(slots)
    return state


def test_roots_begin_at_once_and_wait_for_what_was_announced() -> None:
    state = announced((2, 0))
    assert state.rest() == [run(ROOTS, 2, waits=True)]
    assert state.rest() == []
    assert state.fate(2) is None
    assert state.came(2, (0,)) == [Wake(2)]
    assert state.fate(2) == (0,)


def test_what_was_not_announced_is_void() -> None:
    assert announced().rest() == [run(ROOTS)]


def test_a_segment_without_roots_begins_with_the_newest_of_its_messages() -> None:
    state = state_of([1, 2, 3])
    state.came(1, (0,))
    state.announce([(2, 0)])
    assert state.rest() == []
    assert state.came(2, (0,)) == [run(1, 2)]


def test_a_segment_may_begin_before_all_its_gradients_are_there() -> None:
    state = state_of([1, 2])
    state.came(2, (0,))
    state.announce([(1, 0)])
    assert state.rest() == [run(1, 2, waits=True)]
    assert state.came(1, (0,)) == [Wake(1)]


def test_the_newest_may_turn_out_to_be_void() -> None:
    state = state_of([1, 2])
    state.came(1, (0,))
    state.announce([(2, 0)])
    state.rest()
    assert state.came(2, ()) == [run(1)]


def test_what_another_source_has_announced_is_not_announced_again() -> None:
    state = state_of([1, 2])
    assert state.reached([1], [(5, 0), (6, 0)]) == [(5, 0), (6, 0)]
    assert state.reached([2], [(5, 0), (5, 1)]) == [(5, 1)]


# What was announced and will not come


def test_a_recv_without_a_gradient_is_told_to_be_void_if_it_was_announced() -> None:
    state = announced((2, 0))
    state.reached([ROOTS], [(5, 0), (6, 0)])
    state.rest()
    assert state.empty(5) == [Void([5])]
    assert state.empty(5) == []
    assert state.empty(9) == []


def test_what_a_segment_cannot_reach_any_more_is_told_at_once() -> None:
    state = state_of([1, 2])
    state.came(1, (0,))
    state.announce([(2, 0), (2, 1)])
    state.reached([1], [(5, 0)])
    state.reached([2], [(6, 0), (7, 0)])
    state.rest()
    narrow, begun = state.came(2, (1,))
    assert narrow == Narrow({1: (0,), 2: (1,)})
    assert begun == Run({1: (0,), 2: (1,)})
    assert state.narrowed(narrow.sources, [5, 7]) == [Void([6])]
    assert state.narrowed(narrow.sources, [5, 7]) == []


def test_a_segment_that_still_waits_says_what_it_cannot_reach_any_more() -> None:
    state = state_of([1, 2, 3])
    state.announce([(2, 0), (3, 0)])
    state.reached([2], [(5, 0)])
    state.reached([3], [(6, 0)])
    state.rest()
    (narrow,) = state.came(3, ())
    assert narrow == Narrow({2: (0,)})
    assert state.narrowed(narrow.sources, [5]) == [Void([6])]


def test_of_a_segment_that_gets_nothing_all_is_void() -> None:
    state = state_of([1, 2])
    state.announce([(1, 0), (2, 0)])
    state.reached([1], [(5, 0)])
    state.reached([2], [(5, 0), (6, 0)])
    state.rest()
    state.came(2, ())
    assert state.came(1, ()) == [Void([5, 6])]


# Simulated


@given(st.integers(0, 2**32))
def test_simulated_passes_end_and_give_gradients_where_they_flow(seed: int) -> None:
    simulate(seed)
