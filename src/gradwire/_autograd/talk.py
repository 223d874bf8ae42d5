"""The messages of one pass from one worker to others, and the waiting for their answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from .._rpc.futures import CallFuture
from . import messages
from .actions import Words
from .desk import Desk
from .messages import About, Delivery, Failed, Outcome

Look = Callable[[], Any]

_MOST_ASKING = 16  # threads of a worker that a pass may keep waiting at a time
_GLANCE = 0.05  # seconds that a look at one answer may take


class Message(NamedTuple):
    """What is said to a worker."""

    to: int
    words: Words
    deliveries: Sequence[Delivery]


class Question(NamedTuple):
    """A message that this thread has to answer, and what goes with the answer."""

    sender: int
    deliveries: list[Delivery]


class End:
    """How a pass has ended here; by itself, so that whoever looks at it holds nothing else."""

    __slots__ = ("outcome",)

    def __init__(self) -> None:
        self.outcome: Outcome | None = None

    def has_come(self) -> bool:
        return self.outcome is not None


class Talk:
    """What is said in a pass. Looking at an answer may raise."""

    def __init__(self, desk: Desk, about: About, end: End) -> None:
        self._desk = desk
        self._about = about
        self._end = end
        self._coming: dict[CallFuture, Callable[[], None]] = {}  # answers
        self._asking = 0  # threads; two that come at the same time may count as one

    def can_ask(self) -> bool:
        """Whether one more thread may wait. Along a long way around many workers, many would."""
        return self._asking < _MOST_ASKING

    def ask(self, message: Message) -> Look:
        """Say something, and wait for the answer, or until the pass is over."""
        to, words, leaving = message
        self._asking += 1
        try:
            step = messages.step(self._about, words, leaving)
            answer = self._desk.ask(to, step, self._end.has_come)
        except Exception as error:  # noqa: BLE001 it cannot be sent, or nobody is there
            return _raising(error)
        finally:
            self._asking -= 1
        return lambda: answer

    def post(self, message: Message, answered: Callable[[int, Look], None]) -> None:
        """Say something; `answered` is told of the answer."""
        to, words, leaving = message
        try:
            step = messages.step(self._about, words, leaving)
            future = self._desk.request(to, step)
        except Exception as error:  # noqa: BLE001 it cannot be sent, or nobody is there
            answered(to, _raising(error))
            return
        see_to_it = partial(answered, to, future.value)
        self._coming[future] = see_to_it
        if not future.done():
            future.on_done(partial(self._came, future))
        else:  # torch would swallow a Ctrl-C in what it calls
            self._came(future)

    def _came(self, future: CallFuture) -> None:
        see_to_it = self._coming.pop(future, None)  # once
        if see_to_it is not None:
            see_to_it()

    def over(self, to: int, outcome: Outcome) -> None:
        """Tell the engager that the pass has ended here, and how."""
        context, number, _ = self._about
        self._desk.tell(to, messages.over(context, number, outcome))

    def abort(self, to: int, failed: Failed) -> None:
        """Tell a worker that the pass has failed."""
        context, number, _ = self._about
        self._desk.tell(to, messages.Abort(context, number, messages.pack(failed)))

    def read(self) -> bool:
        """Help to read an answer, for a moment; False if there is none to come.

        That saves others being woken for it.
        """
        coming = next(iter(list(self._coming)), None)
        if coming is None:
            return False
        if (
            coming.done()
        ):  # and torch has not told us yet, or a Ctrl-C kept it from that
            self._came(coming)
            return True
        try:
            coming.wait(_GLANCE)
        except Exception:  # noqa: BLE001 whoever is told of the answer sees to it
            pass
        return True


def _raising(error: Exception) -> Look:
    def look() -> Any:
        raise error

    return look
