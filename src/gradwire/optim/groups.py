"""Groups of parameters, and which owner has which of them. Pure: no calls, no locks.

A parameter is identified by its index over all groups, as in the state dict of any torch optimizer.
An owner knows only its own, in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch

from .._rref.reference import RRef

Group = dict[str, Any]
"""References under "params", perhaps their names under "param_names", and the settings."""

_NOT_SETTINGS = ("params", "param_names")


@dataclass(slots=True)
class Share:
    """What one owner has of an optimizer."""

    positions: list[int] = field(default_factory=list)
    """The position of each of its parameters."""
    groups: list[int] = field(default_factory=list)
    """The number of each of its groups; those where it has nothing are left out."""
    told: list[dict[str, Any]] = field(default_factory=list)
    """The settings that it knows, for each of its groups."""


def check_group(group: Mapping[str, Any], others: Sequence[Group]) -> Group:
    """A group that is like torch's own, with its references in a list.

    Raises:
        TypeError, ValueError: it is no group, or some reference is in one already.
    """
    if not isinstance(group, Mapping):
        raise TypeError(f"a param group is a dict, not {group!r}")
    if "params" not in group:
        raise ValueError(f'a param group has its references under "params": {group!r}')
    params = group["params"]
    params = [params] if isinstance(params, RRef) else list(params)
    checked = {**group, "params": params}
    if params and all(isinstance(p, tuple) for p in params):
        checked["param_names"], checked["params"] = map(list, zip(*params, strict=True))
    for param in checked["params"]:
        if not isinstance(param, RRef):
            raise TypeError(
                f"{type(param).__name__} instead of a reference to a parameter: give "
                "remote_parameters() of your modules, or RRef(parameter)"
            )
    taken = {id(param) for other in others for param in other["params"]}
    if not taken.isdisjoint(map(id, checked["params"])):
        raise ValueError("some parameters appear in more than one parameter group")
    return checked


def divide(
    groups: Sequence[Group], shares: dict[str, Share], first: int = 0
) -> dict[str, list[Group]]:
    """The groups of each owner, from the group numbered `first` on; notes them in `shares`."""
    parts: dict[str, list[Group]] = {}
    position = sum(len(group["params"]) for group in groups[:first])
    for number, group in enumerate(groups[first:], first):
        settings = settings_of(group)
        for param in group["params"]:
            name = param.owner_name()
            share = shares.setdefault(name, Share())
            if number not in share.groups:
                share.groups.append(number)
                parts.setdefault(name, []).append({**settings, "params": []})
            share.positions.append(position)
            parts[name][-1]["params"].append(param)
            position += 1
    return parts


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _NOT_SETTINGS}


def changes(group: Mapping[str, Any], told: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that differ from those last sent, as an immutable copy."""
    changed = {}
    for key, value in group.items():
        if key in _NOT_SETTINGS or (key in told and _is_same(value, told[key])):
            continue
        is_tensor = isinstance(value, torch.Tensor)
        changed[key] = value.detach().clone() if is_tensor else copy(value)
    return changed


def _is_same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def merge_states(states: Iterable[tuple[Share, Mapping[int, Any]]]) -> dict[int, Any]:
    """The state of all parameters by position, from what each owner has by its own count."""
    merged = {
        share.positions[index]: state
        for share, local in states
        for index, state in local.items()
    }
    return dict(sorted(merged.items()))


def split_state(share: Share, state_dict: Mapping[str, Any]) -> dict[int, Any]:
    """The state of one owner's parameters by its own count, out of a state dict."""
    ids = [number for group in state_dict["param_groups"] for number in group["params"]]
    state = state_dict["state"]
    return {
        index: state[ids[position]]
        for index, position in enumerate(share.positions)
        if ids[position] in state
    }


def check_state(groups: Sequence[Group], state_dict: Mapping[str, Any]) -> None:
    """Check that a state dict fits.

    Raises:
        ValueError: it has other groups.
    """
    saved = [len(group["params"]) for group in state_dict["param_groups"]]
    here = [len(group["params"]) for group in groups]
    if saved != here:
        raise ValueError(
            f"loaded state dict has groups of {saved} parameters, the optimizer has "
            f"groups of {here}"
        )
