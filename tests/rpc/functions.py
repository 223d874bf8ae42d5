"""Functions to call: some answer, some fail, some wait until a test lets them go on.

The workers of a world live in this process, so a function can meet its test in a global.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

import gradwire as gw
from gradwire._rpc.function_runner import async_execution
from tests.worlds import LIMIT


class Hold:
    """Where `held` waits, and what was said meanwhile."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.release = threading.Event()
        self.said: list[Any] = []


_hold = Hold()


@contextmanager
def holding() -> Iterator[Hold]:
    """Have `held` wait until released, at the latest at the end of this block."""
    global _hold
    _hold = Hold()
    try:
        yield _hold
    finally:
        _hold.release.set()


def held(value: Any = None) -> Any:
    """Blocks its thread."""
    hold = _hold
    hold.entered.set()
    assert hold.release.wait(LIMIT)
    return value


def say(what: Any) -> None:
    _hold.said.append(what)


@async_execution
def never() -> torch.futures.Future[Any]:
    """No answer, and no thread that waits either."""
    return torch.futures.Future()


def add(x: Any, y: Any) -> Any:
    return x + y


def whoami() -> str:
    return gw.get_worker_info().name


class Boom(Exception):
    """An error of the user's own."""


def boom(text: str = "boom") -> None:
    raise Boom(text)
