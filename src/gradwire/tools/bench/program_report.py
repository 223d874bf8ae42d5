"""Statistics of whole programs, and their tables: wall time and CPU seconds beside torch RPC's."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, median
from typing import Any

from rich.console import Console
from rich.table import Table

from .program import Program
from .programs import PROGRAMS
from .ways import BASE

Sample = dict[str, float]
"""One round of one contender: seconds, `median`, `p90` and `mean` of its steps, `cpu` per step.

Callers that compete for a server may each get a burst of quick answers and then wait long:
there the mean tells how many steps are done in a second.
"""

Samples = dict[str, dict[str, list[Sample | str]]]
"""By program and contender, one for each round; a string says why there is none."""

FIGURES = ("median", "p90", "mean", "cpu")


def sample_of(times: Sequence[float], cpu: float) -> Sample:
    """What one round has shown."""
    return {
        "median": median(times),
        "p90": percentile(times, 0.9),
        "mean": mean(times),
        "cpu": cpu,
    }


def percentile(values: Sequence[float], fraction: float) -> float:
    """The smallest value that at least this fraction of all do not exceed."""
    ordered = sorted(values)
    # Rounded: 0.9 × 10 may be a little more than 9, and is meant to be 9.
    place = -int(-round(fraction * len(ordered), 9) // 1)
    return ordered[max(0, place - 1)]


def summarize_programs(samples: Samples) -> dict[str, Any]:
    """Medians over rounds, and ratios as medians of the ratios of each round."""
    return {
        program: {
            way: _row(measured, by_way.get(BASE) if way != BASE else None)
            for way, measured in by_way.items()
        }
        for program, by_way in samples.items()
    }


def _row(
    measured: Sequence[Sample | str], base: Sequence[Sample | str] | None
) -> dict[str, Any]:
    rounds = [sample for sample in measured if not isinstance(sample, str)]
    row: dict[str, Any] = {"rounds": rounds}
    if failures := [sample for sample in measured if isinstance(sample, str)]:
        row["failure"] = failures[0]
    if not rounds:
        return row
    row |= {figure: median(sample[figure] for sample in rounds) for figure in FIGURES}
    pairs = [
        (theirs, ours)
        for theirs, ours in zip(base or (), measured, strict=False)
        if not isinstance(theirs, str) and not isinstance(ours, str)
    ]
    if pairs:
        row["ratios"] = {
            figure: median(theirs[figure] / ours[figure] for theirs, ours in pairs)
            for figure in FIGURES
        }
    return row


_HEADINGS = ("median", "p90", "mean", "CPU")


def show_programs(summary: dict[str, Any], threads: str, console: Console) -> None:
    """The table of one thread setting: promises kept are green, broken ones red."""
    promises = {program.name: program for program in PROGRAMS}
    ways = list(next(iter(summary.values())))
    table = Table(
        title=f"whole programs, {setting(threads)}: median / p90 / mean of a step "
        "/ CPU of all processes per step; ×N: torch's divided by this one's",
    )
    table.add_column("")
    for way in ways:
        table.add_column(way, justify="right")
        if way != BASE and BASE in ways:
            for heading in _HEADINGS:
                table.add_column(heading, justify="right")
    table.add_column("goal", justify="right")
    for program, rows in summary.items():
        goals = goals_of(promises[program], threads)
        cells = []
        for way, row in rows.items():
            cells.append(_times(row))
            if way != BASE and BASE in ways:
                cells += _coloured(row, goals)
        goal = goals.get(promises[program].goal_figure)
        table.add_row(program, *cells, f"×{goal:g}" if goal else "")
    console.print(table)
    for line in failures(summary):
        console.print(line)


def goals_of(program: Program, threads: str) -> dict[str, float]:
    """What each ratio should at least be; nobody's CPU seconds may exceed torch's."""
    goals = {"p90": program.p90_goal, "cpu": 1.0}
    goals[program.goal_figure] = program.goal_with(threads)
    return {figure: goal for figure, goal in goals.items() if goal is not None}


def _coloured(row: dict[str, Any], goals: dict[str, float]) -> list[str]:
    cells = _ratios(row)
    if "ratios" not in row:
        return cells
    for place, figure in enumerate(FIGURES):
        if figure in goals:
            style = "green" if row["ratios"][figure] >= goals[figure] else "red"
            cells[place] = f"[{style}]{cells[place]}[/{style}]"
    return cells


def markdown_programs(summary: dict[str, Any], threads: str) -> str:
    """The same as a table for a page: medians, and three ratios."""
    ways = list(next(iter(summary.values())))
    headings = [setting(threads)]
    for way in ways:
        headings.append(way)
        if way != BASE and BASE in ways:
            headings += _HEADINGS
    lines = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    for program, rows in summary.items():
        cells = [program]
        for way, row in rows.items():
            cells.append(_time(row["median"]) if "median" in row else "failed")
            if way != BASE and BASE in ways:
                cells += _ratios(row)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *failures(summary)]) + "\n"


def failures(summary: dict[str, Any]) -> list[str]:
    """A line for each contender that could not be measured in some round."""
    return [
        f"{way}: {program}: {row['failure']}"
        for program, rows in summary.items()
        for way, row in rows.items()
        if "failure" in row
    ]


def setting(threads: str) -> str:
    """What a thread setting means, in words."""
    return {"default": "torch's default threads", "one": "one thread"}[threads]


def _times(row: dict[str, Any]) -> str:
    if "median" not in row:
        return "failed"
    return " / ".join(_time(row[figure]) for figure in FIGURES)


def _time(seconds: float) -> str:
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds * 1e6:.0f} µs"


def _ratios(row: dict[str, Any]) -> list[str]:
    if "ratios" not in row:
        return ["–"] * len(FIGURES)
    return [f"×{row['ratios'][figure]:.2g}" for figure in FIGURES]
