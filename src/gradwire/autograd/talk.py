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

Answered = Callable[[int, Callable[[], Any], bool], None]

_GLANCE = 0.05  # seconds that a look at one answer may take


class Talk:
    """What is said in a pass.

    `answered(to, look, is_free)` is told of answers; looking may raise. If it is free, the thread
    that brings the answer has nothing else to do, and may wait.
    """

    def __init__(
        self, desk: Desk, context: Context, number: int, flags: int, answered: Answered
    ) -> None:
        self._desk = desk
        self._context = context
        self._about = context.id, number, flags
        self._answered = answered
        self._futures: list[CallFuture] = []

    def is_alone_with(self, worker: int) -> bool:
        """Whether no third worker can fail while one waits for this one."""
        return self._context.known <= {self._desk.me, worker}

    def ask(self, to: int, words: Words, leaving: Sequence[Delivery]) -> None:
        """Say something, and wait for the answer."""
        try:
            answer = self._desk.ask(to, self._step(words, leaving))
        except Exception as error:  # noqa: BLE001 it cannot be sent, or nobody is there
            self._answered(to, _raising(error), True)
        else:
            self._answered(to, lambda: answer, True)

    def post(self, to: int, words: Words, leaving: Sequence[Delivery]) -> None:
        """Say something; the answer comes by itself."""
        try:
            future = self._desk.request(to, self._step(words, leaving))
        except Exception as error:  # noqa: BLE001 it cannot be sent, or nobody is there
            self._answered(to, _raising(error), False)
            return
        self._futures.append(future)

        def came() -> None:
            self._futures.remove(future)
            self._answered(to, future.value, False)

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


def _raising(error: Exception) -> Callable[[], Any]:
    def look() -> Any:
        raise error

    return look
