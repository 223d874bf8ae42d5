"""A training loop that resumes from its last checkpoint when a worker is lost.

An exception in a loop's body never reaches the iterator, so each step is a context manager: its
block catches errors caused by the loss of a worker, and the loop continues with the step that was
saved last. The lost worker's memory is gone, so everything is built anew, and loaded.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from os import PathLike
from types import TracebackType
from typing import Any

import torch
from torch import nn

from .api import current_worker
from .checkpoint import load, save
from .errors import GradwireError, OwnersError, StaleReferenceError, WorkerLostError
from .optim import DistributedOptimizer

Build = Callable[[], "tuple[nn.Module, DistributedOptimizer]"]

_LOOK = 1.0  # seconds between attempts to build, unless a worker comes


class Step(int):
    """The number of a step. Its block may be repeated."""

    model: nn.Module
    optimizer: DistributedOptimizer
    failure: BaseException | None = None
    """The loss of a worker that ended its block."""

    def __enter__(self) -> Step:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if error is None or not comes_of_a_loss(error):
            return False
        self.failure = error
        return True


def resumable(
    steps: int,
    build: Build,
    *,
    path: str | PathLike[str],
    save_every: int = 50,
    patience: float | None = None,
) -> Iterator[Step]:
    """The steps of a training, resumed from the last checkpoint whenever a worker is lost.

    `build` creates the model and its optimizer, on workers that are present. Each step has both,
    and runs in a `with` block. They are saved into the folder `path` at the start, after every
    `save_every` steps and at the end, together with this worker's random state; if the folder
    already has a checkpoint, the loop resumes from it. A lost worker may take `patience` seconds
    (default: `Options.join_timeout`) to come back.

        for step in gw.resumable(1000, build, path="checkpoints"):
            with step, gw.context() as ctx:
                loss = loss_of(step.model, batch(step))
                gw.backward(ctx, [loss])
                step.optimizer.step(ctx)

    Raises:
        WorkerLostError: a worker did not come back in time.
    """
    if save_every < 1:
        raise ValueError(f"save_every={save_every}: must be at least 1")
    seconds = current_worker().options.join_timeout if patience is None else patience
    run = _Run(build, path)
    number = run.restore(seconds)
    while number < steps:
        yield (step := run.step(number))
        failure = step.failure
        if failure is None and ((number + 1) % save_every == 0 or number + 1 == steps):
            failure = run.save(number + 1)
        del step
        number = number + 1 if failure is None else run.restore(seconds)


class _Run:
    """The model and the optimizer that are trained now, and their checkpoint."""

    def __init__(self, build: Build, path: str | PathLike[str]) -> None:
        self._build = build
        self._path = path
        self._made: tuple[nn.Module, DistributedOptimizer] | None = None

    def step(self, number: int) -> Step:
        assert self._made is not None
        step = Step(number)
        step.model, step.optimizer = self._made
        return step

    def save(self, number: int) -> BaseException | None:
        """Save what step `number` begins with; the loss of a worker that prevented it."""
        assert self._made is not None
        extra = {"step": number, "random": torch.get_rng_state()}
        try:
            save(self._path, *self._made, extra=extra)
        except GradwireError as error:
            if not comes_of_a_loss(error):
                raise
            return error
        return None

    def restore(self, seconds: float) -> int:
        """Build anew and load; the number of the step that comes next."""
        worker = current_worker()
        deadline = time.monotonic() + seconds
        came = threading.Event()
        end = worker.on_join(lambda _: came.set())
        try:
            while True:
                came.clear()
                try:
                    return self._attempt()
                except (GradwireError, OSError) as error:
                    left = deadline - time.monotonic()
                    if left <= 0 or not comes_of_a_loss(error):
                        raise
                with worker.waiting():
                    came.wait(min(left, _LOOK))
        finally:
            end()

    def _attempt(self) -> int:
        self._made = None  # its parts on workers that live are freed first
        self._made = self._build()
        try:
            extra: dict[str, Any] = load(self._path, *self._made)
        except FileNotFoundError:
            if (failure := self.save(0)) is not None:
                raise failure from None
            return 0
        torch.set_rng_state(extra["random"])
        return int(extra["step"])


def comes_of_a_loss(error: BaseException | None) -> bool:
    """Whether an error was caused by the loss of a worker."""
    while error is not None:
        if isinstance(error, WorkerLostError | StaleReferenceError):
            return True
        if isinstance(error, OwnersError):
            return any(map(comes_of_a_loss, error.errors.values()))
        error = error.__cause__
    return False
