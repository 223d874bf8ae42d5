"""What runs on workers of a Ray cluster: found there by name."""

from __future__ import annotations

import os

import ray
import torch
from ray.experimental.internal_kv import _internal_kv_list
from torch import nn

import gradwire as gw

_restored: list[str] = []


def local_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


class Part(nn.Module):
    """One layer of the model."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.layer = local_model()[index]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x)
        return found


def gradients(part: gw.RRef[Part], ctx: int) -> list[torch.Tensor]:
    known = gw.get_gradients(ctx)
    return [known[parameter] for parameter in part.local_value().parameters()]


def differ_from_local(first: str, second: str) -> float:
    """How far the gradients of a model on two workers are from those of one process."""
    model, x = local_model(), torch.ones(5, 3)
    model(x).square().sum().backward()
    apart = 0.0
    parts = [gw.remote(on, Part, (2 * i,)) for i, on in enumerate((first, second))]
    with gw.context() as ctx:
        hidden = torch.tanh(parts[0].rpc_sync().forward(x))
        loss = parts[1].rpc_sync().forward(hidden).square().sum()
        gw.backward(ctx, [loss])
        for index, part in enumerate(parts):
            found = gw.rpc_sync(part.owner(), gradients, (part, ctx))
            for mine, local in zip(found, model[2 * index].parameters(), strict=True):
                assert local.grad is not None
                apart = max(apart, (mine - local.grad).abs().max().item())
    return apart


@gw.idempotent
def process() -> int:
    return os.getpid()


@gw.idempotent
def node() -> str:
    found: str = ray.get_runtime_context().get_node_id()
    return found


def note_restart(name: str) -> None:
    _restored.append(name)


@gw.idempotent
def restored() -> list[str]:
    return _restored


_calls: list[torch.futures.Future[int]] = []


def call(worker: str) -> None:
    """Start a call, which may never end."""
    _calls.append(gw.rpc_async(worker, process, timeout=0))


def why_the_call_failed() -> str:
    try:
        return f"it did not: {_calls.pop().wait()}"
    except gw.WorkerLostError as error:
        return str(error)


@ray.remote(num_cpus=0)
class Learner:
    """An actor of the user's own."""

    def __init__(self, world: str, name: str) -> None:
        self.worker = gw.ray.join(world, name=name)

    def ready(self) -> int:
        return self.worker.id

    def leave(self) -> None:
        self.worker.shutdown()


def left_behind() -> list[str]:
    """Our named actors, keys in Ray's table, and placement groups, that are still there."""
    every = ray.util.list_named_actors(all_namespaces=True)  # Ray Train leaves its own
    named = [actor for actor in every if actor["namespace"] == "gradwire"]
    groups = ray.util.placement_group_table().values()
    states = {group["state"] for group in groups} - {"REMOVED"}
    keys = [key.decode() for key in _internal_kv_list("gradwire/")]
    return [actor["name"] for actor in named] + keys + sorted(states)
