"""The ratios as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt

from .ways import BASE

_COLOURS = {
    "gradwire": "#1f5fbf",
    "gradwire, TCP": "#8db4ec",
    "gradwire, TLS": "#5fa88d",
    "torch, huge pages": "#b8b8b8",
    "Ray": "#e08a3c",
    "Monarch": "#7a55a8",
}


def draw(summary: dict[str, Any], path: Path) -> None:
    """How many times as fast as torch RPC each way is, for each task."""
    tasks = list(summary)
    ways = [way for way in summary[tasks[0]] if way != BASE]
    height = 0.8 / len(ways)
    figure, axes = plt.subplots(figsize=(9, 1.2 + 0.12 * len(ways) * len(tasks)))
    for number, way in enumerate(ways):
        found = [(i, summary[task][way]) for i, task in enumerate(tasks)]
        rows = [(i, row["ratio"]) for i, row in found if row is not None]
        axes.barh(
            [i + (number + 0.5) * height - 0.4 for i, _ in rows],
            [ratio - 1 for _, ratio in rows],
            height * 0.9,
            left=1,
            color=_COLOURS.get(way),  # variants take the next of matplotlib
            label=way,
        )
    axes.set_xscale("log")
    ticks = [0.1, 0.2, 0.5, 1, 2, 5, 10, 20]
    axes.set_xticks(ticks, [f"×{tick:g}" for tick in ticks], minor=False)
    axes.minorticks_off()
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(range(len(tasks)), tasks)
    axes.set_ylim(len(tasks) - 0.4, -0.6)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.set_title("times as fast as torch RPC (the line), in the same run")
    axes.legend(frameon=False, loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)
