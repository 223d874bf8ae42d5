"""A graph as a picture, with the workers as lanes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from .capture import LEAF, OP, RECV, SEND, Graph, Place
from .layout import Layout, arrange

_FILL = {OP: "#ffffff", LEAF: "#e8f0dc", SEND: "#fbe3cd", RECV: "#d9e6fb"}
_LINE = {OP: "#777777", LEAF: "#7c9a52", SEND: "#d07a28", RECV: "#3569b8"}
_LANES = ("#f4f5f7", "#fbfbfc")
_CROSSING = "#c2410c"
_COLUMN, _ROW = 0.92, 0.6  # inches
_MARGIN = 0.9


def draw(graph: Graph, path: str | Path, title: str = "") -> None:
    """Write a PNG: forward goes to the right, crossings between workers are coloured.

    It needs matplotlib (`pip install 'gradwire[demo]'`).

        draw(capture(ctx, [loss]), "graph.png")
    """
    layout = arrange(graph)
    size = layout.width * _COLUMN + _MARGIN, layout.height * _ROW + 0.7
    figure = Figure(figsize=size, dpi=130)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_axis_off()
    axes.set_xlim(-_MARGIN / _COLUMN - 0.5, layout.width - 0.5)
    axes.set_ylim(layout.height - 0.4, -1.1)
    _draw_lanes(axes, graph, layout)
    for one, other in graph.edges():
        _arrow(axes, layout, one, other, color="#9a9a9a", linewidth=0.8)
    for one, other in graph.crossings():
        _arrow(axes, layout, one, other, color=_CROSSING, linewidth=1.6)
    for number, piece in enumerate(graph.pieces):
        for index, node in enumerate(piece.nodes):
            _box(axes, layout, (number, index), node.kind, _label(node.name, node.note))
    axes.text(-_MARGIN / _COLUMN - 0.4, -0.75, title, fontsize=11, weight="bold")
    figure.savefig(path)


def _draw_lanes(axes: Any, graph: Graph, layout: Layout) -> None:
    top = -0.5
    for number, piece in enumerate(graph.pieces):
        bottom = top + layout.lanes[number]
        axes.axhspan(top, bottom, color=_LANES[number % 2], zorder=0)
        axes.text(
            -_MARGIN / _COLUMN - 0.4,
            (top + bottom) / 2,
            piece.worker,
            weight="bold",
            fontsize=10,
            va="center",
        )
        top = bottom


def _box(axes: Any, layout: Layout, place: Place, kind: str, label: str) -> None:
    axes.text(
        layout.columns[place],
        layout.rows[place],
        label,
        fontsize=6.5,
        ha="center",
        va="center",
        zorder=3,
        bbox={
            "boxstyle": "round,pad=0.35",
            "facecolor": _FILL[kind],
            "edgecolor": _LINE[kind],
            "linewidth": 0.9,
        },
    )


def _arrow(axes: Any, layout: Layout, one: Place, other: Place, **style: Any) -> None:
    axes.annotate(
        "",
        (layout.columns[other], layout.rows[other]),
        (layout.columns[one], layout.rows[one]),
        zorder=1,
        arrowprops={
            "arrowstyle": "-|>",
            "connectionstyle": "arc3,rad=0.08",
            "shrinkA": 14,
            "shrinkB": 14,
            **style,
        },
    )


def _label(name: str, note: str) -> str:
    return f"{name}\n{note}" if note else name
