"""The numbers by which torch's engine decides which of the nodes that are ready it runs next.

It takes the highest. `Node._sequence_nr` and `_set_sequence_nr` have been there since torch 2.3,
but are not documented; without them, messages that are waited for could be entered too early, and
passes with residual paths could deadlock (`segments.py`).
"""

from __future__ import annotations

from typing import Any


def number(node: Any) -> int:
    """The number of a node: higher ones are run first."""
    found: int = node._sequence_nr()
    return found


def set_number(node: Any, to: int) -> None:
    """Have the engine take a node at this place."""
    node._set_sequence_nr(to)
