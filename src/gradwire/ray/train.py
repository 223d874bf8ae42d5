"""Ray Train: `gw.init_rpc()` without arguments makes a world of the workers of a `TorchTrainer`."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

import ray
from ray.train.backend import Backend
from ray.train.torch import TorchConfig

from ..api import set_place
from .directory import NAMESPACE, RayStore, new_directory


@dataclass
class GradwireConfig(TorchConfig):  # type: ignore[misc]
    """Torch's process group, as usual, and a world for `gw.init_rpc()`.

        TorchTrainer(train, torch_config=gw.ray.GradwireConfig(), scaling_config=...)

    Each time Ray Train restarts the workers, they form a new world.
    """

    @property
    def backend_cls(self) -> type[Backend]:
        return GradwireBackend

    def torch_backend(self) -> Backend:
        """What sets up torch's process group."""
        return super().backend_cls()


class GradwireBackend(Backend):  # type: ignore[misc]
    """What Ray Train calls around the training."""

    share_cuda_visible_devices = True

    def __init__(self) -> None:
        self._directory: Any = None

    def on_start(self, worker_group: Any, backend_config: GradwireConfig) -> None:
        backend_config.torch_backend().on_start(worker_group, backend_config)
        self._forget()
        world = f"train-{uuid.uuid4().hex}"
        self._directory = new_directory(world, detached=False)
        size = len(worker_group)
        for rank in range(size):
            worker_group.execute_single(rank, _enter, f"gradwire-{world}", rank, size)

    def on_training_start(
        self, worker_group: Any, backend_config: GradwireConfig
    ) -> None:
        backend_config.torch_backend().on_training_start(worker_group, backend_config)

    def on_shutdown(self, worker_group: Any, backend_config: GradwireConfig) -> None:
        backend_config.torch_backend().on_shutdown(worker_group, backend_config)
        self._forget()

    def _forget(self) -> None:
        if self._directory is not None:
            ray.kill(self._directory)
            self._directory = None


def _enter(name: str, rank: int, size: int) -> None:
    """Run on each worker: sets where `init_rpc` joins there."""
    actor = ray.get_actor(name, namespace=NAMESPACE)
    set_place(
        store=RayStore(actor),
        rank=rank,
        world_size=size,
        key=ray.get(actor.secret.remote()),
        bind=ray.util.get_node_ip_address(),
    )
