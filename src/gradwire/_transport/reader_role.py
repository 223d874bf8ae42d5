"""Who reads a shared connection, and what a thread that waits for a response does next.

Responses come in any order, and any number of threads wait for them. At most one of them reads, for
everyone; while nobody waits, the poller does. Pure: no socket, no clock, no lock. `connection.py`
calls every method with its lock held and carries out what they return.

A response is at any moment in one of four places: not yet read; read (`unopened`); being delivered
by some thread (`in_delivery`); delivered, which its waiter sees by itself. These hold, so that no
waiter misses it:

R1  A waiter reads only if nothing that was read is left to be delivered, and its own response is
    not being delivered. Otherwise it would block in the socket for what has already come.
R2  Who reads gives up the role before delivering, because delivering runs user callbacks, which may
    wait on the same connection, or without end.
R3  Whenever the role is free and there is something for a sleeping waiter to do, to read or to
    deliver, one of them is woken. If none sleeps, the poller reads, at once or, if a waiter will be
    back, after a moment.

    step(w):    nobody reads, nothing unopened ──> READ        something unopened ──> DELIVER
                another reads, or w is being delivered ──> SLEEP (until done, or woken by R3)
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Generic, Protocol, TypeVar


class Numbered(Protocol):
    """What is delivered: a frame."""

    call: int


class Wakeable(Protocol):
    """Wakes a sleeping waiter. A wake-up before it sleeps is remembered."""

    def ring(self) -> None: ...


N = TypeVar("N", bound=Numbered)
W = TypeVar("W", bound=Wakeable)


class Step(Enum):
    """What a waiter does next."""

    READ = auto()
    DELIVER = auto()
    SLEEP = auto()


@dataclass(slots=True)
class ReaderRole(Generic[N, W]):
    """The state of reading on one connection."""

    unopened: deque[N] = field(default_factory=deque)
    """Read, in order, and not yet delivered. Whoever reads appends to it."""
    is_taken: bool = False
    """Someone reads, a waiter or the poller."""
    waiters: int = 0
    """Threads between `enter` and `leave`."""
    in_delivery: Counter[int] = field(default_factory=Counter)
    sleeping: dict[int, W] = field(default_factory=dict)
    """By call, the newest last."""

    def enter(self) -> bool:
        """A thread begins to wait. True if it is the first, so the poller need not watch."""
        self.waiters += 1
        return self.waiters == 1

    def step(self, call: int, wake: W) -> Step:
        """What the waiter for this call does next. After READ it has the role."""
        self.sleeping.pop(call, None)
        if self.unopened:
            return Step.DELIVER
        if self.is_taken or self.in_delivery[call]:
            self.sleeping[call] = wake
            return Step.SLEEP
        self.is_taken = True
        return Step.READ

    def take(self) -> bool:
        """Whether the poller may read. Then it has the role."""
        if self.is_taken:
            return False
        self.is_taken = True
        return True

    def give_up(self) -> W | None:
        """Who read is done with it. The sleeping waiter to be woken, if there is something for
        it."""
        self.is_taken = False
        return self.next_sleeper()

    def open_next(self) -> N | None:
        """What the calling thread is to deliver now; `delivered` is to follow."""
        if not self.unopened:
            return None
        frame = self.unopened.popleft()
        self.in_delivery[frame.call] += 1
        return frame

    def delivered(self, call: int) -> None:
        self.in_delivery[call] -= 1
        if not self.in_delivery[call]:
            del self.in_delivery[call]

    def leave(self, call: int) -> W | None:
        """A thread waits no more; as `give_up`."""
        self.waiters -= 1
        self.sleeping.pop(call, None)
        return None if self.is_taken else self.next_sleeper()

    def next_sleeper(self) -> W | None:
        """The newest sleeper that has something to do now that nobody reads."""
        for call in reversed(self.sleeping):
            if self.unopened or not self.in_delivery[call]:
                return self.sleeping.pop(call)
        return None
