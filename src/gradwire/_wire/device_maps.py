"""The device on which a tensor arrives, given the one that it leaves.

A worker can have a device map for another one: pairs of a device of its own and one there. Its
requests follow that map, and the responses to them follow its inverse. A call can have a map of its
own, which takes the place of the worker's and travels with it. Tensors on a device that is
not in the map cannot be sent, except that the CPU maps to the CPU. Without a map, a tensor
arrives on the device of the same name if the other worker has it, else on its current one, else on
its CPU; a device that a map names has to be there.

Gradients return to where their tensors came from: for a request of the other worker by the inverse
of its map, or for the response to a request from here by this worker's map.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..errors import GradwireError

Names = Mapping[str, str]
"""A device map. Of the devices of another worker, this one may know nothing but the name."""


def are_names(maps: Any) -> bool:
    """Whether these are valid device maps by worker, as received from another one."""
    return type(maps) is dict and all(map(is_map, maps.values()))


def is_map(pairs: Any) -> bool:
    """Whether this is a valid device map, as received from another worker."""
    return type(pairs) is dict and all(
        type(name) is str for pair in pairs.items() for name in pair
    )


def names_of(given: Mapping[str, Mapping[Any, Any]]) -> dict[str, dict[str, str]]:
    """A user's device maps, by worker, as names; devices may be strings, objects or indices.

    Raises:
        ValueError: two devices map to the same one, torch knows none of that name, or its index is
            missing; names the entry.
    """
    found: dict[str, dict[str, str]] = {}
    for worker, pairs in given.items():
        found[worker] = names_in(pairs, f"device_maps[{worker!r}]")
    return found


def names_in(pairs: Mapping[Any, Any], what: str = "device_map") -> dict[str, str]:
    """One device map of a user's as names; `what` errors call it.

    Raises:
        ValueError: as `names_of`.
    """
    try:
        names = {_name(here): _name(there) for here, there in pairs.items()}
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{what}: {error}") from None
    if len(set(names.values())) < len(pairs):
        raise ValueError(f"{what} must be one to one, but it is {names}")
    return names


def _name(given: Any) -> str:
    device = torch.device(given)
    if device.type == "cpu":
        return "cpu"
    if device.index is None:
        raise ValueError(f"which {device.type} device? Give '{device.type}:0'")
    return str(device)


class UnlistedError(ValueError):
    """A tensor of a device was to be sent along a map that does not have it."""

    def __init__(self, where: str) -> None:
        super().__init__(f"a tensor is {where}")
        self.where = where


class Place(NamedTuple):
    """Where a tensor arrives."""

    device: str
    is_mapped: bool
    """A map says so: it is an error if there is no such device. Else another one will do."""


def place(device: torch.device, devices: DeviceMap | None) -> Place:
    """Where a tensor of this device arrives; raises what `DeviceMap.target` does."""
    here = str(device)
    if devices is None:
        return Place(here, False)
    return Place(devices.target(device), devices.is_whole and here in devices.pairs)


class NoMapError(GradwireError):
    """A tensor on a device cannot be sent: torch requires a device map, and there is none."""


@dataclass(frozen=True, slots=True)
class DeviceMap:
    """Where the tensors of messages to one worker arrive."""

    pairs: Names
    name: str
    """What errors call it."""
    is_whole: bool = True
    """Whether only what it lists may be left."""
    missing: str = ""
    """What to say of a tensor of a device, if there is no map and there has to be one."""

    @property
    def moves_cpu(self) -> bool:
        """Whether plain CPU tensors are mapped elsewhere."""
        return self.pairs.get("cpu", "cpu") != "cpu"

    def target(self, device: torch.device) -> str:
        """Where a tensor of this device arrives.

        Raises:
            UnlistedError: the map does not have it.
            NoMapError: there is no map, and there has to be one.
        """
        here = str(device)
        if self.missing and device.type not in _ANYWHERE:
            raise NoMapError(self.missing)
        if not self.has(device):
            raise UnlistedError(
                f"on {here}, which {self.name} does not list: it is {self.pairs}"
            )
        return self.pairs.get(here, here)

    def has(self, device: torch.device) -> bool:
        """Whether tensors of this device may be sent."""
        is_listed = str(device) in self.pairs or device.type in _ANYWHERE
        return is_listed or not self.is_whole


_ANYWHERE = ("cpu", "meta")  # what every worker has


class DeviceMaps(NamedTuple):
    """The maps for one other worker; None where tensors keep the device of the same name."""

    requests: DeviceMap | None = None
    responses: DeviceMap | None = None
    gradients: DeviceMap | None = None


def between(
    me: str, mine: Names, other: str, theirs: Names, missing: str = ""
) -> DeviceMaps:
    """The maps for messages to another worker, from its map for this one and this one's
    for it.

    `missing`: what to say where there is none; empty: there need not be one.
    """
    back = {there: here for here, there in theirs.items()}
    request = f"the device map of worker {me!r} for {other!r}"
    response = f"the device map of worker {other!r} for {me!r}, backwards,"
    both = {**mine, **back}
    return DeviceMaps(
        DeviceMap(mine, request) if mine else _missing(missing, "Request", other),
        DeviceMap(back, response) if back else _missing(missing, "Response", other),
        DeviceMap(both, "", is_whole=False) if both else None,
    )


def for_call(pairs: Names) -> DeviceMap:
    """The map for the arguments of one call that has its own; an empty one maps nothing."""
    return DeviceMap(pairs, "the device map of the call", is_whole=bool(pairs))


def for_result(pairs: Names) -> DeviceMap:
    """The map for the result of such a call."""
    back = {there: here for here, there in pairs.items()}
    name = "the device map of the call, backwards,"
    return DeviceMap(back, name, is_whole=bool(pairs))


def _missing(text: str, kind: str, other: str) -> DeviceMap | None:
    """The map for where there is none, if there has to be one."""
    if not text:
        return None
    why = f"{kind} device mapping is not available for destination: {other}"
    return DeviceMap({}, "", missing=f"{text} {why}")
