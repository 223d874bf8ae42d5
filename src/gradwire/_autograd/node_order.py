"""The sequence numbers by which torch's engine chooses the next of the nodes that are ready.

It takes the highest. `Node._sequence_nr` and `_set_sequence_nr` have existed since torch 2.3, but
are not documented; without them, sends that wait could be entered too early, and passes with
residual paths could deadlock (`segments.py`).
"""

from __future__ import annotations

from typing import Any


def number(node: Any) -> int:
    """The sequence number of a node: higher ones run first."""
    found: int = node._sequence_nr()
    return found


def set_number(node: Any, to: int) -> None:
    """Set a node's sequence number."""
    node._set_sequence_nr(to)
