"""What a program can set when it joins a world, under torch's names."""

from __future__ import annotations

from typing import Any

import torch

from . import constants

DeviceType = int | str | torch.device
DeviceMap = dict[torch.device, torch.device]


class RpcBackendOptions:
    """The options of all backends: where to meet, and how long a call may take."""

    def __init__(
        self,
        rpc_timeout: float = constants.DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = constants.DEFAULT_INIT_METHOD,
    ) -> None:
        if not isinstance(rpc_timeout, int | float):
            raise TypeError(
                f"{type(self).__name__}(): incompatible constructor arguments: "
                f"rpc_timeout={rpc_timeout!r}, give seconds"
            )
        self.rpc_timeout = float(rpc_timeout)
        self.init_method = init_method

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({settings})"


class TensorPipeRpcBackendOptions(RpcBackendOptions):
    """Those of the usual backend. `_transports` and `_channels` are ignored."""

    def __init__(
        self,
        *,
        num_worker_threads: int = constants.DEFAULT_NUM_WORKER_THREADS,
        rpc_timeout: float = constants.DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = constants.DEFAULT_INIT_METHOD,
        device_maps: dict[str, dict[DeviceType, DeviceType]] | None = None,
        devices: list[DeviceType] | None = None,
        _transports: list[Any] | None = None,
        _channels: list[Any] | None = None,
    ) -> None:
        super().__init__(rpc_timeout, init_method)
        self.num_worker_threads = num_worker_threads
        self.device_maps: dict[str, DeviceMap] = {}
        self.devices: list[torch.device] = []
        for to, device_map in (device_maps or {}).items():
            self.set_device_map(to, device_map)
        self.set_devices(devices or [])

    def set_device_map(self, to: str, device_map: dict[DeviceType, DeviceType]) -> None:
        """Have tensors on a device arrive on another one over there, one for each."""
        merged = dict(self.device_maps.get(to, {}))
        for key, value in device_map.items():
            here, there = torch.device(key), torch.device(value)
            if merged.get(here, there) != there:
                raise ValueError(
                    "`set_device_map` only supports 1-to-1 mapping, trying to map "
                    f"{here} to {there} and {merged[here]}"
                )
            merged[here] = there
        if len(set(merged.values())) < len(merged):
            raise ValueError(
                f"`device_map` only supports 1-to-1 mapping, but got {merged}"
            )
        self.device_maps[to] = merged

    def set_devices(self, devices: list[DeviceType]) -> None:
        """The CUDA devices that calls may use here."""
        found = [torch.device(device) for device in devices]
        for device in found:
            if device.type != "cuda":
                raise ValueError(
                    "`set_devices` expect a list of CUDA devices, but got device type "
                    f"{device.type}."
                )
        self.devices = found
