"""One run of the benchmark: all ways take turns at all tasks; then a table and a picture."""

from __future__ import annotations

import json
import random
import socket
import sys
from argparse import Namespace
from collections.abc import Callable
from typing import NoReturn

from rich.console import Console
from rich.progress import Progress

from .picture import draw
from .report import BASE, Samples, markdown, show, summarize
from .runner import Contender, available
from .tasks import TASKS


def compare(arguments: Namespace, refuse: Callable[[str], NoReturn]) -> int:
    """Measure, show and write down; `refuse` arguments that name no task or no way to call."""
    ways = available() if arguments.ways is None else arguments.ways
    if unknown := [way for way in ways if way not in available()]:
        refuse(f"--ways {unknown[0]!r}: use some of {', '.join(available())}")
    everything = [task.name for task in TASKS]
    tasks = [name for name in everything if any(w in name for w in arguments.only)]
    if not tasks:
        words, names = " ".join(arguments.only), ", ".join(map(repr, everything))
        refuse(f"--only {words}: part of none of {names}")
    samples = _measure(tasks, ways, arguments.rounds)
    summary = summarize(samples)
    console = Console(width=None if sys.stdout.isatty() else 120)
    show(summary, console)
    arguments.json.write_text(json.dumps(summary, indent=1))
    if BASE in ways and len(ways) > 1:
        draw(summary, arguments.png)
        console.print(f"picture: {arguments.png}")
    if arguments.markdown is not None:
        arguments.markdown.write_text(markdown(summary))
    console.print(f"figures: {arguments.json}")
    return 0


def _measure(tasks: list[str], ways: list[str], rounds: int) -> Samples:
    samples: Samples = {task: {way: [] for way in ways} for task in tasks}
    contenders: list[Contender] = []
    try:
        contenders += [Contender(way, _free_port()) for way in ways]
        with Progress(transient=True) as progress:
            bar = progress.add_task("measuring", total=rounds * len(tasks) * len(ways))
            for _ in range(rounds):
                for task in tasks:
                    for contender in random.sample(contenders, len(contenders)):
                        sample = contender.measure(task)
                        samples[task][contender.way].append(sample)
                        progress.advance(bar)
    finally:
        for contender in contenders:
            contender.close()
            if contender.stuck_in is not None:
                print(f"{contender.way} gave no answer to {contender.stuck_in!r}")
    return samples


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
