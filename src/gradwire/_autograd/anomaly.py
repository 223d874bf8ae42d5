"""Anomaly mode in a pass: an error names the line of the forward pass that it comes from.

While anomaly mode is on, torch stores with each node the line that created it, and prints it as a
warning when the node fails: here that would be on whichever worker the node is. So the nodes of a
run are recorded as they are entered, and what is known of the last one travels with the error.

The mode itself travels with calls, by `_rpc/torch_modes.py`, and with a pass, in its flags.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .._rpc.torch_modes import anomaly_mode
from .hooks import add_own
from .messages import ANOMALY, CHECK_NAN
from .nodes import LEAF_NODE, RECV_NODE, Run, here

_OURS = str(Path(__file__).parents[1])


def flags() -> int:
    """The mode of this process, as flags of a pass."""
    if not torch.is_anomaly_enabled():
        return 0
    return ANOMALY | CHECK_NAN * torch.is_anomaly_check_nan_enabled()


@contextmanager
def explained(sources: Iterable[Any], run: Run, flags: int) -> Iterator[None]:
    """Run what these nodes reach in anomaly mode; an error gets a note of its origin."""
    entered: dict[int, Any] = {}

    def enter(node: Any, _: Any) -> None:
        if not here.runs or here.runs[-1] is run:  # a device's thread has none
            entered.pop(threading.get_ident(), None)
            entered[threading.get_ident()] = node  # the last of them is the latest

    handles = [add_own(node, partial(enter, node)) for node in _reached(sources)]
    try:
        with anomaly_mode(check_nan=bool(flags & CHECK_NAN)):
            yield
    except Exception as error:
        if node := _failed(entered, error):
            notes = [*getattr(error, "__notes__", ()), _forward(node)]
            error.__notes__ = notes  # type: ignore[attr-defined] # `add_note` came with 3.11
        raise
    finally:
        for handle in handles:
            handle.remove()


def _reached(sources: Iterable[Any]) -> list[Any]:
    """The nodes of a graph, except leaves."""
    found: dict[Any, None] = {}
    stack = list(sources)
    while stack:
        node = stack.pop()
        if node is not None and node not in found and type(node) is not LEAF_NODE:
            found[node] = None
            if type(node) is not RECV_NODE:
                stack += [following for following, _ in node.next_functions]
    return list(found)


def _failed(entered: dict[int, Any], error: Exception) -> Any:
    """The node that failed: among those being run, the one that the error names, or the latest."""
    nodes = list(entered.values())
    named = [node for node in nodes if f"'{node.name()}'" in str(error)]
    return (named or nodes or [None])[-1]


def _forward(node: Any) -> str:
    """Where a node was created; if in a backward, also where the node that created it was."""
    text = f"{node.name()} was made in the forward here:\n{_lines(node)}"
    parent = node.metadata.get("parent_")
    if parent is not None:
        text += f"\nwhich is a backward; {_forward(parent)}"
    return text


def _lines(node: Any) -> str:
    lines: list[str] = node.metadata.get("traceback_", [])
    if not lines:
        return "  (not known: anomaly mode was not on there)"
    ours = [i for i, line in enumerate(lines) if f'File "{_OURS}' in line]
    users = lines[ours[-1] + 1 :] if ours else lines  # run by a call to this worker
    return "".join(users or lines).rstrip()
