"""What one worker knows of one backward pass: which messages' gradients have come, and what to run.

Pure: no torch, no I/O, no locks, no clock. Events come in as method calls; what must be done goes
out as actions, which `pass_driver.py` carries out.

A *source* is a message that left this worker, or the roots where the pass begins. The unit of work
is a *segment*: the part of the local graph that some sources reach, run by one call of torch's
engine. A *slot* is one tensor of a message. The gradients for all slots of a message come
together; a slot that has none among them is void, as is a message for which none will come.

A pass has three steps. Each is a tree of requests: whoever is asked answers when all that follows
from the request is done, with what there is for the asker. So a step is over everywhere when the
requests of the worker that leads the pass are answered.

RUN       A segment runs when gradients have come for all its sources. Most have one source, and
          then a pass is over with this step: each worker runs, sends on, and answers. What came
          for a segment that lacks others is *parked*, and the leader told so.
ANNOUNCE  If something is parked: which sources will get gradients, and which never will? What is
          parked will be run, and the slots of other workers that it reaches will get gradients;
          these *announce* what they reach in turn. What has not been announced when this step is
          over is void: a result that nobody uses, a message that never arrived, another pass's.
REST      A segment runs with the sources that were announced: at once if it has roots, else when
          the newest of them has its gradients. Those that have not come yet are waited for inside
          the engine, which enters them last, the newest first.

These hold:

P1  Nothing that gets no gradient is run: a segment is run with the slots that have gradients, or
    were announced, and no others.
P2  What was announced comes, or is told to be void: a Function may return None. Someone may wait
    for it, so that is said as soon as it is known: where the recv is run and has no gradient, or
    cannot be reached any more by what the segment is run with.
P3  REST cannot deadlock. Say worker A waits for message s. Its gradients come from the matching
    recv r on B, which was made after s. r lacks a gradient only because a source that reaches it
    has not run, and that was made after r. If it waits, it waits for a message sent at or after it.
    So along any chain of waiting workers the times of creation increase, and a chain cannot close.
P4  Messages may be repeated: what is known already changes nothing. Messages that left after the
    pass began here are no part of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple, Protocol

ROOTS = 0
"""Stands for the roots of a pass among the numbers of messages."""

Indexes = tuple[int, ...]
"""Slots of one message."""
Slot = tuple[int, int]
"""A message, and one of its slots."""


class Step(IntEnum):
    """A step of a pass."""

    RUN = 0
    ANNOUNCE = 1
    REST = 2


class Plan(Protocol):
    """The segments of a worker, as one pass sees them."""

    def sources(self, source: int) -> Sequence[int]:
        """The sources of the segment that this one belongs to, by creation; roots come first.

        Empty if it is not part of this pass.
        """


class Run(NamedTuple):
    """Run a segment from these sources, with these slots of each (of roots: none)."""

    sources: Mapping[int, Indexes]
    waits: bool = False
    """Some of the gradients have not come yet."""


class Reach(NamedTuple):
    """Find the slots of recvs that these sources reach, and announce them (`reached`)."""

    sources: Mapping[int, Indexes]


class Narrow(NamedTuple):
    """Find the recvs that these sources of a segment still reach (`narrowed`)."""

    sources: Mapping[int, Indexes]


class Wake(NamedTuple):
    """The outcome of a message that the engine may wait for is known."""

    send: int


class Void(NamedTuple):
    """Report to those that wait for the gradients of these recvs that none will come."""

    recvs: Sequence[int]


Action = Run | Reach | Narrow | Wake | Void


class PassState:
    """One pass on one worker."""

    def __init__(self, plan: Plan) -> None:
        self.step = Step.RUN
        self.parked: dict[int, Indexes] = {}
        """What has come and waits for others: by source, the slots that have gradients."""
        self._plan = plan
        self._came: dict[int, Indexes] = {}  # what arrived for these; empty: void
        self._over: set[int] = set()  # sources whose segment has started
        self._waiting: set[int] = set()  # those of them that the engine may wait for
        self._announced: dict[int, set[int]] = {}  # slots, by message
        self._reached: set[int] = set()  # parked sources that have announced
        self._expected: dict[int, set[int]] = {}  # recvs announced, by source
        self._told: set[Slot] = set()  # slots of recvs that were announced

    def came(self, source: int, slots: Indexes) -> list[Action]:
        """Gradients for these slots of a message, or for none; or the pass's roots."""
        if source in self._came or not (sources := self._plan.sources(source)):
            return []  # P4
        self._came[source] = slots
        if source in self._over:
            if source not in self._waiting:
                return []
            self._waiting.discard(source)
            return [Wake(source)]
        is_any = bool(slots) or source == ROOTS
        if len(sources) == 1 and is_any and not self._announced:  # the usual case
            self._over.add(source)
            return [Run({source: slots})]
        if is_any:
            self.parked[source] = slots
        return self._start(sources)

    def _start(self, sources: Sequence[int]) -> list[Action]:
        """Start a segment if it is runnable."""
        came, over = self._came, self._over
        if self.step is not Step.REST:
            if not all(source in came or source in over for source in sources):
                return []
            left = [source for source in sources if source not in over]
            return self._begin(left, [each for each in left if self._is_used(each)])
        left = [source for source in sources if source not in over]
        used = [source for source in left if self._is_used(source)]
        if used and used[0] != ROOTS and used[-1] not in came:
            return self._narrow(used)
        return self._begin(left, used)

    def _narrow(self, used: Iterable[int]) -> list[Action]:
        """P2: whether there is less than was announced."""
        if not self._expected:
            return []
        return [Narrow({source: self._slots(source) for source in used})]

    def _begin(self, left: Sequence[int], used: Sequence[int]) -> list[Action]:
        """Run the rest of a segment, from those of its sources that are used."""
        self._over.update(left)
        if not used:
            return self._void(left, ())
        for source in used:
            self.parked.pop(source, None)
        waits = [source for source in used if source not in self._came]
        self._waiting.update(waits)
        run = Run({each: self._slots(each) for each in used}, bool(waits))
        return [*self._narrow(used), run]

    def _is_used(self, source: int) -> bool:
        """Whether a source has gradients, or will get some."""
        if source in self._came:
            return source == ROOTS or bool(self._came[source])
        return source in self._announced

    def _slots(self, source: int) -> Indexes:
        if source in self._came:
            return self._came[source]
        return tuple(sorted(self._announced[source]))

    def fate(self, send: int) -> Indexes | None:
        """The slots of a message that have gradients; None if that is not known yet."""
        return self._came.get(send)

    def empty(self, recv: int) -> list[Action]:
        """A recv has run without gradients."""
        is_expected = False
        for recvs in self._expected.values():
            if recv in recvs:
                recvs.discard(recv)
                is_expected = True
        return [Void([recv])] if is_expected else []

    def narrowed(self, sources: Iterable[int], recvs: Iterable[int]) -> list[Action]:
        """The segment of these sources reaches no other recvs any more."""
        (first, *_) = sources
        return self._void(self._plan.sources(first), recvs)

    def _void(self, sources: Iterable[int], but: Iterable[int]) -> list[Action]:
        """P2: what these sources have announced will not come, with these exceptions."""
        expected: set[int] = set()
        for source in sources:
            expected |= self._expected.get(source, set())
        missing = expected.difference(but)
        for recvs in self._expected.values():
            recvs -= missing
        return [Void(sorted(missing))] if missing else []

    def announce(self, slots: Iterable[Slot] = ()) -> list[Action]:
        """These slots of messages will get gradients, and so will what is parked here."""
        self.step = max(self.step, Step.ANNOUNCE)
        found: dict[int, dict[int, Indexes]] = {}  # by the first source of a segment
        for source, parked in self.parked.items():
            if source not in self._reached:
                self._reached.add(source)
                first = self._plan.sources(source)[0]
                found.setdefault(first, {})[source] = parked
        for message, index in slots:
            sources = () if message in self._came else self._plan.sources(message)
            known = self._announced.setdefault(message, set()) if sources else ()
            if sources and index not in known:
                self._announced[message].add(index)
                fresh = found.setdefault(sources[0], {})
                fresh[message] = (*fresh.get(message, ()), index)
        return [Reach(sources) for sources in found.values()]

    def reached(self, sources: Iterable[int], slots: Sequence[Slot]) -> list[Slot]:
        """These sources reach these slots of recvs. Returns those that are still to be announced:
        other sources of the segment may have announced them."""
        fresh = [slot for slot in slots if slot not in self._told]
        self._told.update(fresh)
        recvs = {recv for recv, _ in slots}
        for source in sources:
            self._expected.setdefault(source, set()).update(recvs)
        return fresh

    def rest(self) -> list[Action]:
        """Everything that will get gradients has been announced."""
        if self.step is Step.REST:
            return []
        self.step = Step.REST
        actions = []
        for source in list(self.parked):
            if source in self.parked:
                actions += self._start(self._plan.sources(source))
        return actions
