"""Whether the workers and devices in a worker's device maps exist, checked when it joins.

Its own devices are checked here; the target devices by the workers that have them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from .._transport.base import Card
from .agent import Agent
from .messages import DEVICES, Devices


def serve(agent: Agent) -> None:
    """Answer other workers."""
    agent.handle(DEVICES, Devices, lambda _, message: _missing(message.names))


def check_here(card: Card, others: Sequence[Card], *, is_elastic: bool) -> None:
    """Check that the maps' workers exist, unless they may join later, and this worker's devices.

    Raises:
        ValueError: one does not; in torch's words, and names it.
    """
    names = {other.name for other in others}
    strangers = sorted(card.device_maps.keys() - names)
    if strangers and not is_elastic:
        raise ValueError(
            f"Node {card.name} has invalid target node names in its device maps: "
            f"{strangers}; there are {sorted(names)}"
        )
    for worker, pairs in card.device_maps.items():
        _refuse(card, worker, "source", _missing(pairs))


def check_there(agent: Agent, timeout: float) -> None:
    """Check that the target devices exist, on the workers that have joined.

    Raises:
        ValueError: one does not; in torch's words, and names it.
    """
    there = {card.name: card.id for card in agent.members.cards()}
    for worker, pairs in agent.me.device_maps.items():
        if worker in there:
            question = Devices(tuple(pairs.values()))
            missing = agent.ask(there[worker], question, timeout)
            _refuse(agent.me, worker, "target", missing)


def _missing(names: Iterable[str]) -> dict[str, str]:
    """Those of these devices that are not here, and why."""
    found: dict[str, str] = {}
    for name in names:
        try:
            torch.empty(0, device=name)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            found[name] = str(error).partition(". ")[0]  # torch's message is long
    return found


def _refuse(card: Card, worker: str, side: str, missing: dict[str, str]) -> None:
    if missing:
        raise ValueError(
            f"Node {card.name} has {side} devices with invalid indices in its device map "
            f"for {worker}: {missing}"
        )
