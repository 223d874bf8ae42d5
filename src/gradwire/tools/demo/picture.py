"""The loss curves as a picture."""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from .train import LIMIT, Curve


def draw(spread: Curve, alone: Curve, path: Path) -> None:
    """Write a PNG: both losses by step, and below how far they are apart."""
    figure = Figure(figsize=(8, 5), dpi=130)
    FigureCanvasAgg(figure)
    losses, apart = figure.subplots(
        2, 1, sharex=True, gridspec_kw={"height_ratios": [3, 1]}
    )
    losses.plot(alone.losses, color="#e08a3c", linewidth=4, alpha=0.5)
    losses.plot(spread.losses, color="#1f5fbf", linewidth=1)
    losses.set_yscale("log")
    losses.set_ylabel("loss of a step")
    losses.legend(["one process", "four workers"], frameon=False)
    losses.set_title("handwritten digits: the same training, spread and alone")
    pairs = zip(spread.losses, alone.losses, strict=True)
    differences = [abs(one - other) for one, other in pairs]
    apart.plot(differences, color="#555555", linewidth=1.5)
    apart.set_ylim(0, max(LIMIT, 1.1 * max(differences)))
    apart.set_ylabel("difference")
    apart.set_xlabel("step")
    for axes in (losses, apart):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)
