"""What was measured, as ratios: a table for people, JSON for the rest."""

from __future__ import annotations

from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from .tasks import TASKS, Sample, Task

BASE = "torch"
Samples = dict[str, dict[str, list[Sample | None]]]
"""By task and contender, one for each round; None where it cannot do that."""


def summarize(samples: Samples) -> dict[str, Any]:
    """Medians over rounds, and ratios as medians of the ratios of each round."""
    result: dict[str, Any] = {}
    for task, by_way in samples.items():
        base = by_way.get(BASE)
        result[task] = {}
        for way, measured in by_way.items():
            rounds = [sample for sample in measured if sample is not None]
            if not rounds:
                result[task][way] = None
                continue
            row = {key: median(s[key] for s in rounds) for key in rounds[0]}
            if base is not None:
                pairs = zip(base, measured, strict=True)
                ratios = [b["median"] / r["median"] for b, r in pairs if b and r]
                row["ratio"] = median(ratios)
            result[task][way] = row
    return result


def show(summary: dict[str, Any], console: Console) -> None:
    """The tables."""
    ways = list(next(iter(summary.values())))
    table = Table(title="medians; ×N: how many times faster than torch in the same run")
    table.add_column("")
    for way in ways:
        table.add_column(way, justify="right")
    table.add_column("goal", justify="right")
    for task in TASKS:
        if task.name in summary:
            cells = [_cell(task, way, row) for way, row in summary[task.name].items()]
            table.add_row(task.name, *cells, f"×{task.goal:g}" if task.goal else "")
    console.print(table)
    for line in _remarks(summary):
        console.print(line)


def markdown(summary: dict[str, Any]) -> str:
    """The same as a table for a page."""
    ways = list(next(iter(summary.values())))
    lines = [f"| | {' | '.join(ways)} |", "|---" * (len(ways) + 1) + "|"]
    for task in TASKS:
        if task.name in summary:
            cells = [_plain(way, row) for way, row in summary[task.name].items()]
            lines.append(f"| {task.name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _plain(way: str, row: dict[str, float] | None) -> str:
    if row is None:
        return "–"
    seconds = row["median"]
    text = f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"
    if "ratio" not in row or way == BASE:
        return text
    ratio = f"×{row['ratio']:.2g}"
    return f"{text}, **{ratio}**" if way == "gradwire" else f"{text}, {ratio}"


def _cell(task: Task, way: str, row: dict[str, float] | None) -> str:
    if row is None:
        return "–"
    scale = 1e3 if task.unit == "ms" else 1e6
    text = f"{row['median'] * scale:.1f} {task.unit}"
    if "ratio" not in row or way == BASE:
        return text
    goal = {"gradwire": task.goal, "gradwire, TCP": task.tcp_goal}.get(way)
    style = "" if goal is None else "green" if row["ratio"] >= goal else "red"
    ratio = f"×{row['ratio']:.1f}"
    return f"{text}  [{style}]{ratio}[/{style}]" if style else f"{text}  {ratio}"


def _remarks(summary: dict[str, Any]) -> list[str]:
    lines = []
    for task, rows in summary.items():
        for way, row in rows.items():
            if row is None:
                continue
            if "busy" in task and "p99" in row:
                times = row["p99"] / row["median"]
                lines.append(f"{way}: {task}: p99 is {times:.1f} × the median")
            if "cpu" in row and way != "torch, huge pages":
                lines.append(
                    f"{way}: {task}: {row['cpu'] * 1e6:.0f} µs of CPU, both ends"
                )
    return lines
