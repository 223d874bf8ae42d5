"""The graph of a context, gathered from all workers.

Each worker has a *piece*: the nodes that lie behind its sends and behind the roots. Pieces hang
together by crossings: what a send on one worker is to a recv on another.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Parameter

from ..._autograd.nodes import LEAF_NODE, RECV_NODE, SEND_NODE, TOKEN
from ...api import current_worker
from ...errors import GradwireError

OP, LEAF, SEND, RECV = "op", "leaf", "send", "recv"


class Node(NamedTuple):
    """A node of one worker's graph."""

    name: str
    """What torch calls it, without the ending that all have."""
    kind: str
    """`op`, `leaf`, `send` or `recv`."""
    note: str = ""
    """The shape of a leaf; how many tensors cross."""
    crossing: int = 0
    """What a send and its recv have in common; 0 for other nodes."""


@dataclass(slots=True)
class Piece:
    """One worker's nodes, and the edges between them: from what is used to what uses it."""

    worker: str
    nodes: list[Node] = field(default_factory=list)
    edges: list[tuple[int, int]] = field(default_factory=list)


Place = tuple[int, int]
"""A piece and a node in it, by number."""


@dataclass(slots=True)
class Graph:
    """The pieces of all workers that took part, and the crossings between them."""

    pieces: list[Piece]

    def edges(self) -> list[tuple[Place, Place]]:
        """The edges within workers."""
        return [
            ((number, one), (number, other))
            for number, piece in enumerate(self.pieces)
            for one, other in piece.edges
        ]

    def crossings(self) -> list[tuple[Place, Place]]:
        """From each send to its recv."""
        sends, recvs = self._ends(SEND), self._ends(RECV)
        return [(sends[number], recvs[number]) for number in sends if number in recvs]

    def _ends(self, kind: str) -> dict[int, Place]:
        return {
            node.crossing: (number, index)
            for number, piece in enumerate(self.pieces)
            for index, node in enumerate(piece.nodes)
            if node.kind == kind
        }


def capture(context_id: int, roots: Sequence[Tensor] = ()) -> Graph:
    """What a context has recorded on all workers, and the graph behind `roots` on this one.

    Raises:
        GradwireError: there is no such context, or a worker is lost.

    >>> w = torch.ones(2, requires_grad=True)
    >>> with gw.context() as ctx:
    ...     y = gw.rpc_sync("worker1", torch.exp, args=(w,))
    ...     graph = capture(ctx, [y.sum()])
    >>> [(piece.worker, len(piece.nodes)) for piece in graph.pieces]
    [('worker0', 4), ('worker1', 3)]
    >>> len(graph.crossings())
    2
    """
    worker = current_worker()
    worker.autograd.contexts.get(context_id)
    own = _piece(context_id, roots)
    with worker.autograd.contexts.entered(None):  # looking is not part of it
        calls = [
            worker.rpc_async(info, _piece, args=(context_id,))
            for info in worker.get_worker_infos()
            if info.id != worker.id
        ]
        pieces = [own, *(call.wait() for call in calls)]
    return Graph([piece for piece in pieces if piece.nodes])


def _piece(context_id: int, roots: Sequence[Tensor] = ()) -> Piece:
    worker = current_worker()
    piece = Piece(worker.name)
    try:
        context = worker.autograd.contexts.get(context_id)
    except GradwireError:
        return piece  # it took no part
    with context.lock:
        sends = [send.node for send in context.sends.values()]
    _walk(piece, [root.grad_fn for root in roots] + sends)
    return piece


def _walk(piece: Piece, sources: Iterable[Any]) -> None:
    numbers: dict[Any, int] = {}
    stack: list[tuple[Any, Any]] = [(source, None) for source in sources]
    while stack:
        node, user = stack.pop()
        if node is None or node is TOKEN.node:
            continue
        is_new = node not in numbers
        if is_new:
            numbers[node] = len(piece.nodes)
            piece.nodes.append(_describe(node))
        if user is not None:
            piece.edges.append((numbers[node], numbers[user]))
        if is_new:
            stack += [(used, node) for used, _ in node.next_functions]


def _describe(node: Any) -> Node:
    if type(node) in (SEND_NODE, RECV_NODE):
        kind = SEND if type(node) is SEND_NODE else RECV
        count = node.crossing.count
        note = f"{count} tensor{'s' if count > 1 else ''}"
        return Node(kind, kind, note, node.crossing.id)
    leaf_node: Any = LEAF_NODE  # so that mypy does not take its members for known
    if type(node) is leaf_node:
        leaf = node.variable
        shape = "×".join(map(str, leaf.shape)) or "scalar"
        name = "parameter" if isinstance(leaf, Parameter) else "leaf"
        return Node(name, LEAF, shape)
    return Node(node.name().rpartition("Backward")[0] or node.name(), OP)
