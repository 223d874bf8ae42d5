"""What the launchers of several nodes tell each other, in the store of the world.

Each increments a counter, as a heartbeat. The first failure is recorded once and stops all nodes.
The first node hosts the store, and stays until the others are done or gone.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from torch.distributed import Store  # type: ignore[attr-defined]

_PERIOD = 0.5
GONE = "node 0, which hosts the store, is gone"
_SILENT = 15.0  # seconds after which a launcher counts as gone


class Elsewhere(NamedTuple):
    """A failure on another node."""

    text: str
    status: int


class Nodes:
    """One launcher's part. A thread calls `tell` with the first failure elsewhere."""

    def __init__(
        self, store: Store, node: int, count: int, tell: Callable[[Elsewhere], object]
    ) -> None:
        self._store = store
        self._node = node
        self._others = [other for other in range(count) if other != node]
        self._tell = tell
        self._beats: dict[int, tuple[int, float]] = {}
        self.has_lost_store = False
        """Whether the first node is gone, so that nobody knows how the run went there."""
        self._closed = threading.Event()
        self._thread = threading.Thread(
            target=self._watch, name="gradwire nodes", daemon=True
        )
        if self._others:
            self._thread.start()

    def failed(self, text: str, status: int) -> None:
        """Tell the others."""
        if self._others:
            told = json.dumps([self._node, f"node {self._node}: {text}", status])
            try:
                self._store.compare_set("launch/failed", "", told)
            except RuntimeError:
                pass  # the node with the store is gone, and all end for that

    def close(self) -> None:
        """Record that this node is done; the host of the store waits for all others."""
        self._closed.set()
        if not self._others:
            return
        self._thread.join()
        try:
            self._store.set(f"launch/done/{self._node}", "1")
            while self._node == 0 and not all(map(self._is_over, self._others)):
                time.sleep(_PERIOD)
        except RuntimeError:
            self.has_lost_store = True

    def _watch(self) -> None:
        try:
            while not self._closed.wait(_PERIOD):
                self._store.add(f"launch/beat/{self._node}", 1)
                if self._store.check(["launch/failed"]):
                    node, text, status = json.loads(self._store.get("launch/failed"))
                    if node != self._node:
                        self._tell(Elsewhere(text, status))
                    return
        except RuntimeError:
            self.has_lost_store = True
            self._tell(Elsewhere(GONE, 1))

    def _is_over(self, node: int) -> bool:
        """Whether a node is done, or its heartbeat has stopped."""
        if self._store.check([f"launch/done/{node}"]):
            return True
        beat, now = int(self._store.add(f"launch/beat/{node}", 0)), time.monotonic()
        before, since = self._beats.setdefault(node, (beat, now))
        if beat != before:
            self._beats[node] = beat, now
            return False
        return now - since > _SILENT
