"""The messages of one pass from one worker to others, and the waiting for their answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..rpc.futures import CallFuture
from . import messages
from .contexts import Context
from .desk import Desk
from .messages import Delivery, Failed, Step
from .passes import Words

Look = Callable[[], Any]

_GLANCE = 0.05  # seconds that a look at one answer may take


class Talk:
    """What is said in a pass. Looking at an answer may raise."""

    def __init__(self, desk: Desk, context: Context, number: int, flags: int) -> None:
        self._desk = desk
        self._context = context
        self._about = context.id, number, flags
        self._futures: list[CallFuture] = []

    def is_alone_with(self, worker: int) -> bool:
        """Whether no third worker can fail while one waits for this one."""
        return self._context.known <= {self._desk.me, worker}

    def ask(self, to: int, words: Words, leaving: Sequence[Delivery]) -> Look:
        """Say something, and wait for the answer."""
        try:
            answer = self._desk.ask(to, self._step(words, leaving))
        except Exception as error:  # noqa: BLE001 it cannot be sent, or nobody is there
            return _raising(error)
        return lambda: answer

    def post(
        self,
        to: int,
        words: Words,
        leaving: Sequence[Delivery],
        answered: Callable[[int, Look], None],
    ) -> None:
        """Say something; `answered` is told of the answer."""
        try:
            future = self._desk.request(to, self._step(words, leaving))
        except Exception as error:  # noqa: BLE001 it cannot be sent, or nobody is there
            answered(to, _raising(error))
            return
        self._futures.append(future)

        def came() -> None:
            self._futures.remove(future)
            answered(to, future.value)

        future.on_done(came)

    def abort(self, to: int, failed: Failed) -> None:
        """Tell a worker that the pass has failed."""
        context, number, _ = self._about
        message = messages.Abort(context, number, messages.pack(failed))
        try:
            self._desk.request(to, message)
        except Exception:  # noqa: BLE001 it is gone, and so is its part
            pass

    def read(self) -> bool:
        """Help to read an answer, for a moment; False if there is none to come.

        That saves others being woken for it.
        """
        coming = next((f for f in list(self._futures) if not f.done()), None)
        if coming is None:
            return False
        try:
            coming.wait(_GLANCE)
        except Exception:  # noqa: BLE001 whoever is told of the answer sees to it
            pass
        return True

    def _step(self, words: Words, leaving: Sequence[Delivery]) -> Step:
        return Step(*self._about, *words, *messages.flatten(leaving))


def _raising(error: Exception) -> Look:
    def look() -> Any:
        raise error

    return look
