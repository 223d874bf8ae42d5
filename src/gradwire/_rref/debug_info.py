"""What `gw.rpc.debug_info()` and warnings say about references."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .held_forks import HeldForks
from .ledger import Holding
from .messages import spell
from .owned_values import OwnedValues

_MOST_NAMED = 10

Name = Callable[[int], str]


def describe_held(held: Mapping[Holding, str], name: Name) -> str:
    """The first of these references, and where they were created."""
    known = sorted(held.items())
    first = [
        f"value {spell(h.value)} of {name(h.owner)!r}, {_origin(made_at)}"
        for h, made_at in known[:_MOST_NAMED]
    ]
    more = f" and {len(known) - len(first)} more" if known[_MOST_NAMED:] else ""
    return "; ".join(first) + more


def _origin(made_at: str) -> str:
    """A line of a program, or where it was received."""
    return made_at if made_at.startswith("received") else f"made at {made_at}"


def debug_info(
    owned_values: OwnedValues, held_forks: HeldForks, name: Name
) -> dict[str, Any]:
    """Values owned and their holders, references held, and references in transit."""
    owned = owned_values.info()
    for value in owned:
        value["holders"] = sorted({name(h) for h in value["forks"].values()})
    held = [
        {"value": spell(h.value), "owner": name(h.owner), "made_at": made_at}
        for h, made_at in sorted(held_forks.holdings().items())
    ]
    on_their_way = [
        {
            "value": spell(t.child.value),
            "owner": name(t.child.owner),
            "to": name(t.to),
        }
        for t in held_forks.transits()
    ]
    return {"owned": owned, "held": held, "on_their_way": on_their_way}
