"""The agent of this process: the only state of this folder that is not on an object."""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

agent: Any = None
"""The current agent; None before `init_rpc` and after `shutdown`."""
started = threading.Event()
"""Set while there is one: others may call before this process has it."""


def get() -> Any:
    """The current agent.

    Raises:
        RuntimeError: there is none.
    """
    if agent is None:
        raise RuntimeError(
            "Current RPC agent is not set! Did you initialize the RPC framework (e.g. by "
            "calling `rpc.init_rpc`)?"
        )
    return agent


def waiting() -> AbstractContextManager[None]:
    """This thread waits for others: it does not count as one that runs a call."""
    return nullcontext() if agent is None else agent.worker.waiting()


def put(new: Any) -> None:
    global agent
    agent = new
    if new is None:
        started.clear()
    else:
        started.set()


def _after_fork() -> None:
    """It belongs to the parent."""
    global agent, started
    agent, started = None, threading.Event()


os.register_at_fork(after_in_child=_after_fork)
