"""A simulation that finds nothing proves little: each of these mistakes is found by some seed.

A mistake takes the place of one method of a pure class: a count that is not kept, a message that is
believed twice, a wake-up that is forgotten.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest

from gradwire._autograd.pass_state import Action, Indexes, PassState, Run, Wake
from gradwire._rpc.members import Seen
from gradwire._rref.held_forks import Outbox
from gradwire._rref.ledger import Holding, OwnerLedger, Transit, UserLedger
from gradwire._rref.messages import fork_id
from gradwire._transport.reader_role import ReaderRole, Step
from tests.simulate.parts import Case

_MOST_SEEDS = 500


class Mistake(NamedTuple):
    """Instead of a method of a class, this."""

    part: str
    cls: type
    method: str
    instead: Callable[..., Any]

    def __str__(self) -> str:
        return f"{self.cls.__name__}.{self.instead.__name__}"


mistakes: list[Mistake] = []


def mistake(part: str, cls: type, method: str) -> Callable[..., Any]:
    def add(instead: Callable[..., Any]) -> Callable[..., Any]:
        mistakes.append(Mistake(part, cls, method, instead))
        return instead

    return add


# References: what a holder knows


@mistake("ledger", UserLedger, "child_left")
def child_left_does_not_keep_its_parent(self: UserLedger, transit: Transit) -> int:
    tokens = self._tokens.setdefault(transit.to, itertools.count(1))
    token = fork_id(transit.to, next(tokens))
    self._transits[token] = transit
    return token


@mistake("ledger", UserLedger, "child_settled")
def child_settled_never_frees_the_parent(
    self: UserLedger, token: int, arrived: bool
) -> list[Holding]:
    transit = self._transits.pop(token, None)
    is_over = transit is not None and transit.child.fork and not arrived
    return [transit.child] if transit is not None and is_over else []


_child_settled = UserLedger.child_settled


@mistake("ledger", UserLedger, "child_settled")
def child_settled_leaves_what_did_not_arrive(
    self: UserLedger, token: int, arrived: bool
) -> list[Holding]:
    return _child_settled(self, token, True)


@mistake("ledger", UserLedger, "_let_go")
def lets_go_with_children_under_way(self: UserLedger, held: Any) -> list[Holding]:
    key = held.holding.owner, held.holding.fork
    if held.in_use or self._held.pop(key, None) is None:
        return []
    return [held.holding]


@mistake("ledger", UserLedger, "child_came")
def child_came_never_refuses(self: UserLedger, sender: int, token: int) -> bool:
    return True


@mistake("ledger", UserLedger, "fork_counted")
def fork_counted_is_forgotten(self: UserLedger, owner: int, fork: int) -> None:
    pass


@mistake("ledger", UserLedger, "handle_dropped")
def handle_dropped_is_forgotten(
    self: UserLedger, owner: int, fork: int
) -> list[Holding]:
    return []


_fork_asked = UserLedger.fork_asked


@mistake("ledger", UserLedger, "fork_asked")
def fork_asked_says_yes_before_it_is_counted(
    self: UserLedger, asker: int, token: int, key: Any, underway: set[int]
) -> bool | None:
    return key in self._held or _fork_asked(self, asker, token, key, underway)


@mistake("ledger", UserLedger, "fork_asked")
def fork_asked_forgets_calls_under_way(
    self: UserLedger, asker: int, token: int, key: Any, underway: set[int]
) -> bool | None:
    return _fork_asked(self, asker, token, key, set())


# References: what an owner knows, and what is said


@mistake("ledger", OwnerLedger, "fork_added")
def fork_added_after_its_release(
    self: OwnerLedger, value: int, fork: int, holder: int
) -> bool:
    self._holders.setdefault(value, {})[fork] = holder
    return holder not in self._gone


@mistake("ledger", OwnerLedger, "worker_gone")
def worker_gone_keeps_its_forks(self: OwnerLedger, worker: int) -> list[int]:
    self._gone.add(worker)
    return []


@mistake("ledger", Outbox, "put_back")
def put_back_forgets(self: Outbox, worker: int, notes: Any) -> None:
    pass


@mistake("ledger", Seen, "is_new")
def is_new_each_time(self: Seen, call: int) -> bool:
    return True


# The state of a pass


_came = PassState.came


@mistake("passes", PassState, "came")
def came_runs_without_the_other_sources(
    self: PassState, source: int, slots: Indexes
) -> list[Action]:
    actions = _came(self, source, slots)
    if source in self.parked:
        return [Run({source: self.parked.pop(source)})]
    return actions


@mistake("passes", PassState, "came")
def came_wakes_nobody(self: PassState, source: int, slots: Indexes) -> list[Action]:
    return [a for a in _came(self, source, slots) if type(a) is not Wake]


@mistake("passes", PassState, "fate")
def fate_is_never_known(self: PassState, send: int) -> None:
    pass


@mistake("passes", PassState, "empty")
def empty_tells_nobody(self: PassState, recv: int) -> list[Action]:
    return []


@mistake("passes", PassState, "narrowed")
def narrowed_tells_nobody(
    self: PassState, sources: Any, recvs: Iterable[int]
) -> list[Action]:
    return []


@mistake("passes", PassState, "_is_used")
def what_was_not_announced_is_waited_for(self: PassState, source: int) -> bool:
    self._announced.setdefault(source, {0})
    return True


_announce = PassState.announce


@mistake("passes", PassState, "announce")
def announce_forgets_what_is_parked(self: PassState, slots: Any = ()) -> list[Action]:
    self._reached.update(self.parked)
    return _announce(self, slots)


@mistake("passes", PassState, "announce")
def announce_again_each_time(self: PassState, slots: Any = ()) -> list[Action]:
    self._reached.clear()
    return _announce(self, slots)


# The reader role

Role = ReaderRole[Any, Any]


@mistake("reader", ReaderRole, "take")
def take_what_is_taken(self: Role) -> bool:
    self.is_taken = True
    return True


@mistake("reader", ReaderRole, "give_up")
def give_up_wakes_nobody(self: Role) -> None:
    self.is_taken = False


_leave = ReaderRole.leave


@mistake("reader", ReaderRole, "leave")
def leave_wakes_nobody(self: Role, call: int) -> None:
    _leave(self, call)


@mistake("reader", ReaderRole, "delivered")
def delivered_is_forgotten(self: Role, call: int) -> None:
    pass


@mistake("reader", ReaderRole, "step")
def step_reads_while_its_response_is_delivered(
    self: Role, call: int, wake: Any
) -> Step:
    self.sleeping.pop(call, None)
    if self.unopened:
        return Step.DELIVER
    if self.is_taken:
        self.sleeping[call] = wake
        return Step.SLEEP
    self.is_taken = True
    return Step.READ


@mistake("reader", ReaderRole, "step")
def step_reads_past_what_was_read(self: Role, call: int, wake: Any) -> Step:
    self.sleeping.pop(call, None)
    if self.is_taken or self.in_delivery[call]:
        self.sleeping[call] = wake
        return Step.SLEEP
    self.is_taken = True
    return Step.READ


@mistake("reader", ReaderRole, "next_sleeper")
def next_sleeper_is_one_with_nothing_to_do(self: Role) -> Any:
    call = next(iter(self.sleeping), None)
    return None if call is None else self.sleeping.pop(call)


@mistake("reader", ReaderRole, "open_next")
def open_next_leaves_it_there(self: Role) -> Any:
    if not self.unopened:
        return None
    frame = self.unopened[0]
    self.in_delivery[frame.call] += 1
    return frame


@pytest.mark.parametrize("mistake", mistakes, ids=str)
def test_a_mistake_is_found(mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mistake.cls, mistake.method, mistake.instead)
    assert any(Case(mistake.part, seed).run() for seed in range(_MOST_SEEDS))
