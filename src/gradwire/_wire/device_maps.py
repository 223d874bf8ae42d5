"""On which device a tensor arrives, by the device that it leaves.

A worker can have a device map for another one: pairs of a device of its own and one over there. Its
requests follow that map, and the responses to them follow it backwards. A device that the map does
not list cannot be left, but for the CPU, which then leads to the CPU. Without a map, a tensor
arrives on the device of the same name.

Gradients go back to where their tensors came from. That was a request of the other worker, whose
map is followed backwards; or else the response to a request from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

Names = Mapping[str, str]
"""A device map. Of the devices of another worker, this one may know nothing but the name."""


def are_names(maps: Any) -> bool:
    """Whether these are device maps by worker, as another one may have sent them."""
    return type(maps) is dict and all(
        type(pairs) is dict
        and all(type(name) is str for pair in pairs.items() for name in pair)
        for pairs in maps.values()
    )


def names_of(given: Mapping[str, Mapping[Any, Any]]) -> dict[str, dict[str, str]]:
    """What a user gave, by worker: devices are texts, objects, or numbers of the accelerator's.

    Raises:
        ValueError: two devices lead to the same one, torch knows none of that name, or which of its
            kind is left open; says which entry that is.
    """
    found: dict[str, dict[str, str]] = {}
    for worker, pairs in given.items():
        try:
            names = {_name(here): _name(there) for here, there in pairs.items()}
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"device_maps[{worker!r}]: {error}") from None
        if len(set(names.values())) < len(pairs):
            raise ValueError(
                f"device_maps[{worker!r}] must be one to one, but it is {names}"
            )
        found[worker] = names
    return found


def _name(given: Any) -> str:
    device = torch.device(given)
    if device.type == "cpu":
        return "cpu"
    if device.index is None:
        raise ValueError(f"which {device.type} device? Give '{device.type}:0'")
    return str(device)


@dataclass(frozen=True, slots=True)
class DeviceMap:
    """Where the tensors of messages to one worker arrive."""

    pairs: Names
    name: str
    """What errors call it."""
    is_whole: bool = True
    """Whether only what it lists may be left."""

    @property
    def moves_cpu(self) -> bool:
        """Whether plain tensors do not stay on the CPU."""
        return self.pairs.get("cpu", "cpu") != "cpu"

    def target(self, device: torch.device) -> str:
        """Where a tensor of this device arrives.

        Raises:
            ValueError: nowhere.
        """
        here = str(device)
        if self.is_whole and here not in self.pairs and device.type not in _ANYWHERE:
            raise ValueError(
                f"a tensor is on {here}, which {self.name} does not list: it is {self.pairs}"
            )
        return self.pairs.get(here, here)


_ANYWHERE = ("cpu", "meta")  # what every worker has


class DeviceMaps(NamedTuple):
    """Those for one other worker; None where tensors stay on the device of the same name."""

    requests: DeviceMap | None = None
    responses: DeviceMap | None = None
    gradients: DeviceMap | None = None


def between(me: str, mine: Names, other: str, theirs: Names) -> DeviceMaps:
    """The maps for messages to another worker, by its map for me and mine for it."""
    back = {there: here for here, there in theirs.items()}
    request = f"the device map of worker {me!r} for {other!r}"
    response = f"the device map of worker {other!r} for {me!r}, backwards,"
    both = {**mine, **back}
    return DeviceMaps(
        DeviceMap(mine, request) if mine else None,
        DeviceMap(back, response) if back else None,
        DeviceMap(both, "", is_whole=False) if both else None,
    )
