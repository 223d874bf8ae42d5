"""One run of the benchmark: all ways take turns at all rows; then tables and a picture."""

from __future__ import annotations

import json
import random
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, NoReturn

from rich.console import Console
from rich.progress import Progress

from .group import THREADS, free_port
from .picture import draw
from .program_report import markdown_programs, show_programs, summarize_programs
from .program_runner import measure_programs
from .programs import PROGRAMS
from .ray_monarch import installed
from .report import Samples, markdown, show, summarize
from .runner import Contender
from .tasks import TASKS
from .ways import BASE, available, is_known

_DEFAULT_WAYS = [BASE, "gradwire"]
"""Of whole programs; others take part when they are named."""


def compare(chosen: Namespace, refuse: Callable[[str], NoReturn]) -> int:
    """Measure, show and write down; `refuse` arguments that name no row or no way to call."""
    for way in chosen.ways or ():
        if not is_known(way):
            known = ", ".join(map(repr, available()))
            refuse(f"--ways {way!r}: use some of {known}, 'gradwire, NAME=VALUE ...'")
    if chosen.on == "ray" and find_spec("ray") is None:
        refuse("--on ray: needs Ray: pip install 'gradwire[ray]'")
    if chosen.on == "ray" and "Monarch" in (chosen.ways or ()):
        refuse("--ways Monarch: its actors are not Ray's")
    loops = _matching("loops", [task.name for task in TASKS], chosen.only)
    names = _matching("programs", [program.name for program in PROGRAMS], chosen.only)
    if chosen.on == "ray":
        names = []  # their processes are not Ray's
    if not loops and not names:
        everything = [task.name for task in TASKS] + [each.name for each in PROGRAMS]
        words, listed = " ".join(chosen.only), ", ".join(map(repr, everything))
        refuse(f"--only {words}: part of none of 'loops', 'programs', {listed}")
    console = Console(width=None if sys.stdout.isatty() else 160)
    found: dict[str, Any] = {}
    pages = []
    if loops:
        found["loops"] = _loops(loops, chosen, console)
        pages.append(markdown(found["loops"]))
    for threads in THREADS if chosen.threads == "both" else [chosen.threads]:
        if names:
            summary = _programs(names, chosen, threads, console)
            found.setdefault("programs", {})[threads] = summary
            pages.append(markdown_programs(summary, threads))
    chosen.json.write_text(json.dumps(found, indent=1))
    if chosen.markdown is not None:
        chosen.markdown.write_text("\n".join(pages))
    console.print(f"figures: {chosen.json}")
    return 0


def _matching(kind: str, names: Sequence[str], words: Sequence[str]) -> list[str]:
    return [name for name in names if any(w == kind or w in name for w in words)]


def _loops(tasks: Sequence[str], chosen: Namespace, console: Console) -> dict[str, Any]:
    measure, ways = _measure, available()
    if chosen.on == "ray":
        from . import on_ray  # where there is no Ray, the rest still works

        measure, ways = on_ray.measure, on_ray.WAYS
    ways = chosen.ways or ways
    total = chosen.rounds * len(tasks) * len(ways)
    with Progress(transient=True) as progress:
        bar = progress.add_task("loops", total=total)
        samples = measure(tasks, ways, chosen.rounds, lambda: progress.advance(bar))
    summary = summarize(samples)
    show(summary, console)
    if BASE in ways and len(ways) > 1:
        draw(summary, chosen.png)
        console.print(f"picture: {chosen.png}")
    return summary


def _programs(
    names: Sequence[str], chosen: Namespace, threads: str, console: Console
) -> dict[str, Any]:
    programs = [program for program in PROGRAMS if program.name in names]
    ways = [way for way in chosen.ways or _DEFAULT_WAYS if way not in installed()]
    total = chosen.rounds * len(programs) * len(ways)
    with Progress(transient=True) as progress:
        bar = progress.add_task(f"programs, threads: {threads}", total=total)
        samples = measure_programs(
            programs, ways, chosen.rounds, threads, lambda: progress.advance(bar)
        )
    summary = summarize_programs(samples)
    show_programs(summary, threads, console)
    return summary


def _measure(
    tasks: Sequence[str], ways: Sequence[str], rounds: int, advance: Callable[[], None]
) -> Samples:
    samples: Samples = {task: {way: [] for way in ways} for task in tasks}
    contenders: list[Contender] = []
    try:
        contenders += [Contender(way, free_port()) for way in ways]
        for _ in range(rounds):
            for task in tasks:
                for contender in random.sample(contenders, len(contenders)):
                    samples[task][contender.way].append(contender.measure(task))
                    advance()
    finally:
        for contender in contenders:
            contender.close()
            if contender.stuck_in is not None:
                print(f"{contender.way} gave no answer to {contender.stuck_in!r}")
    return samples
