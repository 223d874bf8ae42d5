"""Calls and backward passes between two nodes of a Ray cluster: `gradwire bench --on ray`.

Each contender has an actor on either node, which Ray places; in them Gradwire and torch RPC make a
world, and Ray calls the one from the other. Where `RAY_ADDRESS` names no cluster, one of two nodes
is started on this machine. Contenders take turns: idle workers of torch RPC poll without pause.
"""

from __future__ import annotations

import os
import shlex
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import ray
import torch
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from . import functions, ray_monarch
from .group import free_port
from .library import VARIABLE, DistributedOptimizer, dist_autograd, rpc
from .report import Samples
from .tasks import TASKS, Caller, Sample
from .ways import environment

worlds: Any = import_module("gradwire.ray")
"""As programs have it: none of Gradwire's tools knows how it is built."""
_START = 120.0  # seconds
_LIMIT = 120.0
WAYS = ["torch", "gradwire", "gradwire, TCP", "Ray"]


def measure(
    tasks: Sequence[str], ways: Sequence[str], rounds: int, advance: Callable[[], None]
) -> Samples:
    """Samples of all rounds; None for what a contender cannot do, or not in time."""
    samples: Samples = {task: {way: [] for way in ways} for task in tasks}
    with _cluster():
        for _ in range(rounds):
            for way in ways:
                with _pair(way) as client:
                    for task in tasks:
                        samples[task][way].append(_ask(client, task))
                        advance()
    return samples


def _ask(client: Any, task: str) -> Sample | None:
    try:
        sample: Sample | None = ray.get(client.measure.remote(task), timeout=_LIMIT)
    except (GetTimeoutError, RayError) as error:
        print(f"no answer to {task!r}: {type(error).__name__}")
        return None
    return sample


@contextmanager
def _cluster() -> Iterator[None]:
    """The one of this environment, or two nodes here."""
    quiet: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
    if "RAY_ADDRESS" in os.environ:
        ray.init(**quiet)
        try:
            yield
        finally:
            ray.shutdown()
        return
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    try:
        cluster.add_node(num_cpus=1)
        ray.init(address=cluster.address, **quiet)
        cluster.wait_for_nodes()
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()


@contextmanager
def _pair(way: str) -> Iterator[Any]:
    """Actors on two nodes that are connected; the one that calls."""
    group = placement_group([{"CPU": 1}, {"CPU": 1}], "STRICT_SPREAD")
    actors: list[Any] = []
    world = f"bench-{uuid.uuid4().hex}"
    try:
        if not group.wait(_START):
            raise RuntimeError("the cluster has no two nodes with a free CPU each")
        actors += [_actor(way, rank, group) for rank in range(2)]
        client, server = actors
        if way == "Ray":
            starts = [client.call.remote(server)]
        else:
            place = ray.get(client.place.remote(), timeout=_START)
            starts = [actor.join.remote(world, *place) for actor in actors]
        ray.get(starts, timeout=_START)
        yield client
    finally:
        for actor in actors:
            ray.kill(actor)
        try:
            worlds.end(world)
        except ValueError:
            pass  # only Gradwire's workers meet there
        remove_placement_group(group)


def _actor(way: str, rank: int, group: Any) -> Any:
    wanted = {**environment(way), "OMP_NUM_THREADS": "1"}
    changed = {n: v for n, v in wanted.items() if os.environ.get(n) != v}
    if "PYTHONPATH" in os.environ:
        changed["PYTHONPATH"] = os.environ["PYTHONPATH"]
    settings: dict[str, Any] = {"env_vars": changed}
    if "RAY_ADDRESS" not in os.environ:
        # Ray runs it by a shell, unquoted: with a space in its path no actor would start.
        settings["py_executable"] = shlex.quote(sys.executable)
    options = {
        "num_cpus": 1,
        "runtime_env": settings,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, rank),
    }
    return ray.remote(_Member).options(**options).remote(rank)


class _Member(ray_monarch.Server):
    """The actor: rank 0 calls, rank 1 serves."""

    def __init__(self, rank: int) -> None:
        torch.set_num_threads(1)
        self._rank = rank
        self._caller: Caller | None = None

    def place(self) -> tuple[str, int]:
        """Where the two can meet."""
        return ray.util.get_node_ip_address(), free_port()

    def join(self, world: str, host: str, port: int) -> None:
        """Make a world of two, by Ray or at this address, and be ready to call."""
        name = f"worker{self._rank}"
        if os.environ[VARIABLE] == "torch":
            os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port))
            rpc.init_rpc(name, rank=self._rank, world_size=2)
        else:
            worlds.join(world, name, min_workers=2)
        if self._rank == 0:
            self._caller = Caller(
                sync=lambda func, args: rpc.rpc_sync("worker1", func, args=args),
                start=lambda func, args: rpc.rpc_async("worker1", func, args=args),
                remote=lambda func, args: rpc.remote("worker1", func, args=args),
                autograd=dist_autograd,
                own=rpc.RRef,
                optimizer=DistributedOptimizer,
            )
            self._caller.sync(functions.nothing, ())

    def call(self, server: Any) -> None:
        """Be ready to call the other actor by Ray."""
        self._caller = ray_monarch.caller_of(server)
        self._caller.sync(functions.nothing, ())

    def measure(self, name: str) -> Sample | None:
        """A sample of a task; None if this way cannot do it."""
        assert self._caller is not None
        task = next(task for task in TASKS if task.name == name)
        return task.run(self._caller) if task.can_run(self._caller) else None
