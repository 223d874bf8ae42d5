"""Joining a world by its name, from whatever runs on a Ray cluster: an actor, a task, a driver."""

from __future__ import annotations

import pickle
from typing import Any

import ray
from ray.util.placement_group import remove_placement_group

from ..api import init_rpc
from ..worker import Worker
from .directory import GROUP, NAMESPACE, RayStore, directory, member_name


def join(world: str, name: str, **options: Any) -> Worker:
    """Join the world of this name as worker `name`, and make that the current one of this process.

    The first to join creates the world; it lives until `end`, or as long as the cluster. An actor
    restarted by Ray comes back under its name. Further keywords are fields of `Options`.
    """
    return join_at(directory(world), name, options)


def join_at(actor: Any, name: str, options: dict[str, Any]) -> Worker:
    """Join the world of a directory."""
    given = {
        "key": ray.get(actor.secret.remote()),
        "bind": ray.util.get_node_ip_address(),
        **options,
    }
    return init_rpc(name, store=RayStore(actor), **given)


def end(world: str) -> None:
    """End a world. Those that joined it on their own lose its workers, but keep running.

    Raises:
        ValueError: there is no such world.
    """
    table = ray.get_actor(f"gradwire-{world}", namespace=NAMESPACE)
    prefix = member_name(world, "")
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["namespace"] == NAMESPACE and actor["name"].startswith(prefix):
            ray.kill(ray.get_actor(actor["name"], namespace=NAMESPACE))
    group = ray.get(table.get.remote(GROUP))
    ray.get(table.forget.remote())
    ray.kill(table)
    if group is not None:
        remove_placement_group(pickle.loads(group))
