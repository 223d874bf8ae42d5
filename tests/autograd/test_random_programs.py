"""Random programs over several workers give the gradients that local autograd gives.

The world has fixed size and is used for many programs, so what one leaves behind meets the next.
"""

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from gradwire._transport.faulty import Faults
from gradwire._wire.signature_encoder import Encoder
from gradwire.api import enter
from gradwire.errors import GradwireError
from gradwire.testing import World
from gradwire.worker import Worker
from tests.autograd import call_programs
from tests.autograd.functions import Raises
from tests.autograd.programs import check, check_twice, draw, make_leaves, recorded
from tests.conftest import FUZZ, cases
from tests.processes import Processes
from tests.worlds import Autograds, autograds, together, wait_until

WORKERS = 5
ROUNDS = 5
FAULTS = Faults(delay=0.2, repeat=0.2, longest_delay=0.003)
# Programs of calls are run in slices that have their own worlds.
SLICES = range(max(1, round(FUZZ)))
IN_ONE_PROCESS = min(100, cases(100))  # per slice
OVER_PROCESSES = 5


@pytest.fixture(autouse=True)
def _switch_off() -> Iterator[None]:
    Raises.is_on = False
    yield
    Raises.is_on = True


@pytest.mark.fuzz
def test_programs_that_hypothesis_draws() -> None:
    with autograds(WORKERS) as world:

        @settings(max_examples=cases(150))
        @given(st.data())
        def program(data: st.DataObject) -> None:
            def choose(limit: int) -> int:
                return data.draw(st.integers(0, limit - 1))

            check(draw(choose, most_workers=WORKERS), world)

        program()
        assert world.passes() == 0
        assert world.contexts() == 0


WAYS = ["in order", "overtaking", "delayed and repeated", "by pickle"]


@pytest.fixture(params=WAYS)
def world(
    request: pytest.FixtureRequest, fuzz_seed: int, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Autograds]:
    options = {
        "in order": {},
        "overtaking": {"seed": fuzz_seed},
        "delayed and repeated": {"seed": fuzz_seed, "faults": FAULTS},
        "by pickle": {},
    }[request.param]
    if request.param == "by pickle":  # as those on devices go
        monkeypatch.setattr(Encoder, "encode_tensors", lambda *_: None)
    with autograds(WORKERS, **options) as world:
        yield world


def test_longer_programs(world: Autograds, fuzz_seed: int) -> None:
    chance = random.Random(fuzz_seed)
    for _ in range(ROUNDS):
        program = draw(chance.randrange, most_workers=WORKERS, most_steps=80)
        check(program, world, passes=1 + chance.randrange(3))
    assert world.passes() == 0


def test_nothing_is_run_that_nothing_flows_back_to(
    world: Autograds, fuzz_seed: int
) -> None:
    chance = random.Random(fuzz_seed)
    for _ in range(ROUNDS):
        program = draw(chance.randrange, most_workers=3, most_steps=60, is_watched=True)
        check(program, world, passes=1 + chance.randrange(2))
    assert world.passes() == 0


def test_second_derivatives(world: Autograds, fuzz_seed: int) -> None:
    chance = random.Random(fuzz_seed)
    for _ in range(ROUNDS):
        check_twice(draw(chance.randrange, most_workers=WORKERS), world)
    assert world.passes() == 0


def test_programs_of_several_threads(world: Autograds, fuzz_seed: int) -> None:
    def work(number: int) -> None:
        chance = random.Random(fuzz_seed * 10 + number)
        for _ in range(5):
            check(draw(chance.randrange, most_workers=WORKERS), world, passes=2)

    together(*(partial(work, number) for number in range(4)))
    assert world.passes() == 0


def test_programs_that_fail_leave_nothing_waiting(
    world: Autograds, fuzz_seed: int
) -> None:
    chance = random.Random(fuzz_seed)
    texts: list[str] = []
    for _ in range(ROUNDS):
        program = draw(chance.randrange, most_workers=WORKERS, most_steps=60)
        with recorded(program, make_leaves(program), world) as (context, roots):
            Raises.is_on = True
            try:
                world[program.root_worker].backward(context, roots)
            except GradwireError as error:
                texts.append(str(error))
            finally:
                Raises.is_on = False
        wait_until(lambda: world.passes() == 0)
        check(program, world)
    assert all("this backward fails" in text for text in texts)


# Programs of calls


@pytest.mark.fuzz
@pytest.mark.parametrize("part", SLICES)
def test_programs_of_calls(part: int) -> None:
    with World(WORKERS, seed=part or None) as world, world.as_worker(0):

        @seed(part)
        @settings(max_examples=IN_ONE_PROCESS, database=None)
        @given(st.data())
        def program(data: st.DataObject) -> None:
            def choose(limit: int) -> int:
                return data.draw(st.integers(0, limit - 1))

            call_programs.check(call_programs.draw(choose, most_workers=WORKERS))

        program()
        nothing_is_left(world.workers)


def nothing_is_left(workers: list[Worker]) -> None:
    infos = [worker.autograd.debug_info for worker in workers]
    wait_until(lambda: not any(count for info in infos for count in info().values()))


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    started = Processes(tmp_path)
    yield started
    started.close()


@pytest.mark.fuzz
@pytest.mark.slow
@pytest.mark.parametrize("part", SLICES)
def test_programs_of_calls_over_processes_with_faults(
    processes: Processes, part: int
) -> None:
    for rank in range(1, WORKERS):
        number = part * WORKERS + rank
        processes.serve(rank, WORKERS, seed=number, faults=FAULTS)
    with processes.world(WORKERS, seed=part * WORKERS, faults=FAULTS) as worker:
        before = enter(worker)
        try:
            for number in range(OVER_PROCESSES):
                chance = random.Random(part * OVER_PROCESSES + number)
                program = call_programs.draw(chance.randrange, most_workers=WORKERS)
                call_programs.check(program)
            nothing_is_left([worker])
        finally:
            enter(before)
