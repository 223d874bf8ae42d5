"""Calls that come in the middle of others: in signal handlers and finalizers."""

import gc
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import gradwire as gw
from gradwire.worker import Worker
from tests.worlds import SOON

INTERVAL = 0.0007

Way = Callable[[Worker, Any], Any]
"""How to call a function, on what worker, with a tensor of ones."""


class Interruption:
    """A call in the middle of others, but not of itself.

    Nor in a thread of the worker that is called: in another process it could not come there, and
    here it could wait for the very thread that it has interrupted.
    """

    def __init__(self, worker: Worker, way: Way) -> None:
        self.results: list[Any] = []
        self.errors: list[gw.GradwireError] = []
        self.longest_refusal = 0.0
        self._worker = worker
        self._way = way
        self._inside: set[int] = set()

    def __call__(self, *_: object) -> None:
        me = threading.get_ident()
        if me in self._inside or "-worker1-" in threading.current_thread().name:
            return
        self._inside.add(me)
        began = time.monotonic()
        try:
            self.results.append(self._way(self._worker, torch.neg))
        except gw.GradwireError as error:
            self.errors.append(error)
            took = time.monotonic() - began
            self.longest_refusal = max(self.longest_refusal, took)
        finally:
            self._inside.discard(me)

    def check(self) -> None:
        assert self.results
        assert all("a signal handler or a finalizer" in str(e) for e in self.errors)
        assert self.longest_refusal < SOON / 2, "at once"
        assert all(torch.equal(result, -torch.ones(2)) for result in self.results)


@contextmanager
def ticking(handler: Callable[..., None]) -> Iterator[None]:
    """A signal every now and then, wherever the main thread is."""
    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, INTERVAL, INTERVAL)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def collecting() -> Iterator[None]:
    """Garbage is collected every few objects, so in the middle of anything."""
    before = gc.get_threshold()
    gc.set_threshold(10, 1, 1)
    try:
        yield
    finally:
        gc.set_threshold(*before)


class Calling:
    """Garbage whose end makes a call."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._me = self

    def __del__(self) -> None:
        self._call()
