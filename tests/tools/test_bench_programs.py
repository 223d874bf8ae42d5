"""The whole programs of `gradwire bench`: their statistics, and each of them at a small size."""

import json
import math
import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gradwire.tools.bench.command import main
from gradwire.tools.bench.group import FailedError, Group
from gradwire.tools.bench.member import Member
from gradwire.tools.bench.program import Program, always, fell
from gradwire.tools.bench.program_report import (
    Samples,
    goals_of,
    markdown_programs,
    percentile,
    sample_of,
    show_programs,
    summarize_programs,
)
from gradwire.tools.bench.program_runner import measure_programs
from gradwire.tools.bench.programs import PROGRAMS
from gradwire.tools.bench.ways import environment, is_known

GREEN, RED = "\x1b[32m", "\x1b[31m"


def by_name(name: str) -> Program:
    return next(program for program in PROGRAMS if program.name == name)


def small(program: Program) -> Program:
    """With few steps, in the same processes as all others that take so many."""
    return replace(program, steps=3, warm_up=1, group=f"{program.workers}")


def sample(median: float, p90: float, mean: float, cpu: float) -> dict[str, float]:
    return {"median": median, "p90": p90, "mean": mean, "cpu": cpu}


def samples() -> Samples:
    """The second round of the first program on a machine that was twice as slow."""
    return {
        "trainer + server": {
            "torch": [
                sample(4e-3, 8e-3, 5e-3, 6e-3),
                sample(8e-3, 16e-3, 10e-3, 12e-3),
            ],
            "gradwire": [
                sample(2e-3, 2e-3, 2e-3, 3e-3),
                sample(4e-3, 4e-3, 4e-3, 6e-3),
            ],
        },
        "sync add, 1 caller": {
            "torch": ["hung: worker1 did not answer within 60 s"] * 2,
            "gradwire": [sample(20e-6, 30e-6, 25e-6, 40e-6)] * 2,
        },
    }


# Statistics


def test_a_percentile_is_one_of_the_values() -> None:
    values = [float(n) for n in range(10, 0, -1)]
    assert percentile(values, 0.9) == 9
    assert percentile(values, 0.91) == 10
    assert percentile(values, 0) == 1
    assert percentile([3.0], 0.9) == 3


def test_a_sample_has_median_p90_mean_and_cpu() -> None:
    times = [1.0] * 8 + [5.0, 9.0]
    assert sample_of(times, 2.5) == sample(1.0, 5.0, 2.2, 2.5)


def test_ratios_are_those_of_the_same_round() -> None:
    rows = summarize_programs(samples())["trainer + server"]
    assert "ratios" not in rows["torch"]
    assert rows["torch"]["median"] == pytest.approx(6e-3)
    assert rows["gradwire"]["ratios"] == pytest.approx(sample(2, 4, 2.5, 2))
    assert len(rows["gradwire"]["rounds"]) == 2


def test_a_failed_contender_has_no_figures_and_gives_no_ratios() -> None:
    rows = summarize_programs(samples())["sync add, 1 caller"]
    assert rows["torch"] == {
        "rounds": [],
        "failure": "hung: worker1 did not answer within 60 s",
    }
    assert "ratios" not in rows["gradwire"]
    assert rows["gradwire"]["median"] == pytest.approx(20e-6)


def test_a_round_that_failed_counts_for_neither() -> None:
    failed = samples()
    failed["trainer + server"]["torch"][1] = "worker0 has ended"
    rows = summarize_programs(failed)["trainer + server"]
    assert rows["torch"]["failure"] == "worker0 has ended"
    assert rows["torch"]["median"] == pytest.approx(4e-3)
    assert rows["gradwire"]["ratios"]["median"] == pytest.approx(2)


def test_the_table_shows_times_ratios_and_failures() -> None:
    text = StringIO()
    summary = summarize_programs(samples())
    show_programs(summary, "one", Console(file=text, width=160))
    assert "one thread" in text.getvalue()
    assert (
        "│   3 ms / 3 ms / 3 ms / 4.5 ms │     ×2 │  ×4 │ ×2.5 │  ×2 │   ×3 │"
        in text.getvalue()
    )
    assert "torch: sync add, 1 caller: hung: worker1 did not" in text.getvalue()


def test_promises_are_shown_as_kept_or_broken() -> None:
    text = StringIO()
    console = Console(
        file=text, width=160, force_terminal=True, color_system="standard"
    )
    show_programs(summarize_programs(samples()), "one", console)
    assert f"{RED}×2" in text.getvalue()
    assert f"{GREEN}×2" in text.getvalue()  # CPU
    assert "×4" in text.getvalue()  # p90 has no promise here: no colour
    assert f"{GREEN}×4" not in text.getvalue()


def test_a_promise_may_depend_on_the_threads_and_the_number_of_clients() -> None:
    program = by_name("trainer + server")
    assert goals_of(program, "one") == {"median": 3, "cpu": 1}
    assert goals_of(program, "default") == {"median": 2.5, "cpu": 1}
    assert goals_of(by_name("sync add, 6 callers"), "one") == {"mean": 6, "cpu": 1}
    paced = by_name("add, every 10 ms of sleep")
    assert goals_of(paced, "one") == {"median": 2, "p90": 1.8, "cpu": 1}


def test_the_table_for_a_page_has_the_same_figures() -> None:
    page = markdown_programs(summarize_programs(samples()), "default")
    assert page.splitlines() == [
        "| torch's default threads | torch | gradwire | median | p90 | mean | CPU |",
        "|---|---|---|---|---|---|---|",
        "| trainer + server | 6 ms | 3 ms | ×2 | ×4 | ×2.5 | ×2 |",
        "| sync add, 1 caller | failed | 20 µs | – | – | – | – |",
        "",
        "torch: sync add, 1 caller: hung: worker1 did not answer within 60 s",
    ]


# Results


def test_a_loss_has_to_fall() -> None:
    assert fell([2.0, 3.0, 1.0]) == ""
    assert fell([2.0, 1.0, 2.5]) == "the loss went from 2 to 2.5"
    assert fell([2.0, float("nan")]) == "the loss went from 2 to nan"


def test_every_result_has_to_be_the_expected_one() -> None:
    assert always(18)([18.0, 18.0]) == ""
    assert always(18)([18.0, 17.0]) == "17 instead of 18"


# Programs


def test_each_program_has_a_name_of_its_own() -> None:
    names = [program.name for program in PROGRAMS]
    assert len(set(names)) == len(names)


def test_programs_of_a_group_have_the_same_number_of_workers() -> None:
    sizes: dict[str, int] = {}
    for program in PROGRAMS:
        assert sizes.setdefault(program.processes, program.workers) == program.workers


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen[str]]]:
    """All processes that the test has started; each must have ended with it."""
    processes: list[subprocess.Popen[str]] = []

    class Recorded(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            processes.append(self)

    monkeypatch.setattr(subprocess, "Popen", Recorded)
    yield processes
    assert [process.pid for process in processes if process.returncode is None] == []


SIZES = sorted({program.workers for program in PROGRAMS})


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("workers", SIZES)
@pytest.mark.usefixtures("started")
def test_a_program_has_the_right_results(workers: int) -> None:
    programs = [small(p) for p in PROGRAMS if p.workers == workers]
    found = measure_programs(programs, ["gradwire"], 1, "one", lambda: None)
    for program in programs:
        (measured,) = found[program.name]["gradwire"]
        assert not isinstance(measured, str), f"{program.name}: {measured}"
        assert 0 < measured["median"] <= measured["p90"]
        assert measured["cpu"] > 0


def test_a_program_may_be_over_after_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    results = iter([1.0, 2.0, 3.0, 4.0])
    counting = replace(
        by_name("sync add, 1 caller"), begin=lambda rank: lambda: next(results)
    )
    monkeypatch.setattr("gradwire.tools.bench.member.PROGRAMS", [counting])
    member = Member(0)
    member.prepare(counting.name, 1)
    assert member.run(2, math.inf)["results"] == [1, 2, 3]
    run = member.run(2, -1.0)
    assert run["results"] == [1, 2, 3, 4]
    assert len(run["times"]) == 1


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_torch_runs_the_same_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = tmp_path / "bench.json"
    row = "remote embedding, sparse gradients"
    chosen = ["--only", row, "--rounds", "1", "--threads", "one"]
    assert main([*chosen, "--json", str(figures)]) == 0
    found = json.loads(figures.read_text())["programs"]["one"][row]
    assert "failure" not in found["torch"]
    assert found["gradwire"]["ratios"]["median"] > 0
    assert row in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_wrong_results_and_ended_workers_do_not_count(
    started: list[subprocess.Popen[str]],
) -> None:
    add = small(by_name("sync add, 1 caller"))
    wrong = replace(add, check=always(17))
    found = measure_programs([wrong], ["gradwire"], 2, "default", lambda: None)
    message = "worker0: wrong result: 18 instead of 17"
    assert found[add.name]["gradwire"] == [message] * 2
    assert len(started) == add.workers  # not tried again

    group = Group("gradwire", add.workers, "one")
    try:
        started[-1].kill()
        started[-1].wait()
        with pytest.raises(FailedError, match=r"worker1 has ended"):
            group.measure(add)
    finally:
        group.close()


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.usefixtures("started")
def test_a_hung_worker_ends_the_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    add = small(by_name("sync add, 1 caller"))
    group = Group("gradwire", add.workers, "one")
    monkeypatch.setattr(os, "kill", lambda pid, number: None)  # it is not woken up
    monkeypatch.setattr("gradwire.tools.bench.group._LIMIT", 0.1)
    try:
        with pytest.raises(FailedError, match=r"hung: worker1 did not answer"):
            group.measure(add)
    finally:
        monkeypatch.undo()
        group.close()


def test_a_variant_has_its_settings_in_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GRADWIRE_SPIN", "1")
    found = environment("gradwire, GRADWIRE_SPIN=0 GRADWIRE_UNIX_SOCKETS=0")
    assert found["GRADWIRE_SPIN"] == found["GRADWIRE_UNIX_SOCKETS"] == "0"
    assert environment("gradwire")["GRADWIRE_SPIN"] == "1"
    assert not is_known("gradwire, slow")
    with pytest.raises(SystemExit):
        main(["--ways", "gradwire, slow"])
    assert "--ways 'gradwire, slow': use some of 'torch'" in capsys.readouterr().err


def test_a_word_that_names_no_program_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["--only", "nonsense"])
    assert "'trainer + server'" in capsys.readouterr().err
