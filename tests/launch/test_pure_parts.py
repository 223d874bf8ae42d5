"""The pure parts of `gradwire launch`: what is started, how it ends, what is shown."""

import signal
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.launch.plan import Plan, recruits
from gradwire.launch.run_state import RunState
from gradwire.launch.stderr_tail import StderrTail, cut_dump, place_in_dump

TERM, KILL, INT, ABRT = (
    signal.SIGTERM,
    signal.SIGKILL,
    signal.SIGINT,
    signal.SIGABRT,
)


def started(plan: Plan, **inherited: str) -> list[dict[str, str]]:
    found = recruits(plan, ("node0", 29500), inherited, cores=8)
    return [recruit.environment for recruit in found]


# What is started


def test_ranks_go_on_over_the_nodes() -> None:
    plan = Plan(program=("train.py",), size=2, nodes=3, node=1)
    places = [
        (e["GRADWIRE_NAME"], e["RANK"], e["LOCAL_RANK"], e["WORLD_SIZE"])
        for e in started(plan)
    ]
    assert places == [("worker2", "2", "0", "6"), ("worker3", "3", "1", "6")]


def test_all_are_told_where_the_store_is() -> None:
    (environment,) = started(Plan(program=("train.py",)))
    assert environment["MASTER_ADDR"] == "node0"
    assert environment["MASTER_PORT"] == "29500"
    assert environment["TORCHELASTIC_USE_AGENT_STORE"] == "True"


def test_cores_are_shared_unless_the_user_says_otherwise() -> None:
    plan = Plan(program=("train.py",), size=3)
    assert {e["OMP_NUM_THREADS"] for e in started(plan)} == {"2"}
    inherited = started(plan, OMP_NUM_THREADS="5", HOME="/home/me")
    assert {(e["OMP_NUM_THREADS"], e["HOME"]) for e in inherited} == {("5", "/home/me")}
    own = Plan(program=("train.py",), size=3, settings={"GRADWIRE_TORCH_THREADS": "0"})
    assert not any("OMP_NUM_THREADS" in e for e in started(own))
    assert not any("OMP_NUM_THREADS" in e for e in started(plan, MKL_NUM_THREADS="5"))


def test_the_users_variables_win() -> None:
    plan = Plan(program=("train.py",), settings={"GRADWIRE_NAME": "ps", "A": "b=c"})
    (environment,) = started(plan, A="other")
    assert (environment["GRADWIRE_NAME"], environment["A"]) == ("ps", "b=c")


@pytest.mark.parametrize(
    ("is_module", "command"),
    [(False, ["train", "--lr", "1"]), (True, ["-m", "train", "--lr", "1"])],
)
def test_scripts_and_modules_get_their_arguments(
    is_module: bool, command: list[str]
) -> None:
    plan = Plan(program=("train", "--lr", "1"), is_module=is_module)
    (recruit,) = recruits(plan, ("node0", 1), {}, cores=1)
    assert recruit.command == [sys.executable, *command]


def test_with_restarts_the_world_is_elastic() -> None:
    def least(**options: int) -> set[str | None]:
        plan = Plan(program=("train.py",), size=3, **options)  # type: ignore[arg-type]
        return {e.get("GRADWIRE_MIN_WORKERS") for e in started(plan)}

    assert least() == {None}
    assert least(restarts=2) == {"3"}
    assert least(restarts=2, needed=2) == {"2"}
    assert least(needed=1) == {"1"}


def test_a_worker_that_is_started_again_knows() -> None:
    plan = Plan(program=("train.py",), size=2, restarts=2)
    first, _ = recruits(plan, ("node0", 1), {}, cores=1)
    again = first.again(2)
    assert (again.name, again.command) == (first.name, first.command)
    changed = dict(again.environment.items() - first.environment.items())
    assert changed == {"TORCHELASTIC_RESTART_COUNT": "2"}


# How it ends


def test_a_run_without_failures_ends_by_itself() -> None:
    state = RunState({0, 1})
    assert state.ended(0, 0, 1.0, is_echo=False) is None
    assert (state.is_over, state.deadline) == (False, None)
    assert state.ended(1, 0, 2.0, is_echo=False) is None
    assert (state.is_over, state.status, state.culprit) == (True, 0, None)


def test_a_failure_ends_the_others_and_is_the_one_that_counts() -> None:
    state = RunState({0, 1, 2})
    assert state.ended(1, 7, 1.0, is_echo=False) is TERM
    assert state.ended(0, 143, 1.1, is_echo=False) is None
    assert (state.culprit, state.status, state.running) == (1, 7, {2})


def test_who_does_not_end_when_asked_is_killed() -> None:
    state = RunState({0, 1})
    state.ended(1, 7, 1.0, is_echo=False)
    assert state.deadline == 6.0
    assert state.elapsed(6.0) is KILL
    assert state.elapsed(11.0) is None
    assert state.deadline is None


def test_the_worker_that_others_lost_is_the_one_to_blame() -> None:
    state = RunState({0, 1, 2})
    assert state.ended(0, 1, 1.0, is_echo=True) is None
    assert state.ended(2, 1, 1.1, is_echo=True) is None
    assert state.ended(1, 3, 1.2, is_echo=False) is TERM
    assert (state.culprit, state.status) == (1, 3)


def test_an_echo_of_nothing_is_a_failure_after_a_while() -> None:
    state = RunState({0, 1})
    state.ended(0, 1, 1.0, is_echo=True)
    assert state.deadline is not None
    assert state.elapsed(state.deadline) is TERM
    assert (state.culprit, state.status) == (0, 1)


def test_echoes_alone_are_a_failure() -> None:
    state = RunState({0, 1})
    state.ended(1, 1, 1.0, is_echo=True)
    state.ended(0, 1, 1.1, is_echo=True)
    assert (state.is_over, state.culprit, state.status) == (True, 1, 1)


def test_a_second_interrupt_kills() -> None:
    state = RunState({0, 1})
    assert state.interrupted(INT, 1.0) is INT
    assert state.interrupted(INT, 1.5) is KILL
    assert state.status == 130


def test_an_interrupt_is_repeated_in_stronger_words() -> None:
    state = RunState({0})
    sent = [state.interrupted(INT, 0.0), state.elapsed(5.0), state.elapsed(10.0)]
    assert sent == [INT, ABRT, KILL]


def test_being_told_to_end_is_passed_on() -> None:
    state = RunState({0})
    assert state.interrupted(TERM, 0.0) is TERM
    assert state.status == 143


def test_a_run_that_takes_too_long_is_asked_where_it_is() -> None:
    state = RunState({0, 1})
    assert state.timed_out(1.0) is ABRT
    assert state.ended(0, 134, 1.1, is_echo=False) is None
    assert (state.status, state.culprit) == (124, None)


def test_a_failure_elsewhere_ends_this_node_with_its_status() -> None:
    state = RunState({0, 1})
    assert state.failed_elsewhere(9, 1.0) is TERM
    assert state.timed_out(2.0) is None
    assert (state.status, state.culprit) == (9, None)


def test_a_worker_that_fails_is_started_again_so_often() -> None:
    state = RunState({0, 1}, most_restarts=2)
    assert [state.restarts_now(0, 9) for _ in range(3)] == [True, True, False]
    assert state.restarts_now(1, 137)
    assert state.ended(0, 9, 1.0, is_echo=False) is TERM
    assert not state.restarts_now(1, 143)  # it was told to end
    assert (state.culprit, state.status) == (0, 9)


def test_a_worker_that_succeeds_is_done() -> None:
    state = RunState({0}, most_restarts=2)
    assert not state.restarts_now(0, 0)
    assert state.ended(0, 0, 1.0, is_echo=False) is None
    assert (state.is_over, state.status) == (True, 0)


def test_some_workers_may_be_spared() -> None:
    state = RunState({0, 1, 2}, spare=1)
    assert state.ended(2, 9, 1.0, is_echo=True) is None
    assert (state.spared, state.culprit, state.deadline) == ({2}, None, None)
    assert state.ended(1, 7, 2.0, is_echo=False) is TERM
    assert (state.culprit, state.status) == (1, 7)


def test_a_run_that_has_spared_a_worker_succeeds_with_the_others() -> None:
    state = RunState({0, 1}, spare=1)
    state.ended(0, 9, 1.0, is_echo=False)
    state.ended(1, 0, 2.0, is_echo=False)
    assert (state.is_over, state.status) == (True, 0)


@given(
    st.permutations(range(4)),
    st.lists(st.sampled_from([0, 1, 9]), min_size=4, max_size=4),
    st.lists(st.booleans(), min_size=4, max_size=4),
)
def test_the_status_is_that_of_a_worker_that_failed(
    order: list[int], statuses: list[int], echoes: list[bool]
) -> None:
    state = RunState(set(order))
    for worker in order:
        state.ended(worker, statuses[worker], 0.0, is_echo=echoes[worker])
    assert state.is_over
    if state.culprit is None:
        assert state.status == 0
        assert not any(statuses)
    else:
        assert state.status == statuses[state.culprit] > 0


# What is shown

FAILED = """\
loading
Traceback (most recent call last):
  File "a.py", line 1, in <module>
KeyError: 1

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "a.py", line 3, in <module>
{error}"""


def words(text: str) -> StderrTail:
    found = StderrTail()
    for line in text.splitlines():
        found.add(line)
    return found


def test_a_traceback_is_shown_with_those_that_led_to_it() -> None:
    shown = words(FAILED.format(error="ValueError: no")).lines()
    assert shown[0] == "Traceback (most recent call last):"
    assert len(shown) == 9


def test_without_a_traceback_the_last_lines_are_shown() -> None:
    shown = words("\n".join(f"line {i}" for i in range(50))).lines()
    assert (shown[0], shown[-1], len(shown)) == ("line 30", "line 49", 20)


@pytest.mark.parametrize(
    ("error", "is_echo"),
    [
        ("gradwire.errors.WorkerLostError: lost worker 'worker1': closed", True),
        ("RuntimeError: Error on Node 1: lost worker 'worker1': closed", True),
        ("ValueError: I have lost worker1", False),
        ("ValueError: no", False),
    ],
)
def test_a_worker_that_lost_another_is_told_apart(error: str, is_echo: bool) -> None:
    assert words(FAILED.format(error=error)).is_echo is is_echo


def test_a_loss_that_led_to_another_error_is_no_echo() -> None:
    text = FAILED.replace("KeyError: 1", "WorkerLostError: lost worker 'worker1': x")
    assert not words(text.format(error="ValueError: no")).is_echo


DUMP = """\
saving
Fatal Python error: Aborted

Thread 0x00007f2b5d7fa6c0 (most recent call first):
  File "other.py", line 9 in wait

Current thread 0x00007f2b7b0af740 [python] (most recent call first):
  File "/usr/lib/python3.14/ctypes.py", line 3 in call
  File "train.py", line 4 in busy
  File "train.py", line 7 in <module>

Extension modules: numpy.core (total: 1)"""


def test_the_main_thread_is_the_last_in_a_dump() -> None:
    written, dump = cut_dump(DUMP.splitlines())
    assert written == ["saving"]
    assert place_in_dump(dump) == "train.py, line 4, in busy"


def test_without_a_dump_there_is_no_place_in_it() -> None:
    written, dump = cut_dump(["no"])
    assert (written, dump, place_in_dump(dump)) == (["no"], [], None)
