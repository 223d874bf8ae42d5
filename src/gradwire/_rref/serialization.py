"""References in messages: the numbers that replace them, and the bookkeeping at both ends.

A reference travels as five numbers: its owner, its value, the fork that the receiver will have (0
if that is the owner), a token by which the sender may ask for it, and 1 in replies: the receiver
then sends the token back when it has it. Who receives one from its owner has been counted in
already; from another holder, it has the owner count it in (`adoption.py`), before a request is
answered, or a reply used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .._rpc.agent import Agent
from .._rpc.futures import CallFuture
from ..errors import StaleReferenceError
from .adoption import Adoption, Adoptions
from .held_forks import HeldForks
from .ledger import Holding, Transit
from .messages import ADOPT, Adopt, spell
from .owned_values import OwnedValue, OwnedValues
from .reference import Core, RRef

_RETRY = 2.0  # seconds without a response before a retry


class ReferenceCarrier:
    """Carries the references of one worker (a `Carrier` of `_rpc/interceptors.py`)."""

    width = 5

    def __init__(
        self,
        agent: Agent,
        owned_values: OwnedValues,
        held_forks: HeldForks,
        adoptions: Adoptions,
        handle: Callable[[Core], RRef[Any]],
    ) -> None:
        self._agent = agent
        self._owned_values = owned_values
        self._held_forks = held_forks
        self._adoptions = adoptions
        self._handle = handle
        agent.handle(ADOPT, Adopt, self._adopted)

    def load(
        self, thing: Any, to: int, is_reply: bool
    ) -> tuple[tuple[int, ...], SentReference]:
        """Replace a departing reference by numbers.

        Raises:
            WorkerLostError: its owner is gone.
            Exception: why its value could not be created.
        """
        thing.check()
        core, parent = thing._core, 0
        owner = core.owner.id
        if isinstance(core, OwnedValue):
            fork = self._owned_values.fork(core, to)
        else:
            self._agent.peer(owner)
            core.register()
            parent = core.holding.fork
            fork = 0 if to == owner else self._held_forks.new_fork(owner)
        transit = Transit(Holding(owner, core.id, fork), parent, to, is_reply)
        token = self._held_forks.child_left(transit)
        fields = owner, core.id, fork, token, int(is_reply)
        return fields, SentReference(self._held_forks, token)

    def unload(
        self, fields: tuple[int, ...], sender: int
    ) -> tuple[RRef[Any], Adoption | None]:
        """Restore an arriving reference.

        Raises:
            StaleReferenceError: its value is gone, or its sender was told that it had not arrived.
            WorkerLostError: its owner is gone.
        """
        owner, number, fork, token, is_reply = fields
        if not self._held_forks.child_came(sender, token):
            raise StaleReferenceError(
                f"the reference to value {spell(number)} arrived too late: its sender was "
                "told that it had not arrived"
            )
        adoption = None
        if owner == self._agent.me.id:
            rref = self._handle(self._owned_values.use(number, fork, sender))
        else:
            holding = Holding(owner, number, fork)
            made_at = f"received from {self._agent.members.name(sender)}"
            info = self._agent.peer(owner).card.info
            is_counted = sender == owner
            core = self._held_forks.take(holding, info, made_at, is_counted=is_counted)
            rref = self._handle(core)
            if not is_counted:
                adoption = Adoption(self, holding, sender, token if is_reply else 0)
                if is_reply:
                    adoption.begin()
                else:
                    core.adoption = adoption
                    self._adoptions.add(adoption)
        if is_reply and adoption is None:
            self._held_forks.child_received(sender, token)
        return rref, adoption

    def ask_to_adopt(self, holding: Holding) -> CallFuture:
        message = Adopt(holding.value, holding.fork)
        return self._agent.request(holding.owner, message, _RETRY)

    def adopted(self, holding: Holding, sender: int, token: int) -> None:
        self._held_forks.fork_counted(holding)
        if token:
            self._held_forks.child_received(sender, token)

    def _adopted(self, sender: int, message: Adopt) -> bool:
        return self._owned_values.adopt(message.value, message.fork, sender)


class SentReference:
    """A reference in a message that was sent (a `Freight` of `_wire/frames.py`)."""

    __slots__ = ("_held_forks", "_token")

    def __init__(self, held_forks: HeldForks, token: int) -> None:
        self._held_forks = held_forks
        self._token = token

    def delivered(self) -> None:
        self._held_forks.child_settled(self._token, arrived=True)

    def in_doubt(self) -> None:
        self._held_forks.child_doubted(self._token)
