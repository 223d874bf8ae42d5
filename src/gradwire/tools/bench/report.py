"""What was measured, as ratios: a table for people, JSON for the rest."""

from __future__ import annotations

from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from .tasks import TASKS, Sample, Task
from .ways import BASE

_TITLE = (
    "medians; ×N: how many times faster than torch in the same run; "
    "+N %: how much more time than torch.autograd.backward"
)
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
    table = Table(title=_TITLE)
    table.add_column("")
    for way in ways:
        table.add_column(way, justify="right")
    table.add_column("goal", justify="right")
    for task in TASKS:
        if task.name in summary:
            cells = [_cell(task, way, row) for way, row in summary[task.name].items()]
            table.add_row(task.name, *cells, _goal(task))
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
    compared = _compared(way, row, ".2g")
    if not compared:
        return text
    return f"{text}, **{compared}**" if way == "gradwire" else f"{text}, {compared}"


def _compared(way: str, row: dict[str, float], digits: str) -> str:
    """Beside plain torch where that was measured, else beside torch RPC."""
    if "over_local" in row:
        return _more(row["over_local"])
    if "ratio" not in row or way == BASE:
        return ""
    return f"×{row['ratio']:{digits}}"


def _more(fraction: float) -> str:
    return f"{fraction * 100:+.0f} %"


def _goal(task: Task) -> str:
    if task.local_goal is not None:
        return f"< {_more(task.local_goal)}"
    return f"×{task.goal:g}" if task.goal else ""


def _cell(task: Task, way: str, row: dict[str, float] | None) -> str:
    if row is None:
        return "–"
    scale = 1e3 if task.unit == "ms" else 1e6
    text = f"{row['median'] * scale:.1f} {task.unit}"
    compared = _compared(way, row, ".1f")
    if not compared:
        return text
    kept = _kept(task, way, row)
    style = "none" if kept is None else "green" if kept else "red"
    return f"{text}  [{style}]{compared}[/{style}]"


def _kept(task: Task, way: str, row: dict[str, float]) -> bool | None:
    """Whether we keep our promise; None where there is none."""
    if not way.startswith("gradwire"):
        return None
    if task.local_goal is not None:
        return row["over_local"] < task.local_goal
    goal = task.goal if way == "gradwire" else task.tcp_goal
    return None if goal is None else row["ratio"] >= goal


def _remarks(summary: dict[str, Any]) -> list[str]:
    lines = []
    for task, rows in summary.items():
        for way, row in rows.items():
            if row is None:
                continue
            if "busy" in task and "p99" in row:
                times = row["p99"] / row["median"]
                lines.append(f"{way}: {task}: p99 is {times:.1f} × the median")
            if "local" in row:
                lines.append(_beside_local(task, way, row))
            if "cpu" in row and way != "torch, huge pages":
                lines.append(
                    f"{way}: {task}: {row['cpu'] * 1e6:.0f} µs of CPU, both ends"
                )
        lines += _tls_beside_plain(task, rows)
    return lines


def _tls_beside_plain(task: str, rows: dict[str, Any]) -> list[str]:
    """How much of what TCP does is left with TLS, where much is sent."""
    plain, tls = rows.get("gradwire, TCP"), rows.get("gradwire, TLS")
    if not (plain and tls and task.endswith("MB")):
        return []
    share = plain["median"] / tls["median"]
    return [f"gradwire, TLS: {task}: {share:.0%} of the throughput of plain TCP"]


def _beside_local(task: str, way: str, row: dict[str, float]) -> str:
    inside, local = row["median"] * 1e3, row["local"] * 1e3
    times = f"{inside:.1f} ms in a context, {local:.1f} ms without one"
    return f"{way}: {task}: {times}, {_more(row['over_local'])}"
