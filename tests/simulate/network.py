"""A simulated network: messages take their time, overtake each other, get lost and come twice."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .simulation import Simulation

Deliver = Callable[[int, int, Any], None]
"""`deliver(sender, to, message)`"""


@dataclass(frozen=True)
class Faults:
    """How likely each is for a message, and how long one takes."""

    loss: float = 0.0
    repetition: float = 0.0
    delays: tuple[float, ...] = (0.001,)
    """The longest that a message may take: for each, one of these."""

    @classmethod
    def drawn(cls, chance: random.Random) -> Faults:
        return cls(
            loss=chance.choice((0.0, 0.0, 0.1, 0.4)),
            repetition=chance.choice((0.0, 0.2)),
            delays=chance.choice(((0.001,), (0.5,), (0.001, 0.001, 0.1, 10.0))),
        )


class Network:
    """Between workers that are numbers."""

    def __init__(
        self, simulation: Simulation, faults: Faults, deliver: Deliver
    ) -> None:
        self.faults = faults
        self.sent = 0
        self._simulation = simulation
        self._deliver = deliver
        self._cut: dict[frozenset[int], float] = {}
        """Pairs of workers between which messages get lost, and until when."""

    def cut(self, one: int, other: int, seconds: float) -> None:
        """Lose everything between two workers for a while."""
        self._simulation.note(f"{one} and {other} are cut off for {seconds:.3f} s")
        self._cut[frozenset((one, other))] = self._simulation.now + seconds

    def mend(self) -> None:
        """From now on nothing goes wrong."""
        self.faults = Faults()
        self._cut.clear()

    def send(self, sender: int, to: int, message: Any) -> None:
        chance = self._simulation.chance
        is_cut = self._simulation.now < self._cut.get(frozenset((sender, to)), 0.0)
        if is_cut or chance.random() < self.faults.loss:
            self._simulation.note(f"lost {sender} -> {to}:", message)
            return
        self.send_surely(sender, to, message)
        if chance.random() < self.faults.repetition:
            self.send_surely(sender, to, message)

    def send_surely(self, sender: int, to: int, message: Any) -> None:
        """Send what is never lost."""
        chance = self._simulation.chance
        seconds = chance.choice(self.faults.delays) * chance.random()
        self.sent += 1
        self._simulation.after(seconds, lambda: self._arrive(sender, to, message))

    def _arrive(self, sender: int, to: int, message: Any) -> None:
        self._simulation.note(f"{sender} -> {to}:", message)
        self._deliver(sender, to, message)
