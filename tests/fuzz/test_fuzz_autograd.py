"""Random programs over several workers give the gradients that local autograd gives.

The world has fixed size and is used for many programs, so what one leaves behind meets the next.
"""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autograd_programs import check, draw
from autograd_world import autograds
from conftest import FUZZ
from gradwire.transport.faulty import Faults

WORKERS = 5


def test_programs_that_hypothesis_draws() -> None:
    with autograds(WORKERS) as world:

        @settings(max_examples=150 * FUZZ)
        @given(st.data())
        def program(data: st.DataObject) -> None:
            def choose(limit: int) -> int:
                return data.draw(st.integers(0, limit - 1))

            check(draw(choose, most_workers=WORKERS), world)

        program()
        assert world.passes() == 0
        assert world.contexts() == 0


@pytest.mark.parametrize("kind", ["in order", "overtaking", "delayed and repeated"])
def test_longer_programs_with_messages(kind: str, fuzz_seed: int) -> None:
    faults = Faults(delay=0.2, repeat=0.2, longest_delay=0.003)
    options = {
        "in order": {},
        "overtaking": {"seed": fuzz_seed},
        "delayed and repeated": {"seed": fuzz_seed, "faults": faults},
    }[kind]
    chance = random.Random(fuzz_seed)
    with autograds(WORKERS, **options) as world:
        for _ in range(10):
            program = draw(chance.randrange, most_workers=WORKERS, most_steps=80)
            check(program, world, passes=1 + chance.randrange(3))
        assert world.passes() == 0
