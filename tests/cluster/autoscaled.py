"""A driver on a cluster with Ray's own autoscaler, whose nodes are processes. Run by `on_ray.py`.

Nothing here ends the cluster: who runs this ends all of its processes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import ray

import gradwire as gw
from tests.cluster.on_ray import ENVIRONMENT, train
from tests.ray import functions as on
from tests.worlds import wait_until

CLUSTER = {
    "cluster_name": "test",
    "provider": {
        "type": "fake_multinode",
        "disable_node_updaters": True,
        "disable_launch_config_check": True,
        "worker_liveness_check": False,
        "use_node_id_as_ip": True,
    },
    "head_node_type": "ray.head.default",
    "available_node_types": {
        "ray.head.default": {
            "resources": {"CPU": 0},
            "node_config": {},
            "max_workers": 0,
        },
        "other": {
            "resources": {"CPU": 2},
            "node_config": {},
            "min_workers": 0,
            "max_workers": 3,
        },
    },
    "max_workers": 3,
    "upscaling_speed": 1.0,
    "idle_timeout_minutes": 0.2,
    "auth": {},
    "file_mounts": {},
    "cluster_synced_files": [],
    "initialization_commands": [],
    "setup_commands": [],
    "head_setup_commands": [],
    "worker_setup_commands": [],
    "head_start_ray_commands": [],
    "worker_start_ray_commands": [],
}


def nodes() -> int:
    return sum(node["Alive"] for node in ray.nodes())


def main(path: Path) -> None:
    ray.init(address="auto", logging_level="ERROR", runtime_env=ENVIRONMENT)
    assert nodes() == 1
    with gw.ray.World(2, strategy="STRICT_SPREAD", max_restarts=-1) as world:
        assert nodes() == 3  # there was no room for both
        learners = []

        def grow() -> None:
            learner = on.Learner.options(num_cpus=2).remote(world.name, "learner")
            ray.get(learner.ready.remote())
            learners.append(learner)
            assert nodes() == 4
            assert gw.rpc_sync("learner", max, (1, 2)) == 2

        def shrink() -> None:
            ray.get(learners[0].leave.remote())
            ray.kill(learners[0])
            wait_until(lambda: nodes() == 3, show=ray.nodes)

        calm = train(path / "calm", {})
        assert train(path / "stormy", {7: grow, 22: shrink}) == calm
        assert len(learners) == 1
    wait_until(lambda: nodes() == 1, show=ray.nodes)
    assert on.left_behind() == []
    sys.stdout.write("the same\n")


if __name__ == "__main__":
    path = Path(sys.argv[1])
    (path / "cluster.json").write_text(json.dumps(CLUSTER))
    ray_command = [
        sys.executable,
        "-m",
        "ray.scripts.scripts",
    ]  # wherever it is installed
    start = [
        *ray_command,
        "start",
        "--head",
        "--num-cpus=0",
        "--include-dashboard=false",
    ]
    subprocess.run(
        [*start, f"--autoscaling-config={path / 'cluster.json'}"],
        env={
            **os.environ,
            "RAY_FAKE_CLUSTER": "1",
            "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        },
        check=True,
    )
    main(path)
