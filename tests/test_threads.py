"""The executor: few threads for quick work, enough for stuck work, none for no work."""

import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from gradwire import threads
from gradwire.threads import Bell, Executor, ShorterSwitchInterval

SOON = 20.0  # seconds; far more than anything here takes

Make = Callable[..., Executor]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes executors, and ends them after the test."""
    made: list[Executor] = []

    def make(limit: int = 4, **options: Any) -> Executor:
        made.append(Executor("test", limit, **options))
        return made[-1]

    yield make
    for executor in made:
        executor.close()
        assert executor.join(SOON)


@pytest.fixture
def no_monitor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The monitor never finds a queue stuck, so who runs what is certain."""
    monkeypatch.setattr(threads, "_TICK", 3600.0)


def finished(executor: Executor, *tasks: Callable[[], object]) -> bool:
    """Submits the tasks and waits for the last of them."""
    done = threading.Event()
    for task in tasks:
        executor.submit(task)
    executor.submit(done.set)
    return done.wait(SOON)


class Stuck:
    """A task that hangs where the executor does not know of it, until told."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.release = threading.Event()

    def __call__(self) -> None:
        self.entered.set()
        assert self.release.wait(SOON)


# Running


def test_every_task_is_run_once(make: Make) -> None:
    executor = make()
    ran: list[int] = []
    all_ran = threading.Event()

    def task(number: int) -> None:
        ran.append(number)
        if len(ran) == 800:
            all_ran.set()

    def submit_many(start: int) -> None:
        for number in range(start, start + 200):
            executor.submit(partial(task, number))

    submitters = [
        threading.Thread(target=submit_many, args=(start,))
        for start in (0, 200, 400, 600)
    ]
    for thread in submitters:
        thread.start()
    for thread in submitters:
        thread.join(SOON)
    assert all_ran.wait(SOON)
    assert executor.backlog == 0
    assert sorted(ran) == list(range(800))


@pytest.mark.usefixtures("no_monitor")
def test_a_burst_is_run_by_the_thread_that_is_awake(make: Make) -> None:
    executor, done = make(), threading.Event()
    idents = set()

    def note() -> None:
        idents.add(threading.get_ident())

    def burst() -> None:
        note()
        for _ in range(100):
            executor.submit(note)
        executor.submit(done.set)

    executor.submit(burst)
    assert done.wait(SOON)
    assert len(idents) == 1


@pytest.mark.usefixtures("no_monitor")
def test_a_thread_without_work_is_used_again(make: Make) -> None:
    executor = make()
    idents = set()
    for _ in range(20):
        assert finished(executor, lambda: idents.add(threading.get_ident()))
    assert len(idents) == 1


def test_what_a_task_holds_is_let_go_after_it(make: Make) -> None:
    class Thing:
        """Something large."""

    thing = Thing()
    alive = weakref.ref(thing)
    gone = threading.Event()
    weakref.finalize(thing, gone.set)
    make().submit(lambda held=thing: None)
    del thing
    assert gone.wait(SOON)
    assert alive() is None


@pytest.mark.parametrize("error", [ValueError("my mistake"), SystemExit(3)])
def test_a_task_that_raises_is_logged_and_harms_nobody(
    make: Make, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    executor = make(1)

    def fail() -> None:
        raise error

    with caplog.at_level(logging.ERROR, "gradwire"):
        assert finished(executor, fail, fail)
    failures = [r.exc_info[1] for r in caplog.records if r.exc_info]
    assert failures == [error, error]


# Getting unstuck


def test_a_stuck_task_does_not_hold_up_the_others(make: Make) -> None:
    executor, stuck = make(2), Stuck()
    executor.submit(stuck)
    assert finished(executor, stuck.release.set)


def test_threads_are_added_up_to_the_limit_and_no_further(make: Make) -> None:
    executor = make(3)
    tasks = [Stuck() for _ in range(4)]
    all_busy = threading.Event()
    executor.when_stuck(all_busy.set)
    for task in tasks:
        executor.submit(task)
    for task in tasks[:3]:
        assert task.entered.wait(SOON)
    all_busy.clear()
    assert all_busy.wait(SOON)
    assert not tasks[3].entered.is_set()
    tasks[1].release.set()
    assert tasks[3].entered.wait(SOON)
    for task in tasks:
        task.release.set()


def test_who_looks_when_all_are_stuck_may_free_them(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    executor, stuck = make(1), Stuck()

    def fail() -> None:
        raise ValueError("a look that raises")

    executor.when_stuck(fail)
    executor.when_stuck(stuck.release.set)
    executor.submit(stuck)
    assert finished(executor)
    assert "a look that raises" in caplog.text


@pytest.mark.usefixtures("no_monitor")
def test_a_thread_that_waits_does_not_count(make: Make) -> None:
    executor = make(1)
    depths: list[int] = []

    def descend(depth: int, done: threading.Event) -> None:
        if depth:
            inner = threading.Event()
            executor.submit(lambda: descend(depth - 1, inner))
            with executor.waiting():
                assert inner.wait(SOON)
        depths.append(depth)
        done.set()

    done = threading.Event()
    executor.submit(lambda: descend(100, done))
    assert done.wait(SOON)
    assert depths == list(range(101))


@pytest.mark.usefixtures("no_monitor")
def test_a_waiting_thread_passes_on_what_was_queued_for_it(make: Make) -> None:
    executor = make(1)
    queued, done = threading.Event(), threading.Event()

    def wait() -> None:
        assert queued.wait(SOON)  # the task below is in the queue, left for this thread
        with executor.waiting():
            assert done.wait(SOON)

    executor.submit(wait)
    executor.submit(done.set)
    queued.set()
    assert done.wait(SOON)


def test_threads_that_go_on_after_waiting_count_again(make: Make) -> None:
    executor = make(1)
    stuck, waits, all_busy = Stuck(), threading.Event(), threading.Event()

    def wait_then_hang() -> None:
        with executor.waiting():
            waits.set()
        stuck()

    executor.when_stuck(all_busy.set)
    executor.submit(wait_then_hang)
    assert waits.wait(SOON)
    assert stuck.entered.wait(SOON)
    late = Stuck()
    executor.submit(late)
    assert all_busy.wait(SOON)
    assert not late.entered.is_set()
    for task in (stuck, late):
        task.release.set()


def test_waiting_elsewhere_changes_nothing(make: Make) -> None:
    executor, done = make(1), threading.Event()

    def host() -> None:
        with executor.waiting():
            assert finished(executor)
        done.set()

    with executor.waiting():
        executor.host(host)
        assert done.wait(SOON)


def test_a_hosted_task_has_a_thread_of_its_own(make: Make) -> None:
    executor, stuck = make(1), Stuck()
    executor.submit(stuck)
    assert stuck.entered.wait(SOON)
    done = threading.Event()
    executor.host(done.set)
    assert done.wait(SOON)
    stuck.release.set()


# The clock


def test_tasks_run_in_the_order_of_their_times_and_not_before(make: Make) -> None:
    executor, done = make(1), threading.Event()
    start = time.monotonic()
    ran: list[tuple[str, float]] = []

    def at(name: str, delay: float) -> None:
        executor.call_at(start + delay, lambda: ran.append((name, time.monotonic())))

    def set_timers() -> None:  # by the monitor, which runs none before all are set
        at("last", 0.06)
        at("middle", 0.03)
        at("middle too", 0.03)
        at("first", -1.0)
        executor.call_at(start + 0.06, done.set)

    executor.look_at(start, set_timers)
    assert done.wait(SOON)
    assert [name for name, _ in ran] == ["first", "middle", "middle too", "last"]
    for (_, when), delay in zip(ran, (-1.0, 0.03, 0.03, 0.06), strict=True):
        assert when >= start + delay


def test_an_earlier_time_wakes_who_sleeps_until_a_later_one(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor, done = make(), threading.Event()
    asleep = parked(monkeypatch, lambda pause: pause is not None and pause > 1000)
    executor.call_at(time.monotonic() + 3600, done.clear)
    assert asleep.wait(SOON)
    executor.call_at(time.monotonic(), done.set)
    assert done.wait(SOON)


def test_what_is_quick_is_done_by_the_monitor_alone(make: Make) -> None:
    executor, done = make(), threading.Event()
    names: list[str] = []

    def look() -> None:
        names.append(threading.current_thread().name)
        done.set()

    executor.look_at(0.0, look)
    assert done.wait(SOON)
    assert ["-monitor-" in name for name in names] == [True]


# Ending


def parked(
    monkeypatch: pytest.MonkeyPatch, is_parked: Callable[[float | None], bool]
) -> threading.Event:
    """Set when the monitor goes to sleep for a time that fits."""
    asleep = threading.Event()
    pause = threads._Monitor._pause

    def watched(monitor: Any) -> float | None:
        seconds = pause(monitor)
        if is_parked(seconds):
            asleep.set()
        return seconds

    monkeypatch.setattr(threads._Monitor, "_pause", watched)
    return asleep


def test_without_work_the_monitor_sleeps_without_end(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    asleep = parked(monkeypatch, lambda pause: pause is None)
    executor, stuck = make(2), Stuck()
    for _ in range(2):  # and again, after it was woken
        executor.submit(stuck)
        assert finished(executor, stuck.release.set)
        assert asleep.wait(SOON)
        stuck.release.clear()
        asleep.clear()


def test_a_thread_long_without_work_ends_and_another_comes(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "_IDLE", 0.001)
    executor = make()
    seen: list[threading.Thread] = []
    for _ in range(3):
        assert finished(executor, lambda: seen.append(threading.current_thread()))
        seen[-1].join(SOON)
        assert not seen[-1].is_alive()
    assert len(set(seen)) == 3


def test_closing_and_joining_twice_is_fine(make: Make) -> None:
    executor = make()
    assert finished(executor)
    for _ in range(2):
        executor.close()
        assert executor.join(SOON)
    assert "0 threads" in repr(executor)


def test_an_executor_without_work_can_be_closed(make: Make) -> None:
    executor = make()
    executor.close()
    assert executor.join(SOON)


def test_an_interrupt_while_a_thread_is_begun_leaves_none_to_wait_for(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(thread: threading.Thread) -> None:
        raise KeyboardInterrupt

    executor = make()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            executor.submit(lambda: None)
    executor.close()
    assert executor.join(1)


def test_join_says_whether_a_task_still_runs(make: Make) -> None:
    executor, stuck = make(), Stuck()
    executor.submit(stuck)
    assert stuck.entered.wait(SOON)
    executor.close()
    assert not executor.join(0)
    stuck.release.set()
    assert executor.join(SOON)


def test_after_closing_no_task_is_run(make: Make) -> None:
    executor, stuck = make(1), Stuck()
    ran: list[str] = []
    executor.submit(stuck)
    assert stuck.entered.wait(SOON)
    executor.submit(lambda: ran.append("queued"))
    executor.call_at(time.monotonic() + 0.01, lambda: ran.append("timed"))
    executor.close()
    executor.submit(lambda: ran.append("late"))
    stuck.release.set()
    assert executor.join(SOON)
    assert ran == []


def test_after_closing_tasks_that_are_not_run_are_let_go(make: Make) -> None:
    class Thing:
        def use(self) -> None:
            pass

    executor = make()
    early, late, submitted = Thing(), Thing(), Thing()
    things = [weakref.ref(thing) for thing in (early, late, submitted)]
    executor.call_at(time.monotonic() + 3600, early.use)
    executor.close()
    executor.call_at(time.monotonic() + 3600, late.use)
    executor.submit(submitted.use)
    assert executor.join(SOON)
    del early, late, submitted
    assert [thing() for thing in things] == [None] * 3


def test_a_task_may_close_and_join_its_own_executor(make: Make) -> None:
    executor, answers = make(), []

    def end() -> None:
        executor.close()
        answers.append(executor.join(SOON))

    executor.submit(end)
    while not answers:
        executor.join(SOON)
    assert answers == [True]


# Hooks


def test_every_thread_begins_with_the_hook(make: Make) -> None:
    hooked: set[int] = set()
    executor = make(on_thread=lambda: hooked.add(threading.get_ident()))
    missing: list[int] = []
    done = threading.Event()

    def check() -> None:
        if threading.get_ident() not in hooked:
            missing.append(threading.get_ident())

    assert finished(executor, check)
    executor.host(lambda: (check(), done.set()))
    assert done.wait(SOON)
    assert not missing


def test_a_hook_that_raises_costs_no_thread(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    def hook() -> None:
        raise ValueError("a bad hook")

    assert finished(make(1, on_thread=hook))
    assert "a bad hook" in caplog.text


# Bells and turns


def test_a_bell_wakes_one_wait_however_often_it_was_rung() -> None:
    bell = Bell()
    assert not bell.wait(0)
    bell.ring()
    bell.ring()
    assert bell.wait_until(None)
    assert not bell.wait_until(time.monotonic() - 1)


def test_turns_are_only_ever_shortened_and_put_back() -> None:
    before = sys.getswitchinterval()
    longer, shorter = (
        ShorterSwitchInterval(before * 2),
        ShorterSwitchInterval(before / 2),
    )
    assert sys.getswitchinterval() == pytest.approx(before / 2)
    for turns in (longer, shorter, shorter):
        turns.close()
    assert sys.getswitchinterval() == pytest.approx(before)
