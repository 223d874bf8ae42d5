"""Contexts: what one worker knows of a forward/backward session, and the table of them.

A context is known on every worker that its calls reach, under one id: the worker that began it and
a counter. It is created where it is begun, or when the first message with its id arrives; it ends
when the worker that began it says so. A message that arrives later gets a context that is not in
the table, and what is recorded in it is freed with the message.

`contextvars` hold which context is *current*: per thread, and per task of an event loop; and
separately for each worker, because several can live in one process.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor

from .. import streams
from ..errors import GradwireError
from ..locks import CheckedLock
from .nodes import Crossing, Send
from .segments import Segments

_COUNT_BITS = 48
_MOST_REMEMBERED = 4096  # contexts, and passes of one, that have ended


class Part(Protocol):
    """What others need of a pass (`parts.py`)."""

    @property
    def is_under_way(self) -> bool: ...

    def end(self, failed: Any) -> None: ...

    def released(self) -> None: ...

    def worker_gone(self, worker: int, name: str) -> None: ...


class Memory(OrderedDict[int, None]):
    """The most recent numbers: a bounded set, from which the oldest are dropped."""

    def add(self, number: int) -> None:
        self[number] = None
        if len(self) > _MOST_REMEMBERED:
            self.popitem(last=False)


class Numbers:
    """Numbers that no other worker uses: a worker's id and a counter."""

    def __init__(self, worker: int) -> None:
        self.next = itertools.count((worker << _COUNT_BITS) + 1).__next__


def owner(number: int) -> int:
    """The worker that drew a number."""
    return number >> _COUNT_BITS


class Context:
    """One session, as one worker knows it. Thread-safe."""

    is_released = False

    def __init__(self, number: int) -> None:
        self.id = number
        self.lock = CheckedLock()
        self.sends: dict[int, Send] = {}
        self.recvs: dict[int, Any] = {}  # their nodes
        self.known: set[int] = set()
        """The workers that messages of this context went to or came from."""
        self.gradients: dict[Tensor, Tensor] = {}
        self.parts: dict[int, Part] = {}
        """The passes that have come here and may come again, by number."""
        self.led: set[int] = set()
        """The passes under way that were begun here."""
        self.aborted: set[int] = set()
        """Passes of others that have failed, and are not to be begun here any more."""
        self._segments = Segments()
        self._since: dict[int, int] = {}  # by leader: its oldest pass

    def __repr__(self) -> str:
        return (
            f"<Context {self.id}: {len(self.sends)} sends, {len(self.recvs)} recvs, "
            f"{len(self.gradients)} gradients, {len(self.parts)} passes>"
        )

    def add_send(self, number: int, to: int, tensors: Sequence[Tensor]) -> Send:
        send = Send(Crossing(number, to, self.id, len(tensors)), tensors)
        if streams.in_use:
            send.devices = [tensor.device for tensor in tensors]
        with self.lock:
            self.sends[number] = send
            send.enter_late(len(self.sends))
        return send

    def add_recv(self, number: int, sender: int, node: Any) -> None:
        """Assign the result of `make_recv` to a message of this context."""
        node.crossing.become(number, sender, self.id)
        self.recvs[number] = node  # atomic, as is copying it: needs no lock

    def add_gradients(self, found: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Accumulate gradients of a leaf. Those that were handed out are not modified."""
        with self.lock:
            known = self.gradients
            for leaf, gradient in found:
                before = known.setdefault(leaf, gradient)
                if before is not gradient:
                    known[leaf] = add(before, gradient)

    def segments(self) -> Segments:
        """Its current graph on this worker; with the lock."""
        segments = self._segments
        if segments.count < len(self.sends):
            for send in [*islice(self.sends.values(), segments.count, None)]:
                segments.add(send)
        return segments

    def clear(self) -> list[Part]:
        """Free everything; returns the known passes."""
        with self.lock:
            self.is_released = True
            parts = list(self.parts.values())
            self.sends, self.recvs, self.gradients, self.parts = {}, {}, {}, {}
            self._segments = Segments()
        return parts

    def passes(self) -> int:
        """How many are in progress here."""
        with self.lock:
            parts = list(self.parts.values())  # atomic: passes end concurrently
        return sum(part.is_under_way for part in parts)

    def begin_pass(self, numbers: Numbers) -> tuple[int, int]:
        """The number of a new pass, and that of the oldest one begun here that is in progress.

        With the lock. Ends with `led.discard`.

        Raises:
            GradwireError: the context has ended.
        """
        if self.is_released:
            raise unknown(self.id)
        number = numbers.next()
        self.led.add(number)
        return number, min(self.led)

    def is_over(self, number: int) -> bool:
        """Whether a pass is known to have ended; with the lock."""
        return number in self.aborted or number < self._since.get(owner(number), 0)

    def forget_passes(self, number: int, since: int) -> None:
        """The leader of this pass has ended all before `since`; with the lock.

        Those still running here have failed, and the report of that must find them.
        """
        leader = owner(number)
        if since > self._since.get(leader, 0):
            self._since[leader] = since
            # Those begun here end meanwhile. A list of numbers is made atomically; one of pairs is
            # not: the collector may come in between, and with it all that runs when things go.
            for each in list(self.parts):
                part = self.parts.get(each)
                if part is None or part.is_under_way:
                    continue
                if each < since and owner(each) == leader:
                    self.parts.pop(each, None)


def add(before: Tensor, more: Tensor) -> Tensor:
    """The sum of two gradients, with a history if one has any, in any grad mode."""
    if before.layout is not torch.strided:
        before, more = more, before  # not implemented that way where one is dense
    if before.requires_grad or more.requires_grad:
        with torch.enable_grad():
            return before + more
    return before + more


inherited: Callable[[Contexts], Context | None] | None = None
"""The context of the script that goes on in this thread; set once scripts can make calls."""

_UNSET = Context(0)
_UNSET.is_released = True


class Contexts:
    """The contexts of one worker."""

    def __init__(self, worker: int) -> None:
        self._worker = worker
        self._numbers = Numbers(worker)
        self._lock = CheckedLock()
        self._contexts: dict[int, Context] = {}
        self._released = Memory()
        self._current: ContextVar[Context | None] = ContextVar(
            "gradwire context", default=_UNSET
        )

    def __repr__(self) -> str:
        return f"<Contexts of worker {self._worker}: {len(self._contexts)}>"

    def __len__(self) -> int:
        return len(self._contexts)

    def __iter__(self) -> Iterator[Context]:
        with self._lock:
            return iter(list(self._contexts.values()))

    def new(self) -> Context:
        """A new context, which becomes the current one of this thread.

        Raises:
            GradwireError: it already has one.
        """
        current = self.current()
        if current is not None:
            raise GradwireError(
                f"Already have an autograd context id for this thread: {current.id}. "
                "Contexts do not nest: end that one first"
            )
        number = self._numbers.next()
        context = self._contexts[number] = Context(number)
        self._current.set(context)
        return context

    def current(self) -> Context | None:
        context = self._current.get()
        if context is _UNSET and inherited is not None:
            context = inherited(self)
        return None if context is None or context.is_released else context

    @contextmanager
    def entered(self, context: Context | None) -> Iterator[None]:
        """Make a context the current one; None for no context."""
        before = self._current.get()
        self._current.set(context)
        try:
            yield
        finally:
            self._current.set(before)

    def run(
        self,
        context: Context,
        handler: Callable[[int, Any], Any],
        sender: int,
        message: Any,
    ) -> Any:
        """Handle a message in its context."""
        current = self._current
        before = current.set(context)
        try:
            return handler(sender, message)
        finally:
            current.reset(before)

    def get(self, number: int) -> Context:
        """The context with this id.

        Raises:
            GradwireError: there is none.
        """
        context = self._contexts.get(number)
        if context is None:
            raise unknown(number)
        return context

    def arrived(self, number: int) -> Context:
        """The context of an arriving message."""
        context = self._contexts.get(number)
        if context is not None:
            return context
        context = Context(number)
        with self._lock:
            if owner(number) != self._worker and number not in self._released:
                return self._contexts.setdefault(number, context)
        context.is_released = True
        return context

    def claimed(self, numbers: Iterable[int], worker: int) -> tuple[int, ...]:
        """A worker has contexts that were begun here: it will be told of their end.

        Returns those of them that have ended.
        """
        over = []
        for number in numbers:
            context = self._contexts.get(number)
            if context is not None:
                context.known.add(worker)
            if context is None or context.is_released:  # all others may know already
                over.append(number)
        return tuple(over)

    def remove(self, number: int) -> Context | None:
        """Remove a context from the table; None if it was not there."""
        if owner(number) == self._worker:  # a late message does not recreate it
            context = self._contexts.pop(number, None)
        else:
            with self._lock:
                context = self._contexts.pop(number, None)
                self._released.add(number)
        if context is not None and self._current.get() is context:
            self._current.set(None)
        return context


def unknown(number: int) -> GradwireError:
    return GradwireError(
        f"Could not find autograd context with id: {number} (its block has ended, or no call of "
        "it has come here)"
    )
