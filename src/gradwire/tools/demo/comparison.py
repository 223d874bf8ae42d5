"""Both trainings, one after the other, and what they have in common."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from ..graph import Graph
from ..graph.picture import draw as draw_graph
from .data import load
from .picture import draw
from .screen import Screen, Traffic
from .train import LIMIT, Curve, train_here, train_spread
from .world import SIZE, world


def compare(epochs: int, folder: Path) -> int:
    """Train twice, compare and draw into a folder; 0 if both runs agree."""
    folder.mkdir(parents=True, exist_ok=True)
    console = Console(soft_wrap=True, highlight=False)
    spread, recorded = _train_spread(console, epochs)
    alone = _train_here(console, epochs)
    difference = _compare(console, spread, alone)
    pictures = folder / "demo-loss.png", folder / "demo-graph.png"
    draw(spread, alone, pictures[0])
    draw_graph(recorded, pictures[1], "one step, forward: the backward pass goes back")
    console.print(f"\nloss curves:      {pictures[0]}\ngraph of a step:  {pictures[1]}")
    return 0 if difference < LIMIT else 1


def _train_spread(console: Console, epochs: int) -> tuple[Curve, Graph]:
    console.print(f"starting {SIZE} workers, each a process of its own")
    with world():
        traffic = Traffic()
        with Screen(console, "four workers", epochs=epochs) as screen:

            def on_step(curve: Curve) -> None:
                screen.on_step(curve)
                if traffic.is_due():
                    traffic.look()
                    screen.show_below(traffic.table())

            found = train_spread(*load(), epochs, on_step)
        if not console.is_terminal:
            traffic.look()
            console.print(traffic.table())
    return found


def _train_here(console: Console, epochs: int) -> Curve:
    console.print("\nthe same in one process")
    with Screen(console, "one process", epochs=epochs) as screen:
        return train_here(*load(), epochs, screen.on_step)


def _compare(console: Console, spread: Curve, alone: Curve) -> float:
    """Show both curves; the largest difference between them."""
    table = Table(title="\nloss", title_justify="left", box=None)
    for column in ("epoch", "four workers", "one process", "difference"):
        table.add_column(column, justify="right")
    rows = zip(spread.epoch_losses, alone.epoch_losses, strict=True)
    for epoch, (one, other) in enumerate(rows, 1):
        table.add_row(
            str(epoch), f"{one:.7f}", f"{other:.7f}", f"{abs(one - other):.1e}"
        )
    console.print(table)
    pairs = zip(spread.losses, alone.losses, strict=True)
    difference = max(abs(one - other) for one, other in pairs)
    verdict = "below" if difference < LIMIT else "[red]not below[/red]"
    console.print(
        f"\nlargest difference of a step's loss: {difference:.1e}, {verdict} {LIMIT:.0e}"
    )
    for name, curve in (("four workers", spread), ("one process", alone)):
        console.print(
            f"{name}: {curve.seconds:.1f} s, {curve.accuracy:.1%} of new digits right"
        )
    return difference
