"""The actor that is one worker of a world made by `World`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import ray

from .directory import NAMESPACE
from .joining import join_at

OnRestart = Callable[[str], object]


class Member:
    """Joins when Ray starts it, and rejoins under its name when Ray restarts it."""

    def __init__(
        self,
        directory: str,
        name: str,
        options: dict[str, Any],
        on_restart: OnRestart | None,
    ) -> None:
        actor = ray.get_actor(directory, namespace=NAMESPACE)
        if ray.get(actor.start.remote(name)) and on_restart is not None:
            on_restart(name)  # before it joins: no call finds it without its state
        self._worker = join_at(actor, name, options)

    def number(self) -> int:
        """The worker's id, once it has joined."""
        return self._worker.id

    def live(self) -> None:
        """Never returns: its failure is how Ray reports the end of this process."""
        threading.Event().wait()

    def leave(self) -> None:
        """Shut the worker down."""
        self._worker.shutdown()
