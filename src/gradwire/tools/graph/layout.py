"""Where the nodes of a graph are drawn. Pure.

Workers are lanes, one below the other; time goes to the right: a node stands one column behind the
last one that it needs, on any worker. Parameters, and what is made of them alone, stand just before
what uses them. Nodes of one lane and column are put below each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from graphlib import TopologicalSorter

from .capture import LEAF, RECV, Graph, Place


@dataclass(slots=True)
class Layout:
    """Columns and rows of all nodes, and the rows of each lane."""

    columns: dict[Place, int] = field(default_factory=dict)
    rows: dict[Place, int] = field(default_factory=dict)
    lanes: list[int] = field(default_factory=list)
    """How many rows each lane has."""

    @property
    def width(self) -> int:
        return 1 + max(self.columns.values(), default=0)

    @property
    def height(self) -> int:
        return sum(self.lanes)


def arrange(graph: Graph) -> Layout:
    """The places of all nodes."""
    needs = _needs(graph)
    order = list(TopologicalSorter(needs).static_order())
    constant = _constant(graph, needs, order)
    layout = Layout(_columns(needs, order, constant))
    far_end = dict([*graph.crossings(), *((b, a) for a, b in graph.crossings())])
    for number, piece in enumerate(graph.pieces):
        lane = [(number, index) for index in range(len(piece.nodes))]
        # Activations above parameters; what goes to a lane further down goes further down.
        lane.sort(key=lambda p: (p in constant, far_end.get(p, p), p))
        taken: dict[int, int] = defaultdict(int)
        for place in lane:
            column = layout.columns[place]
            layout.rows[place] = layout.height + taken[column]
            taken[column] += 1
        layout.lanes.append(max(taken.values(), default=0))
    return layout


def _needs(graph: Graph) -> dict[Place, set[Place]]:
    needs: dict[Place, set[Place]] = {
        (number, index): set()
        for number, piece in enumerate(graph.pieces)
        for index in range(len(piece.nodes))
    }
    for one, other in [*graph.edges(), *graph.crossings()]:
        needs[other].add(one)
    return needs


def _constant(
    graph: Graph, needs: Mapping[Place, set[Place]], order: list[Place]
) -> set[Place]:
    """Leaves, and what is made of one alone, such as a transposed weight."""
    found: set[Place] = set()
    for place in order:
        kind = graph.pieces[place[0]].nodes[place[1]].kind
        from_one = len(needs[place]) == 1 and needs[place] <= found
        if kind == LEAF or (from_one and kind != RECV):
            found.add(place)
    return found


def _columns(
    needs: Mapping[Place, set[Place]], order: list[Place], constant: set[Place]
) -> dict[Place, int]:
    columns: dict[Place, int] = {}
    users: dict[Place, list[Place]] = defaultdict(list)
    for place in order:
        columns[place] = 1 + max((columns[one] for one in needs[place]), default=-1)
        for one in needs[place]:
            users[one].append(place)
    for place in reversed(order):
        if place in constant and users[place]:
            columns[place] = min(columns[user] for user in users[place]) - 1
    return columns
