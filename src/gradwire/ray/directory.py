"""The rendezvous of a world on Ray: a named actor, used as one of torch's stores.

So addresses and the world's secret are exchanged only through Ray. The actor runs one method at a
time, which makes each of them atomic.

The directory of a driver is on its node, and ends with it. A detached one may be on any
node, so it also keeps its contents in Ray's internal key-value table, which is on the head node.
"""

from __future__ import annotations

import secrets
import time
from datetime import timedelta
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.experimental.internal_kv import (
    _internal_kv_del,
    _internal_kv_get,
    _internal_kv_list,
    _internal_kv_put,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch.distributed import Store  # type: ignore[attr-defined]

NAMESPACE = "gradwire"
GROUP = "placement group"
"""Under this name: the placement group of a detached world, pickled, for `end`."""
_PAUSE = 0.02  # seconds between looks for a value that is not there yet
_PATIENCE = 300.0


class Directory:
    """The table of one world, and its secret."""

    def __init__(self, world: str, is_kept: bool) -> None:
        self._prefix = f"gradwire/{world}/"
        self._is_kept = is_kept
        self._values: dict[str, bytes] = {}
        if is_kept:
            for key in _internal_kv_list(self._prefix):
                name = key.decode().removeprefix(self._prefix)
                self._values[name] = _internal_kv_get(key)
        self.compare_set("secret", b"", secrets.token_bytes(32))

    def secret(self) -> bytes:
        return self._values["secret"]

    def start(self, name: str) -> int:
        """Record that a worker of this name starts; returns how many have before it."""
        return self.add(f"starts/{name}", 1) - 1

    def set(self, key: str, value: bytes) -> None:
        self._values[key] = value
        if self._is_kept:
            _internal_kv_put(self._prefix + key, value)

    def get(self, key: str) -> bytes | None:
        return self._values.get(key)

    def add(self, key: str, amount: int) -> int:
        total = int(self._values.get(key, b"0")) + amount
        self.set(key, str(total).encode())
        return total

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """As torch's: what is there in the end; an absent value counts as empty."""
        if self._values.get(key, b"") == expected:
            self.set(key, desired)
        return self._values.get(key, expected)

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def delete_key(self, key: str) -> bool:
        if self._is_kept:
            _internal_kv_del(self._prefix + key)
        return self._values.pop(key, None) is not None

    def forget(self) -> None:
        """Delete everything from Ray's table."""
        if self._is_kept:
            _internal_kv_del(self._prefix, del_by_prefix=True)


def member_name(world: str, worker: str) -> str:
    """What Ray calls the actor of a worker; for no worker, how all of them begin."""
    return f"gradwire-{world}/{worker}"


_DETACHED = {"lifetime": "detached", "max_restarts": -1, "max_task_retries": -1}


def directory(world: str) -> Any:
    """The directory of a world that anyone may join. The first to ask creates it, detached."""
    return _actor(world, get_if_exists=True, **_DETACHED).remote(world, True)


def new_directory(world: str, *, detached: bool) -> Any:
    """The directory of a new world. A detached one outlives its creator.

    Raises:
        ValueError: there is a world of this name.
    """
    if detached:
        options = _DETACHED
    else:
        here = ray.get_runtime_context().get_node_id()
        strategy = NodeAffinitySchedulingStrategy(here, soft=False)
        options = {"scheduling_strategy": strategy}
    create = _actor(world, **options)
    try:
        return create.remote(world, detached)
    except ValueError as error:  # Ray's, which creates a named actor atomically
        raise ValueError(
            f"a world named {world!r} exists: join it (gw.ray.join) or end it (gw.ray.end)"
        ) from error


def _actor(world: str, **options: Any) -> Any:
    if (
        "/" in world
    ):  # in Ray's tables, what is of a world begins with its name and a slash
        raise ValueError(f"a world cannot be named {world!r}: leave out the '/'")
    name = f"gradwire-{world}"
    return ray.remote(Directory).options(
        name=name, namespace=NAMESPACE, num_cpus=0, **options
    )


class RayStore(Store):
    """A directory as a store. Values come as bytes, whatever torch's annotations say."""

    def __init__(self, actor: Any) -> None:
        super().__init__()
        self._actor = actor

    def _ask(self, method: str, *args: object) -> Any:
        try:
            return ray.get(getattr(self._actor, method).remote(*args))
        except RayActorError as error:
            raise RuntimeError(f"the world's directory is gone: {error}") from error

    def set(self, key: str, value: Any) -> None:
        self._ask("set", key, value)

    def get(self, key: str) -> bytes:
        deadline = time.monotonic() + _PATIENCE
        while (value := self._ask("get", key)) is None:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{key!r} was not set within {_PATIENCE:g} s")
            time.sleep(_PAUSE)
        found: bytes = value
        return found

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", key, amount))

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        found: bytes = self._ask("compare_set", key, expected, desired)
        return found

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask("check", keys))

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete_key", key))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)
