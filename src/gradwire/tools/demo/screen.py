"""What the demo shows while it trains: how far it is, the loss, and what goes over the wires."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from ...api import get_worker_infos, rpc_async, statistics
from .model import PLACES
from .train import Curve

_PERIOD = 0.5  # seconds between two looks at the workers


class Screen:
    """A live view on a terminal; elsewhere a line for each epoch."""

    def __init__(self, console: Console, title: str, *, epochs: int) -> None:
        self._console = console
        self._is_live = console.is_terminal
        self._bar = Progress(
            TextColumn(title),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.4f}"),
            TextColumn("{task.speed:.0f} steps/s"),
            console=console,
        )
        self._task = self._bar.add_task("", total=epochs, loss=float("nan"))
        self._live = Live(self._bar, console=console, refresh_per_second=8)

    def __enter__(self) -> Screen:
        if self._is_live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_live:
            self._live.stop()

    def on_step(self, curve: Curve) -> None:
        """Show a step."""
        done = len(curve.losses)
        self._bar.update(
            self._task,
            completed=done,
            total=curve.epochs * curve.steps,
            loss=curve.losses[-1],
        )
        if not self._is_live and done % curve.steps == 0:
            epoch, loss = done // curve.steps, curve.epoch_losses[-1]
            self._console.print(f"epoch {epoch}: loss {loss:.4f}")

    def show_below(self, table: Table) -> None:
        """Put a table below the bar."""
        self._live.update(Group(self._bar, table))


class Traffic:
    """What the workers call and send, asked for now and then."""

    def __init__(self) -> None:
        self.now: dict[str, dict[str, Any]] = {}
        self._before: dict[str, dict[str, Any]] = {}
        self._looked_at = time.monotonic()
        self._seconds = 1.0

    def is_due(self) -> bool:
        return time.monotonic() - self._looked_at > _PERIOD

    def look(self) -> None:
        """Ask all workers."""
        now = time.monotonic()
        calls = {info.name: rpc_async(info, statistics) for info in get_worker_infos()}
        self._before = self.now
        self.now = {name: call.wait() for name, call in calls.items()}
        self._seconds, self._looked_at = now - self._looked_at, now

    def table(self) -> Table:
        """What each worker has, and how much goes to and from it."""
        table = Table(box=None, pad_edge=False)
        table.add_column("worker")
        table.add_column("has")
        for column in ("calls/s", "MB/s", "sent", "received"):
            table.add_column(column, justify="right")
        for part, worker in PLACES.items():
            calls = self._rate(worker, "calls_made", "calls_run")
            volume = self._rate(worker, "bytes_sent", "bytes_received")
            sent, received = (
                f"{self.now[worker][key] / 1e6:,.1f} MB"
                for key in ("bytes_sent", "bytes_received")
            )
            table.add_row(
                worker, part, f"{calls:,.0f}", f"{volume / 1e6:.1f}", sent, received
            )
        return table

    def _rate(self, worker: str, *keys: str) -> float:
        """How much was added in a second, since the last look."""
        now, before = self.now[worker], self._before.get(worker)
        if before is None:
            return 0.0
        return float(sum(now[key] - before[key] for key in keys)) / self._seconds
