"""Worlds on a Ray cluster of four nodes, and what becomes of them: `make test-cluster`.

The nodes are processes of this machine, as Ray tests itself. Not collected by `make test`, which
tries one node (tests/ray).
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch import nn

import gradwire as gw
from tests.cluster.machines import what_is_missing
from tests.processes import PATHS
from tests.ray import functions as on
from tests.worlds import wait_until

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # Ray's own, about itself
]

NODES = 4
STEPS = 30
FOUND = f"{os.pathsep.join(map(str, PATHS))}"
ENVIRONMENT = {"env_vars": {"PYTHONPATH": FOUND}}


@pytest.fixture(autouse=True)
def nothing_leaks() -> None:
    """Instead of the check of this process, where Ray's threads stay: see `cluster`."""


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Four nodes with room for two workers each; in the end nothing of ours is left there."""
    settings = {"num_cpus": 2, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=settings)
    for _ in range(NODES - 1):
        cluster.add_node(num_cpus=2)
    ray.init(address=cluster.address, logging_level="ERROR", runtime_env=ENVIRONMENT)
    try:
        cluster.wait_for_nodes()
        yield cluster
        wait_until(lambda: left_behind() == [], show=left_behind)
    finally:
        ray.shutdown()
        cluster.shutdown()


def left_behind() -> list[str]:
    """What is still there of us: in Ray's tables, and processes of the nodes."""
    ours = ("ray::Member", "ray::Directory", "ray::Learner")
    titles = map(title_of, psutil.Process().children(recursive=True))
    return on.left_behind() + [title for title in titles if title.startswith(ours)]


def title_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""  # it has just ended


def node_of(cluster: Cluster, worker: str) -> Any:
    number = gw.rpc_sync(worker, on.node)
    return next(n for n in cluster.list_all_nodes() if n.node_id == number)


def build() -> tuple[nn.Module, gw.DistributedOptimizer]:
    for name in ("worker0", "worker1"):
        gw.rpc_sync(name, torch.manual_seed, (0,))
    model = nn.Sequential(
        gw.RemoteModule("worker0", nn.Linear, (2, 8)),
        nn.Tanh(),
        gw.RemoteModule("worker1", nn.Linear, (8, 1)),
    )
    parameters = gw.nn.remote_parameters(model)
    return model, gw.DistributedOptimizer(torch.optim.Adam, parameters, lr=0.1)


def train(path: Path, disturb: dict[int, Any]) -> dict[int, float]:
    """The loss of each step; what is in `disturb` is called once in the step of that number."""
    torch.manual_seed(1)
    losses: dict[int, float] = {}
    for step in gw.resumable(STEPS, build, path=path, save_every=5):
        with step, gw.context() as ctx:
            disturb.pop(int(step), lambda: None)()
            x = torch.rand(16, 2)
            loss = (step.model(x) - x.prod(1, keepdim=True)).square().mean()
            gw.backward(ctx, [loss])
            step.optimizer.step(ctx)
            losses[int(step)] = loss.item()
    return losses


def test_gradients_over_nodes_are_those_of_one_process(cluster: Cluster) -> None:
    with gw.ray.World(NODES, strategy="STRICT_SPREAD"):
        names = [f"worker{number}" for number in range(NODES)]
        assert len({gw.rpc_sync(name, on.node) for name in names}) == NODES
        for first, second in itertools.pairwise(names):
            assert on.differ_from_local(first, second) < 1e-5


def test_a_training_that_loses_workers_and_nodes_ends_as_one_that_does_not(
    cluster: Cluster, tmp_path: Path
) -> None:
    def kill(worker: str) -> None:
        os.kill(gw.rpc_sync(worker, on.process), signal.SIGKILL)

    def remove_node() -> None:
        names = ("worker0", "worker1")
        nodes = [node_of(cluster, name) for name in names]
        victim = next(node for node in nodes if node is not cluster.head_node)
        cluster.remove_node(victim, allow_graceful=False)

    with gw.ray.World(2, max_restarts=-1, strategy="SPREAD"):
        calm = train(tmp_path / "calm", {})
        disturb = {7: lambda: kill("worker1"), 13: remove_node}
        disturb[22] = lambda: kill("worker0")
        assert train(tmp_path / "stormy", disturb) == calm
        assert disturb == {}


def test_a_worker_on_a_drained_node_comes_back_on_another(cluster: Cluster) -> None:
    with gw.ray.World(2, max_restarts=-1, strategy="STRICT_SPREAD"):
        names = ["worker0", "worker1"]
        there = {name: node_of(cluster, name) for name in names}
        name = next(n for n in names if there[n] is not cluster.head_node)
        cluster.remove_node(there[name], allow_graceful=True)
        assert gw.rpc_sync(name, on.node, retries=5) != there[name].node_id
        assert on.differ_from_local(*names) < 1e-5


def test_actors_join_from_a_node_that_came_later(cluster: Cluster) -> None:
    new = cluster.add_node(num_cpus=2, resources={"new": 1})
    with gw.ray.join("class", name="teacher"):
        learner = on.Learner.options(resources={"new": 1}).remote("class", "learner")
        ray.get(learner.ready.remote())
        assert gw.rpc_sync("learner", on.node) == new.node_id
        ray.kill(learner)
        cluster.remove_node(new)
        wait_until(lambda: len(gw.get_worker_infos()) == 1)
        again = on.Learner.remote("class", "learner")
        ray.get(again.ready.remote())
        assert gw.rpc_sync("learner", on.node) != new.node_id
        ray.get(again.leave.remote())
    gw.ray.end("class")


def test_a_directory_that_is_lost_comes_back_with_what_it_knew(
    cluster: Cluster,
) -> None:
    with gw.ray.join("class", name="teacher"):
        table = ray.get_actor("gradwire-class", namespace="gradwire")
        ray.kill(table, no_restart=False)
        learner = on.Learner.remote("class", "learner")
        assert ray.get(learner.ready.remote()) == 1  # the teacher is 0
        assert gw.rpc_sync("learner", max, (1, 2)) == 2
        ray.get(learner.leave.remote())
    gw.ray.end("class")


HEAD = """
import os, pathlib, ray, sys, gradwire as gw
from tests.cluster.on_ray import ENVIRONMENT, train
from tests.ray import functions as on
PATH = pathlib.Path(sys.argv[1])
ray.init(address="auto", logging_level="ERROR", runtime_env=ENVIRONMENT)
"""
FIRST = """
with gw.ray.World(2, name="staying", detached=True):
    calm = train(PATH / "calm", {})
    print("first", [calm[step] for step in sorted(calm)][7:], flush=True)
    train(PATH / "stormy", {7: lambda: os._exit(0)})
"""
SECOND = """
for detached in (True, False):
    try:
        gw.ray.World(1, name="staying", detached=detached).__enter__()
    except ValueError as error:
        assert "join it" in str(error), error
    else:
        raise AssertionError("a second world of this name")
with gw.ray.join("staying", name="driver"):
    after = train(PATH / "stormy", {})
    assert min(after) == 5, after
    print("second", [after[step] for step in sorted(after)][2:])
    assert on.differ_from_local("worker0", "worker1") < 1e-5
gw.ray.end("staying")
"""


CRASHING = """
with gw.ray.World(2):
    print("crash", gw.rpc_sync("worker0", on.process), flush=True)
    os._exit(0)
"""


def drive(cluster: Cluster, source: str, path: Path) -> Any:
    """Run a driver in a process of its own; what it prints after its first word."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", HEAD + source, str(path)],
        env={**os.environ, "PYTHONPATH": FOUND, "RAY_ADDRESS": cluster.address},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (said,) = (line for line in done.stdout.splitlines() if "pid=" not in line)
    return json.loads(said.partition(" ")[2])


def test_a_driver_that_is_restarted_goes_on_in_its_detached_world(
    cluster: Cluster, tmp_path: Path
) -> None:
    assert drive(cluster, FIRST, tmp_path) == drive(cluster, SECOND, tmp_path)


def test_a_world_ends_with_its_driver(cluster: Cluster, tmp_path: Path) -> None:
    worker = drive(cluster, CRASHING, tmp_path)
    wait_until(lambda: not psutil.pid_exists(worker))  # and `cluster` looks at the rest


def test_ray_is_believed_about_a_loss(cluster: Cluster) -> None:
    """A worker that is stopped closes no connection; Ray says that its actor is gone.

    Seconds later Ray ends its process, which closes its connections, too.
    """
    with gw.ray.World(2, heartbeat=600, host_heartbeat=600) as world:
        worker1 = gw.rpc_sync("worker0", gw.rpc_sync, ("worker1", on.process))
        assert gw.rpc_sync("worker1", on.process) == worker1  # all are connected
        os.kill(worker1, signal.SIGSTOP)
        on.call("worker1")
        gw.rpc_sync("worker0", on.call, ("worker1",))
        ray.kill(world._actors[1])
        assert "Ray says" in on.why_the_call_failed()
        assert "Ray says" in gw.rpc_sync("worker0", on.why_the_call_failed, timeout=0)
        assert [i.name for i in gw.get_worker_infos()] == ["worker0", "driver"]


# In namespaces of their own, all processes of the cluster are known, and end with the first one.
ALONE = (
    "unshare",
    "--pid",
    "--fork",
    "--kill-child",
    "--mount-proc",
    "--net",
    "sh",
    "-c",
)
ALONE_INSIDE = (
    'ip link set lo up && mkdir -p /tmp/ray && mount -t tmpfs ray /tmp/ray && exec "$@"'
)


@pytest.mark.skipif(bool(what_is_missing()), reason=what_is_missing())
def test_a_training_goes_on_while_rays_autoscaler_adds_and_removes_nodes(
    tmp_path: Path,
) -> None:
    program = [sys.executable, "-W", "ignore", "-m", "tests.cluster.autoscaled"]
    done = subprocess.run(
        [*ALONE, ALONE_INSIDE, "sh", *program, str(tmp_path)],
        env={
            **os.environ,
            "PYTHONPATH": FOUND,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the same\n" in done.stdout


def test_each_worker_sees_the_gpu_that_ray_has_assigned(cluster: Cluster) -> None:
    cluster.add_node(
        num_cpus=2, num_gpus=2
    )  # Ray counts them, and they need not be there
    with gw.ray.World(2, resources={"CPU": 1, "GPU": 1}):
        visible = ("CUDA_VISIBLE_DEVICES",)
        seen = {gw.rpc_sync(f"worker{i}", os.getenv, visible) for i in range(2)}
    assert seen == {"0", "1"}


@ray.remote(num_cpus=1)
def drive_in_a_group() -> list[str]:
    """A driver that Ray has placed; the nodes of its workers."""
    with gw.ray.World(2):
        assert len(ray.util.placement_group_table()) == 1
        return [gw.rpc_sync(f"worker{i}", on.node) for i in range(2)]


def test_a_driver_in_a_placement_group_has_its_workers_there(cluster: Cluster) -> None:
    node = cluster.add_node(num_cpus=3, resources={"here": 1})
    bundles = [
        {"CPU": 1, "here": 0.3},
        {"CPU": 1, "here": 0.3},
        {"CPU": 1, "here": 0.3},
    ]
    group = placement_group(bundles)
    strategy = PlacementGroupSchedulingStrategy(
        group, placement_group_capture_child_tasks=True
    )
    driver = drive_in_a_group.options(scheduling_strategy=strategy)
    assert ray.get(driver.remote()) == [node.node_id, node.node_id]
    remove_placement_group(group)


def test_the_cluster_must_have_room(cluster: Cluster) -> None:
    with (
        pytest.raises(gw.GradwireError, match=r"no room for 2 workers with .*50"),
        gw.ray.World(2, resources={"CPU": 50}, join_timeout=1),
    ):
        pass


def two_workers() -> None:
    with gw.init_rpc() as worker:
        other = f"worker{1 - worker.id}"
        apart = on.differ_from_local(worker.name, other)
        assert apart < 1e-5, apart
        assert torch.distributed.get_world_size() == 2


def test_ray_train_makes_a_world(cluster: Cluster, tmp_path: Path) -> None:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    trainer = TorchTrainer(
        two_workers,
        torch_config=gw.ray.GradwireConfig(),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(tmp_path)),
    )
    assert trainer.fit().error is None


# The benchmark


def test_the_benchmark_measures_between_two_nodes(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    rows = ["3×3 tensor add", "tiny forward and backward"]
    command = ["bench", "--on", "ray", "--rounds", "1", "--ways", "gradwire", "Ray"]
    settings = {**os.environ, "PYTHONPATH": FOUND}
    settings.pop("RAY_ADDRESS", None)  # a cluster that runs is none of ours
    done = subprocess.run(
        [
            *(sys.executable, "-m", "gradwire"),
            *command,
            *("--only", *rows, "--json", str(figures)),
        ],
        env=settings,
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    add, backward = (json.loads(figures.read_text())["loops"][row] for row in rows)
    assert add["gradwire"]["median"] > 0
    assert add["Ray"]["median"] > 0
    assert backward["gradwire"]["median"] > 0
    assert backward["Ray"] is None
