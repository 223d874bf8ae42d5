"""What other threads leave to the one that leads a pass, because a profiler sees only that one.

Which thread runs a piece of the graph depends on who gets the answer it waits for. A profiler is
on in the thread of the caller of `backward`; while one is, that thread runs every piece that need
not wait, and so the profile has them, with the nodes of sends and recvs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from queue import SimpleQueue

from ..threads import Executor
from .actions import Action, Plan, Run


def can_serve(plan: Plan, actions: Iterable[Action]) -> bool:
    """Whether the thread that leads runs all its roots at once, and need not wait with them."""
    runs = [action for action in actions if type(action) is Run]
    rooted = [run for run in runs if plan.pieces[run.piece].has_roots]
    if any(run.may_wait for run in rooted):
        return False
    return len(rooted) == len([piece for piece in plan.pieces if piece.has_roots])


class Errands:
    """Of the thread that makes this."""

    def __init__(self) -> None:
        self._runs: SimpleQueue[Run | None] = SimpleQueue()
        self._thread = threading.get_ident()

    def leave(self, run: Run) -> bool:
        """Leave something to the thread; False if this is that thread."""
        if threading.get_ident() == self._thread:
            return False
        self._runs.put(run)
        return True

    def end(self) -> None:
        """There is nothing more to do."""
        self._runs.put(None)

    def serve(self, execute: Callable[[list[Run]], None], executor: Executor) -> None:
        """Do what is left here, until the end."""
        while True:
            with executor.waiting():
                run = self._runs.get()
            if run is None:
                return
            execute([run])
