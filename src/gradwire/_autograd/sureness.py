"""Of which sends and recvs a worker is sure that gradients come: rule P8 of `pass_state.py`.

Pure, as that file. Only who is *curious* is told, so that passes in which nobody has to ask need no
message more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

from .actions import Piece, Plan


class Sureness:
    """Of one worker in one pass. `gone`: the recvs of which all is known.

    `touched` gets the pieces that should be looked at again; `piece_of` has those of sends.
    """

    def __init__(
        self,
        me: int,
        plan: Plan,
        gone: Set[int],
        touched: dict[int, None],
        piece_of: Mapping[int, int],
    ) -> None:
        self.sends: set[int] = set()
        """Those that gradients came or will come for, as far as was said."""
        self._me = me
        self._plan = plan
        self._gone = gone
        self._touched = touched
        self._vouched: set[int] = set()  # recvs that gradients will come from
        self._vouches: dict[int, list[int]] = {}  # those to be told of, by worker
        self._curious: set[int] = set()
        self._to_ask: set[int] = set()
        self._asked: set[int] = set()
        self._known: dict[int, tuple[int, ...]] = {}  # what pieces were looked at with
        self._piece_of = piece_of

    def heard(self, sender: int, sends: Iterable[int], *, asks: bool) -> None:
        """Gradients will come for these sends; and whether the sender wants to know the same."""
        for send in sends:
            self._assure(send)
        if asks:
            self._wonder(sender)

    def tell(self, to: int) -> tuple[tuple[int, ...], bool]:
        """What a message that leaves now says: of which of its sends we are sure; and do we ask."""
        asks = to in self._to_ask
        self._to_ask.discard(to)
        return tuple(self._vouches.pop(to, ())), asks

    def whom_to_tell(self) -> Set[int]:
        return self._vouches.keys() | self._to_ask

    def has_news(self, worker: int) -> bool:
        return worker in self._vouches or worker in self._to_ask

    def vouch(self, recvs: Iterable[int]) -> None:
        """Gradients will come from these."""
        for recv in recvs:
            worker = self._plan.recvs[recv]
            if worker not in self._curious or recv in self._gone:
                continue
            if recv not in self._vouched:
                self._vouched.add(recv)
                if worker == self._me:
                    self._assure(recv)
                else:
                    self._vouches.setdefault(worker, []).append(recv)

    def ask(self, sends: Iterable[int]) -> None:
        """Have it said for which of these gradients will come."""
        for worker in sorted({self._plan.sends[send] for send in sends} - self._asked):
            self._asked.add(worker)
            if worker != self._me:
                self._to_ask.add(worker)
            self._wonder(worker)  # it may need to know, too

    def is_wanted(self, piece: Piece) -> bool:
        """Whether someone is curious about one of its recvs, of which not all is known."""
        return any(
            self._plan.recvs[recv] in self._curious
            for recv in piece.recvs
            if recv not in self._gone and recv not in self._vouched
        )

    def is_new(self, index: int, sends: tuple[int, ...]) -> bool:
        """Whether to look what a piece reaches with these sends, of which we are sure now."""
        if self._known.get(index) == sends or not self.is_wanted(
            self._plan.pieces[index]
        ):
            return False
        self._known[index] = sends
        return True

    def _assure(self, send: int) -> None:
        if send in self._plan.sends and send not in self.sends:
            self.sends.add(send)
            self._touched[self._piece_of[send]] = None

    def _wonder(self, worker: int) -> None:
        """A worker is to be told of which recvs we are sure."""
        if worker in self._curious:
            return
        self._curious.add(worker)
        for index, piece in enumerate(self._plan.pieces):
            if any(self._plan.recvs[recv] == worker for recv in piece.recvs):
                self._known.pop(index, None)
                self._touched[index] = None
