"""A world of actors that Ray places, and the driver."""

from __future__ import annotations

import pickle
import uuid
from types import TracebackType
from typing import Any

import ray
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import (
    PlacementGroup,
    get_current_placement_group,
    placement_group,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ..errors import GradwireError
from ..options import Options
from ..worker import Worker
from .directory import GROUP, NAMESPACE, member_name, new_directory
from .joining import join_at
from .member import Member, OnRestart
from .watch import Watch

_LEAVE = 10.0  # seconds for the workers to shut down
_THREADS = 4  # of an actor: one waits for its end


class World:
    """Workers `worker0`, `worker1`, … on a Ray cluster, and this process as `driver`.

        with gw.ray.World(4, resources={"CPU": 1}, max_restarts=2):
            reference = gw.remote("worker1", Model, args=(512,))

    Each worker gets these `resources`, in the `placement_group` (default: the current one, or else
    a new one with this `strategy`). Ray restarts a lost worker up to `max_restarts` times (-1:
    always), and it rejoins under its name, after `on_restart(name)` has run there. A `detached`
    world has a name and outlives the driver: `join` it from another, and `end` it. Further keywords
    are fields of `Options`.

    Raises:
        ValueError: there is a world of this name.
        GradwireError: the workers did not start within `join_timeout`.
    """

    def __init__(  # noqa: PLR0913 what Ray can be asked for
        self,
        workers: int,
        *,
        resources: dict[str, float] | None = None,
        placement_group: PlacementGroup | None = None,
        strategy: str = "PACK",
        max_restarts: int = 0,
        runtime_env: dict[str, Any] | None = None,
        on_restart: OnRestart | None = None,
        name: str | None = None,
        detached: bool = False,
        driver: str = "driver",
        **options: Any,
    ) -> None:
        if workers < 1:
            raise ValueError(f"workers={workers}: must be at least 1")
        if detached and name is None:
            raise ValueError("detached=True: give it a name, by which others join it")
        self.name = name or f"world-{uuid.uuid4().hex}"
        self._names = [f"worker{number}" for number in range(workers)]
        self._resources = {"CPU": 1.0} if resources is None else resources
        self._given_group = placement_group
        self._own_group: PlacementGroup | None = None
        self._strategy = strategy
        self._settings = {"max_restarts": max_restarts, "runtime_env": runtime_env}
        self._on_restart = on_restart
        self._detached = detached
        self._driver = driver
        self._options = options
        self._actors: list[Any] = []
        self._directory: Any = None
        self._watch: Watch | None = None
        self.worker: Worker | None = None
        """The driver's own."""

    def __enter__(self) -> World:
        # Before `try`: what is closed there is this object's own, never a world that exists.
        self._directory = new_directory(self.name, detached=self._detached)
        try:
            self._start()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if self.worker is not None:
                self.worker.shutdown(graceful=kind is None)
            if kind is None and not self._detached:
                self._stop_watching()
                ends = [actor.leave.remote() for actor in self._actors]
                ray.wait(ends, num_returns=len(ends), timeout=_LEAVE)
        finally:
            self._close()

    def _start(self) -> None:
        patience = Options(**self._options).join_timeout
        group = self._given_group or get_current_placement_group()
        if group is None:
            group = self._new_group(patience)
        self._actors = [self._actor(name, group) for name in self._names]
        self._wait_for_actors(group, patience)
        self.worker = join_at(self._directory, self._driver, self._options)
        self._watch = Watch(self.worker, self._actors)

    def _new_group(self, patience: float) -> PlacementGroup:
        if not any(self._resources.values()):
            raise ValueError(
                f"resources={self._resources}: name what a worker needs, such as {{'CPU': 1}}"
            )
        bundles = [dict(self._resources) for _ in self._names]
        lifetime = "detached" if self._detached else None
        group = placement_group(bundles, self._strategy, lifetime=lifetime)
        self._own_group = group
        if self._detached:
            ray.get(self._directory.set.remote(GROUP, pickle.dumps(group)))
        if not group.wait(patience):
            raise GradwireError(
                f"the cluster had no room for {len(bundles)} workers with {self._resources} each "
                f"within {patience:g} s (join_timeout); it has {ray.cluster_resources()}"
            )
        return group

    def _wait_for_actors(self, group: PlacementGroup, patience: float) -> None:
        """Wait until they have joined: Ray waits for ever for room in a group that has none."""
        joined = [actor.number.remote() for actor in self._actors]
        try:
            ray.get(joined, timeout=patience)
        except GetTimeoutError as error:
            _, late = ray.wait(joined, num_returns=len(joined), timeout=0)
            names = [self._names[joined.index(ref)] for ref in late]
            raise GradwireError(
                f"{', '.join(names)} did not start within {patience:g} s (join_timeout), with "
                f"{self._resources} each in a placement group of {group.bundle_specs}"
            ) from error

    def _actor(self, name: str, group: PlacementGroup) -> Any:
        others = dict(self._resources)
        options: dict[str, Any] = {
            **self._settings,
            "name": member_name(self.name, name),
            "namespace": NAMESPACE,
            "num_cpus": others.pop("CPU", 0),
            "num_gpus": others.pop("GPU", 0),
            "resources": others,
            "max_concurrency": _THREADS,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group),
        }
        if self._detached:
            options["lifetime"] = "detached"
        where = f"gradwire-{self.name}"
        actor = ray.remote(Member).options(**options)
        return actor.remote(where, name, self._options, self._on_restart)

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def _close(self) -> None:
        """Release Ray's resources for this world; a detached one that has started stays."""
        self._stop_watching()
        started, self.worker = self.worker, None
        if started is not None:
            started.close()
            if self._detached:
                return
        for actor in self._actors:
            ray.kill(actor)
        ray.get(self._directory.forget.remote())
        ray.kill(self._directory)
        if self._own_group is not None:
            remove_placement_group(self._own_group)
