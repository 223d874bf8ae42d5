"""The graph of a context as data, and where its nodes are drawn."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import gradwire as gw
from gradwire.testing import World
from gradwire.tools.graph import Graph, Node, Piece, capture
from gradwire.tools.graph.layout import arrange
from gradwire.tools.graph.picture import draw


@pytest.fixture
def world() -> Iterator[World]:
    with World(3) as world, world.as_worker(0):
        yield world


def forward_on(worker: str, x: torch.Tensor) -> torch.Tensor:
    return gw.rpc_sync(worker, torch.tanh, args=(x.exp(),)).sin()


def kinds(piece: Piece) -> list[str]:
    return sorted(node.name for node in piece.nodes)


@pytest.mark.usefixtures("world")
def test_every_worker_that_took_part_has_a_piece() -> None:
    weight = torch.nn.Parameter(torch.ones(2, 3))
    with gw.context() as ctx:
        y = gw.rpc_sync("worker1", forward_on, args=("worker2", weight * 2))
        graph = capture(ctx, [y.sum()])
    assert [piece.worker for piece in graph.pieces] == ["worker0", "worker1", "worker2"]
    here, middle, end = graph.pieces
    assert kinds(here) == ["Mul", "Sum", "parameter", "recv", "send"]
    assert kinds(middle) == ["Exp", "Sin", "recv", "recv", "send", "send"]
    assert kinds(end) == ["Tanh", "recv", "send"]
    assert Node("parameter", "leaf", "2×3") in here.nodes


@pytest.mark.usefixtures("world")
def test_crossings_lead_from_a_send_to_its_recv() -> None:
    x = torch.ones(2, requires_grad=True)
    with gw.context() as ctx:
        y = gw.rpc_sync("worker1", torch.add, args=(x, x * 2))
        graph = capture(ctx, [y.sum()])
    ways = set()
    for (one, send), (other, recv) in graph.crossings():
        assert graph.pieces[one].nodes[send].kind == "send"
        assert graph.pieces[other].nodes[recv].kind == "recv"
        ways.add((one, other, graph.pieces[one].nodes[send].note))
    assert ways == {(0, 1, "2 tensors"), (1, 0, "1 tensor")}


@pytest.mark.usefixtures("world")
def test_looking_changes_nothing() -> None:
    x = torch.ones(2, requires_grad=True)
    with gw.context() as ctx:
        y = gw.rpc_sync("worker1", torch.mul, args=(x, 3))
        assert capture(ctx, [y.sum()]) == capture(ctx, [y.sum()])
        gw.backward(ctx, [y.sum()])
        assert gw.get_gradients(ctx)[x].tolist() == [3, 3]


@pytest.mark.usefixtures("world")
def test_an_unknown_context_is_an_error() -> None:
    with pytest.raises(gw.GradwireError, match="context with id: 5"):
        capture(5)


def two_workers() -> Graph:
    """A value goes to another worker, is multiplied by a transposed weight there, and returns."""
    here = Piece("a", [Node("Exp", "op"), Node("send", "send", "", 1)], [(0, 1)])
    here.nodes.append(Node("recv", "recv", "", 2))
    there = Piece(
        "b",
        [
            Node("recv", "recv", "", 1),
            Node("Mm", "op"),
            Node("send", "send", "", 2),
            Node("parameter", "leaf"),
            Node("T", "op"),
        ],
        [(0, 1), (1, 2), (3, 4), (4, 1)],
    )
    return Graph([here, there])


def test_columns_go_on_across_workers() -> None:
    layout = arrange(two_workers())
    path = [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (0, 2)]
    assert [layout.columns[place] for place in path] == list(range(6))
    assert layout.width == 6


def test_parameters_stand_before_what_uses_them_and_below_activations() -> None:
    layout = arrange(two_workers())
    assert [layout.columns[1, 3], layout.columns[1, 4]] == [1, 2]
    assert layout.rows[1, 0] < layout.rows[1, 4]


def test_lanes_do_not_overlap() -> None:
    layout = arrange(two_workers())
    assert layout.lanes == [1, 2]
    rows = [
        {row for (piece, _), row in layout.rows.items() if piece == n} for n in (0, 1)
    ]
    assert rows == [{0}, {1, 2}]


def test_no_two_nodes_are_in_one_place() -> None:
    layout = arrange(two_workers())
    places = [(layout.columns[place], layout.rows[place]) for place in layout.rows]
    assert len(set(places)) == len(places) == 8


def test_a_picture_is_written(tmp_path: Path) -> None:
    draw(two_workers(), tmp_path / "graph.png", "two workers")
    assert (tmp_path / "graph.png").read_bytes().startswith(b"\x89PNG")
