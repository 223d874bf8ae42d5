"""Progress of one backward pass on one worker.

Pure: no torch, no I/O, no locks. What happens comes in as method calls; what must be done next goes
out as actions, which `pass_driver.py` carries out. The rules:

The unit is a *slot*: one tensor of a message, of which some may be used and others not. The
gradients for all slots of a message come together, and those that are missing are void.

P1  Every slot of a send gets a gradient, or is told that none will come (it is *void*), once. What
    is said again changes nothing.
P2  A piece of the graph with roots is run at once. One without is run when the newest of its slots
    that are not void has its gradient; if all are void it is skipped. But first it must be known
    of each slot whether a gradient will come: torch would run what lies behind a void one, with
    hooks and all.
P3  A slot of a recv that no source reaches that is not void makes the matching slot of the send
    void. If all slots of a message are, that is told at the first moment it is known, which may be
    before anything is run. The only reason to wait is that another message or answer to the same
    worker is about to leave. A void slot of a message that will still deliver others is told with
    these, or before to who subscribed (P8).
P4  A worker that has our sends and has not been heard in this pass is told that it goes on, so that
    it finds out which of them are void there. That can wait until nothing is being run here that
    does not wait itself, and all our questions are answered: likely it is told by then.
P5  The first message of a worker to another lists the messages that arrived there. Those not listed
    never arrived: their call failed, or its answer came too late. Their slots are void.
P6  Every message is a question. It is answered as soon as whoever took it has nothing more to run,
    with what there is for the asker by then.
P7  Ending (Dijkstra and Scholten): the first message that a worker gets engages it. It owes its
    engager the word that it is done: all its pieces are, all its questions are answered, and all
    whom it engaged are done. So when the worker that began the pass is done, all are. The word goes
    with an answer, or by itself. Who is done has told everyone all there is to tell: once it has
    answered all our questions, sends to it that are still open are void.
P8  Whoever has a piece that could be run but for slots of which it does not know asks the workers
    they went to, and so *subscribes*: those say which slots of their recvs are void, and which are
    confirmed, because a root reaches them, or a slot that a gradient came for or will. To find out,
    they may have to ask in turn.
P9  After a failure nothing more is run; those who owe an answer, or their end, are told to let go.

Why P2 cannot deadlock: say worker A waits for message s. Its gradients come from the matching recv
r on B, which was made after s. r lacks a gradient only because some source that reaches one of its
slots has not run; that source was made after r. If it waits, it waits for a message sent at or
after it. So along any chain of waiting workers the times of creation increase, and a chain cannot
close. So it is with confirmations: that of a slot of s depends on r, that of r on sources made
after it, and the newest are the roots, or recvs that nothing reaches.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from .actions import (
    Abort,
    Action,
    Answer,
    Arrived,
    Finish,
    Narrow,
    Plan,
    Reach,
    Run,
    Slot,
    Tell,
    Wake,
    Words,
)
from .confirmations import Confirmations

_IDLE, _RUNNING, _DONE = range(3)


class Progress:
    """One pass on worker `me`. `engager`: who brought us into it; None: it began here."""

    def __init__(self, me: int, plan: Plan, engager: int | None = None) -> None:
        self.me = me
        self.plan = plan
        self.engager = engager
        self.has_failed = False
        self.is_over = False
        self._fates: dict[Slot, bool | None] = dict.fromkeys(plan.sends)
        self._slots = _by_message(plan.sends)
        self._piece_of = {s: i for i, p in enumerate(plan.pieces) for s in p.sends}
        self._states = [_IDLE] * len(plan.pieces)
        self._open = len(plan.pieces)  # pieces that are not done
        self._running = 0  # runs under way that do not wait
        self._waited = _count(plan.sends.values())  # slots not decided, by worker
        self._owed: dict[int, int] = {}  # messages of ours that are not answered
        self._unanswered = 0  # all of them
        self._engaged: set[int] = set()  # those who owe us their end
        self._ended: set[int] = set()  # those who have told it
        self._told: set[int] = set()
        self._heard: set[int] = set()
        # Workers that wait for what never arrived, or have something to go on with.
        self._unlisted: set[int] = set()
        # Slots of recvs whose gradients have left, or of which there will be none.
        self._gone: set[Slot] = set()
        self._live = _by_message(plan.recvs)  # and those that may still get some
        self._voids: dict[int, list[Slot]] = {}  # what is to be told, by worker
        self._urgent: set[int] = set()  # who has to be told now
        # Workers that a message or answer is about to leave for.
        self._promised: dict[int, int] = {}
        self._actions: list[Action] = []
        # Pieces to look at once all that came is known.
        self._touched: dict[int, None] = {}
        self._confirmations = Confirmations(
            me, plan, self._gone, self._touched, self._piece_of
        )
        # By piece, the sends with which it is run, and to which it was, or is to be, narrowed.
        self._runs: dict[int, tuple[Slot, ...]] = {}
        self._kept: dict[int, tuple[Slot, ...]] = {}
        self._narrowing: dict[int, tuple[Slot, ...]] = {}
        self._looking = 0  # at what pieces reach: what is found can be told at once

    # What happens

    def begun(self) -> list[Action]:
        """We take part from now on. The message that engaged us was `heard` before."""
        recvs = self.plan.recvs
        if recvs:
            reached = {recv for piece in self.plan.pieces for recv in piece.recvs}
            for recv in recvs:
                if recv not in reached:
                    self._void(recv)
        if self.me in self._waited:
            self._void_unlisted(self.me, self._live)  # its call failed
        for index, state in enumerate(self._states):
            if state == _IDLE:
                self._start(index)
        return self._next()

    def resumed(self, arrived: Iterable[Arrived], parked: Iterable[int]) -> None:
        """The pass was begun directly: what has arrived here, and who else is to go on with it.

        Said before it has begun.
        """
        self._arrive(arrived)
        self._unlisted.update(worker for worker in parked if worker != self.me)

    def heard(self, sender: int, words: Words, arrived: Iterable[Arrived]) -> None:
        """A message of another worker. Say `begun` or `settled` next, and `answer` at last."""
        self._promised[sender] = self._promised.get(sender, 0) + 1
        self._hear(sender, words)
        self._arrive(arrived)

    def answer(self, to: int) -> Words | None:
        """What the answer to a message must say; None: nothing."""
        self._promised[to] -= 1
        unlisted = self._unlisted - self._told
        if self.is_over or not (to in unlisted or self._has_news(to)):
            return None
        return self._words(to)

    def answered(self, by: int, answer: Answer) -> list[Action]:
        """One of our messages was answered."""
        if answer.words is not None:
            self._hear(by, answer.words)
        self._arrive(answer.arrived)
        self._owed[by] -= 1
        self._unanswered -= 1
        if answer.is_done:
            self._ended.add(by)
        elif answer.is_engaged and by not in self._ended:
            self._engaged.add(by)
        if by in self._ended:
            self._end(by)
        return self._next()

    def ended(self, worker: int, arrived: Iterable[Arrived]) -> list[Action]:
        """A worker that we engaged is done; this came with it."""
        self._arrive(arrived)
        self._ended.add(worker)
        self._end(worker)
        return self._next()

    def settled(self) -> list[Action]:
        """What follows from what was heard."""
        return self._next()

    def delivered_here(self, arrived: Arrived) -> list[Action]:
        """Gradients for a send, from a recv of this same worker."""
        self._arrive([arrived])
        return self._next()

    def narrowed(
        self, piece: int, sends: tuple[Slot, ...], recvs: Iterable[Slot]
    ) -> list[Action]:
        """With these sends, which are not void, a piece reaches these recvs only."""
        reached = set(recvs)
        for recv in self.plan.pieces[piece].recvs:
            if recv not in reached:
                self._void(recv)
        if len(sends) < len(self._kept.get(piece, self.plan.pieces[piece].sends)):
            self._kept[piece] = sends  # or it was overtaken
        if self._states[piece] == _RUNNING:
            self._confirm_all(piece)
        return self._next()

    def reached(self, recvs: Iterable[Slot]) -> list[Action]:
        """Sources of a piece that gradients come for reach these recvs."""
        self._looking -= 1
        self._confirmations.confirm(recvs)
        return self._next()

    def left(self, recv: int) -> None:
        """The gradients of a message's recv are on their way."""
        slots = self._live.get(recv)
        if not slots:
            return
        self._gone.update(slots)
        slots.clear()
        for worker, voids in list(self._voids.items()):  # it says so itself
            self._voids[worker] = [slot for slot in voids if slot[0] != recv]
            if not self._voids[worker]:
                del self._voids[worker]

    def came_empty(self, recv: int) -> list[Action]:
        """A message's recv was run, and got no gradients."""
        for slot in tuple(self._live.get(recv, ())):
            self._void(slot)
        return self._next()

    def ran(self, run: Run) -> list[Action]:
        """A piece is done."""
        self._close(run.piece)
        if not run.may_wait:
            self._running -= 1
            self._promise(run.piece, -1)
        return self._next()

    def speak(self, to: int) -> Words:
        """What a message that leaves now must say; it is owed an answer."""
        self._owed[to] = self._owed.get(to, 0) + 1
        self._unanswered += 1
        return self._words(to)

    def failed(self) -> list[Action]:
        """The pass is over, here or elsewhere."""
        if self.is_over:
            return []
        self.has_failed = self.is_over = True
        waiting = [send for send in self._slots if self.fate(send) is None]
        owing = self._engaged.union(w for w, count in self._owed.items() if count > 0)
        return [*map(Wake, waiting), *map(Abort, sorted(owing))]

    # What is known

    def fate(self, send: int) -> bool | None:
        """Whether a message has gradients; None: not known yet."""
        fates = [self._fates[slot] for slot in self._slots[send]]
        return True if True in fates else None if None in fates else False

    def have_roots_run(self) -> bool:
        """Whether nothing is left that has roots."""
        pieces = zip(self.plan.pieces, self._states, strict=True)
        return all(state == _DONE for piece, state in pieces if piece.has_roots)

    def is_expecting(self, worker: int) -> bool:
        """Whether something is still to come from a worker."""
        return (
            worker == self.engager
            or worker in self._engaged
            or self._waited.get(worker, 0) > 0
            or self._owed.get(worker, 0) > 0
        )

    # What follows

    def _words(self, to: int) -> Words:
        voids = tuple(self._voids.pop(to, ()))
        self._urgent.discard(to)
        awaiting = sum([worker == to for worker in self.plan.sends.values()])
        confirmed, asks = self._confirmations.tell(to)
        if to in self._told:
            return Words(voids, None, awaiting, confirmed, asks)
        self._told.add(to)
        recvs = self.plan.recvs.items()
        listed = dict.fromkeys([slot[0] for slot, worker in recvs if worker == to])
        return Words(voids, tuple(listed), awaiting, confirmed, asks)

    def _hear(self, sender: int, words: Words) -> None:
        for send in words.voids:
            self._resolve(send, has_gradients=False)
        self._confirmations.heard(sender, words.confirmed, asks=words.asks)
        if words.listed is not None:
            known = {*words.listed, *[message for message, _ in words.voids]}
            self._void_unlisted(sender, known)
        self._heard.add(sender)
        if words.awaiting != sum([w == sender for w in self.plan.recvs.values()]):
            self._unlisted.add(sender)

    def _end(self, worker: int) -> None:
        """P7: a worker is done."""
        self._engaged.discard(worker)
        if self._waited.get(worker) and not self._owed.get(worker):
            self._void_unlisted(worker, ())

    def _arrive(self, arrived: Iterable[Arrived]) -> None:
        for send, present in arrived:
            for slot in self._slots.get(send, ()):
                self._resolve(slot, has_gradients=slot[1] in present)

    def _resolve(self, slot: Slot, *, has_gradients: bool) -> None:
        if self._fates.get(slot, True) is not None:
            return  # P1; or made after we began, and so no part of this pass
        self._fates[slot] = has_gradients
        self._waited[self.plan.sends[slot]] -= 1
        piece, send = self._piece_of[slot], slot[0]
        if self._states[piece] != _RUNNING:
            self._touched[piece] = None
        elif self.fate(send) is not None:
            self._actions.append(Wake(send))

    def _start(self, index: int) -> None:
        """Start a piece if it can be run; otherwise request what it lacks."""
        piece, state = self.plan.pieces[index], self._states[index]
        if state == _RUNNING:
            self._confirm_all(index)
        if state != _IDLE:
            return
        sends = tuple(s for s in piece.sends if self._fates[s] is not False)
        if not sends and not piece.has_roots:
            self._close(index)
            return
        confirmed = self._confirmations.sends
        unknown = [s for s in sends if self._fates[s] is None and s not in confirmed]
        can_run = piece.has_roots or self._fates[sends[-1]]  # P2
        if can_run and not unknown:
            self._states[index] = _RUNNING
            may_wait = any(self._fates[send] is None for send in sends)
            self._actions.append(Run(index, sends, may_wait))
            self._runs[index] = sends
            self._confirm_all(index)
            if not may_wait:
                self._running += 1
                self._promise(index, 1)
            return
        if self._narrowing.get(index, piece.sends) != sends:  # P3
            self._narrowing[index] = sends
            self._actions.append(Narrow(index, sends))
        if unknown and (can_run or self._confirmations.is_wanted(piece)):
            self._confirmations.ask(unknown)
        known = tuple(send for send in sends if send not in unknown)
        if (known or piece.has_roots) and self._confirmations.is_new(index, known):
            self._looking += 1
            self._actions.append(Reach(index, known))

    def _confirm_all(self, index: int) -> None:
        """Of a piece that is run: it reaches all recvs that are not void, once that is known."""
        piece, sends = self.plan.pieces[index], self._runs[index]
        if sends in (piece.sends, self._kept.get(index)):
            self._confirmations.confirm(piece.recvs)

    def _close(self, index: int) -> None:
        self._states[index] = _DONE
        self._open -= 1
        for recv in self.plan.pieces[index].recvs:
            self._void(recv)

    def _void(self, slot: Slot) -> None:
        if slot in self._gone:
            return
        self._gone.add(slot)
        worker, live = self.plan.recvs[slot], self._live[slot[0]]
        live.remove(slot)
        if worker == self.me:
            self._resolve(slot, has_gradients=False)
            return
        self._voids.setdefault(worker, []).append(slot)
        if not live:  # otherwise the gradients of the others will tell
            self._urgent.add(worker)

    def _void_unlisted(self, worker: int, listed: Container[int]) -> None:
        for send, to in self.plan.sends.items():  # P5
            if to == worker and send[0] not in listed:
                self._resolve(send, has_gradients=False)

    def _promise(self, piece: int, by: int) -> None:
        for recv in self.plan.pieces[piece].recvs:
            worker = self.plan.recvs[recv]
            self._promised[worker] = self._promised.get(worker, 0) + by

    def _next(self) -> list[Action]:
        while self._touched:
            self._start(self._touched.popitem()[0])
        actions, self._actions = self._actions, []
        if self.is_over:
            return []
        is_done = not (self._open or self._unanswered or self._engaged or self._looking)
        to_tell = {*self._urgent, *self._unlisted, *self._confirmations.whom_to_tell()}
        to_tell.update(self._voids.keys() & self._confirmations.subscribers)
        if not (is_done or self._running or self._unanswered):  # P4
            waited = (w for w, count in self._waited.items() if count > 0)
            to_tell.update(w for w in waited if w not in self._heard)
        due: list[int] = []
        if not self._looking:
            due = [w for w in to_tell if w != self.me and self._is_due(w)]
        if is_done and not set(due) - {self.engager}:  # P7
            self.is_over = True
            actions.append(Finish())
        elif due:
            return [*(Tell(to, self.speak(to)) for to in sorted(due)), *actions]
        return actions

    def _is_due(self, worker: int) -> bool:
        """Whether to tell a worker now: nothing else will, and there is something to tell."""
        if self._promised.get(worker, 0) > 0:
            return False  # P3
        return worker not in self._told or self._has_news(worker)

    def _has_news(self, worker: int) -> bool:
        is_void = worker in self._voids and worker in self._confirmations.subscribers
        return is_void or worker in self._urgent or self._confirmations.has_news(worker)


def _count(workers: Iterable[int]) -> dict[int, int]:
    counts: dict[int, int] = {}
    for worker in workers:
        counts[worker] = counts.get(worker, 0) + 1
    return counts


def _by_message(slots: Iterable[Slot]) -> dict[int, list[Slot]]:
    found: dict[int, list[Slot]] = {}
    for slot in slots:
        found.setdefault(slot[0], []).append(slot)
    return found
