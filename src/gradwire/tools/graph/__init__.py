"""The graph that a context has recorded, over all workers: as data, and as a picture."""

from .capture import Graph, Node, Piece, capture

__all__ = ["Graph", "Node", "Piece", "capture"]
