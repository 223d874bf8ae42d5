"""A driver on a small cluster of its own; prints what happened, for `test_on_ray.py`."""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import ray
import torch
from ray.util.placement_group import placement_group, remove_placement_group

import gradwire as gw
from tests.ray import functions as on

said: dict[str, Any] = {}


def a_world() -> None:
    with gw.ray.World(2, max_restarts=1, on_restart=on.note_restart) as world:
        said["made twice"] = refusal(gw.ray.World(1, name=world.name))
        said["entered twice"] = refusal(world)
        said["world"] = [info.name for info in gw.get_worker_infos()]
        said["apart"] = on.differ_from_local("worker0", "worker1")
        before = gw.rpc_sync("worker1", on.process)
        os.kill(before, signal.SIGKILL)
        said["is another"] = gw.rpc_sync("worker1", on.process, retries=3) != before
        said["apart again"] = on.differ_from_local("worker0", "worker1")
        said["restored"] = [
            gw.rpc_sync(name, on.restored) for name in ("worker0", "worker1")
        ]


def actors_that_join() -> None:
    learner = on.Learner.remote("class", "learner")
    ray.get(learner.ready.remote())
    said["made over it"] = refusal(gw.ray.World(1, name="class"))
    with gw.ray.join("class", name="teacher"):
        found = gw.rpc_sync("learner", torch.add, (torch.ones(2), 1))
        said["learner"] = found.tolist()
        ray.get(learner.leave.remote())
    gw.ray.join("class-b", name="teacher").shutdown()
    gw.ray.end("class")
    gw.ray.end("class-b")  # the end of the other was not its own
    ray.kill(learner)


def worlds_that_do_not_fit() -> None:
    group = placement_group([{"CPU": 1}])
    for world in (
        gw.ray.World(2, placement_group=group, join_timeout=1),
        gw.ray.World(2, resources={"CPU": 50}, join_timeout=1),
        gw.ray.World(2, resources={}),
        gw.ray.World(2, name="a/b"),
    ):
        said.setdefault("do not fit", []).append(refusal(world))
    remove_placement_group(group)


def refusal(world: gw.ray.World) -> str:
    """Why it cannot be entered."""
    try:
        with world:
            return ""
    except (ValueError, gw.GradwireError) as error:
        return str(error)


if __name__ == "__main__":
    # "local": a new cluster, even if one runs on this machine.
    ray.init("local", num_cpus=3, include_dashboard=False, logging_level="ERROR")
    a_world()
    actors_that_join()
    worlds_that_do_not_fit()
    said["left"] = on.left_behind()
    sys.stdout.write(json.dumps(said) + "\n")
