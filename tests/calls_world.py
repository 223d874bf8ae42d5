"""What the tests of calls share: worlds with and without reordering, and functions to call.

The workers of a world live in this process, so a function can meet its test in a global.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire._rpc.async_execution import async_execution

ENOUGH = 20.0
"""Seconds that nothing takes, unless it hangs."""

orders = pytest.mark.parametrize("seed", [None, 1, 2], ids="fifo seed1 seed2".split())
"""In order, and with messages that overtake each other."""


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
    assert hold.release.wait(ENOUGH)
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


@contextmanager
def meanwhile(*bodies: Callable[[], object]) -> Iterator[None]:
    """Run the bodies in threads beside this block, and see them end well."""
    errors: list[BaseException] = []

    def run(body: Callable[[], object]) -> None:
        try:
            body()
        except BaseException as error:  # noqa: BLE001 raised in the test
            errors.append(error)

    threads = [threading.Thread(target=run, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for thread in threads:
            thread.join(ENOUGH)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]


def until(condition: Callable[[], object]) -> None:
    """Look until it is so, for what no event tells."""
    deadline = time.monotonic() + ENOUGH
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def in_flight(worker: gw.Worker) -> str:
    return repr(worker).partition(": ")[2].rstrip(">")
