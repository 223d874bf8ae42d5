"""Which slots of a pass are confirmed to get gradients: rule P8 of `pass_state.py`.

Pure, as that file. Only workers that *subscribed* are told, so a pass in which nobody has to ask
sends no message more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

from .actions import Piece, Plan, Slot


class Confirmations:
    """Those of one worker in one pass. `gone`: the slots of recvs of which all is known.

    `touched` gets the pieces that should be looked at again; `piece_of` has those of sends.
    """

    def __init__(
        self,
        me: int,
        plan: Plan,
        gone: Set[Slot],
        touched: dict[int, None],
        piece_of: Mapping[Slot, int],
    ) -> None:
        self.sends: set[Slot] = set()
        """Those that gradients came or will come for, as far as was said."""
        self.subscribers: set[int] = set()
        """The workers that want to know of their slots whether gradients will come."""
        self._me = me
        self._plan = plan
        self._gone = gone
        self._touched = touched
        self._confirmed: set[Slot] = set()  # of recvs
        self._to_tell: dict[int, list[Slot]] = {}  # of those, by worker
        self._to_ask: set[int] = set()
        self._asked: set[int] = set()
        self._known: dict[int, tuple[Slot, ...]] = {}  # what pieces were looked at with
        self._piece_of = piece_of

    def heard(self, sender: int, sends: Iterable[Slot], *, asks: bool) -> None:
        """Gradients will come for these sends; and whether the sender wants to know the same."""
        for send in sends:
            self._confirm_send(send)
        if asks:
            self._subscribe(sender)

    def tell(self, to: int) -> tuple[tuple[Slot, ...], bool]:
        """What a message that leaves now says: which of its sends are confirmed; do we ask."""
        asks = to in self._to_ask
        self._to_ask.discard(to)
        return tuple(self._to_tell.pop(to, ())), asks

    def whom_to_tell(self) -> Set[int]:
        return self._to_tell.keys() | self._to_ask

    def has_news(self, worker: int) -> bool:
        return worker in self._to_tell or worker in self._to_ask

    def confirm(self, recvs: Iterable[Slot]) -> None:
        """Gradients will come from these."""
        for recv in recvs:
            worker = self._plan.recvs[recv]
            if worker not in self.subscribers or recv in self._gone:
                continue
            if recv not in self._confirmed:
                self._confirmed.add(recv)
                if worker == self._me:
                    self._confirm_send(recv)
                else:
                    self._to_tell.setdefault(worker, []).append(recv)

    def ask(self, sends: Iterable[Slot]) -> None:
        """Have it said for which of these gradients will come."""
        for worker in sorted({self._plan.sends[send] for send in sends} - self._asked):
            self._asked.add(worker)
            if worker != self._me:
                self._to_ask.add(worker)
            self._subscribe(worker)  # it may need to know, too

    def is_wanted(self, piece: Piece) -> bool:
        """Whether a subscriber waits for one of its recvs, of which not all is known."""
        return any(
            self._plan.recvs[recv] in self.subscribers
            for recv in piece.recvs
            if recv not in self._gone and recv not in self._confirmed
        )

    def is_new(self, index: int, sends: tuple[Slot, ...]) -> bool:
        """Whether to look what a piece reaches with these sends, which are confirmed now."""
        if self._known.get(index) == sends or not self.is_wanted(
            self._plan.pieces[index]
        ):
            return False
        self._known[index] = sends
        return True

    def _confirm_send(self, send: Slot) -> None:
        if send in self._plan.sends and send not in self.sends:
            self.sends.add(send)
            self._touched[self._piece_of[send]] = None

    def _subscribe(self, worker: int) -> None:
        """A worker is to be told which recvs are confirmed."""
        if worker in self.subscribers:
            return
        self.subscribers.add(worker)
        for index, piece in enumerate(self._plan.pieces):
            if any(self._plan.recvs[recv] == worker for recv in piece.recvs):
                self._known.pop(index, None)
                self._touched[index] = None
