"""What workers say to each other in passes, as it is packed and read."""

import random
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch

from gradwire._autograd import messages
from gradwire._autograd.messages import (
    CREATE,
    Answer,
    Delivery,
    Failed,
    Header,
    Load,
    PassRequest,
)
from gradwire._autograd.pass_state import Step
from gradwire._wire.messages import TensorMessage
from gradwire.errors import ProtocolError

close = torch.testing.assert_close
HEADER = Header(1, 2, 0, 2, Step.REST, 3)
ONES, ZEROS = torch.ones(3), torch.zeros(2)


def load() -> Load:
    first = Delivery(5, [ONES, None, ONES])
    return Load([first, Delivery(6, [ZEROS])], [7, 8], [(9, 0), (9, 1), (10, 0)])


def check(found: Load) -> None:
    (first, (a, none, b), *_), (second, (c,), *_) = found.deliveries
    assert (first, second, none) == (5, 6, None)
    close([a, b, c], [ONES, ONES, ZEROS])
    assert found.voids == [7, 8]
    assert found.slots == [(9, 0), (9, 1), (10, 0)]


def test_a_request_says_all_there_is_for_a_worker() -> None:
    header, found = messages.read_request(messages.request(HEADER, load()))
    assert header == HEADER._replace(depth=4)
    check(found)


def test_an_answer_says_all_there_is_and_who_has_parked_something() -> None:
    answer = messages.unpack(messages.pack(Answer(load(), {3: 1, 7: -2}), 0), 0)
    assert isinstance(answer, Answer)
    assert answer.parked == {3: 1, 7: -2}
    check(answer.load)


def test_an_answer_with_nothing_to_say_is_nothing() -> None:
    assert messages.pack(Answer(Load()), 0) is None
    answer = messages.unpack(None, 0)
    assert isinstance(answer, Answer)
    assert not answer.load
    assert not answer.parked


def test_gradients_may_say_under_which_number_they_were_sent() -> None:
    linked = Load([Delivery(5, [ONES, ONES], 11, [1]), Delivery(6, [ZEROS])])
    header = HEADER._replace(flags=CREATE)
    _, found = messages.read_request(messages.request(header, linked))
    assert [(each.link, [*each.linked]) for each in found.deliveries] == [
        (11, [1]),
        (0, []),
    ]


def test_a_failure_is_told_as_it_is() -> None:
    failed = Failed(3, "ValueError", "no", "", None, ())
    assert messages.unpack(messages.pack_failed(failed), 0) == failed


PLAIN = Load([Delivery(5, [ONES])])
CHANGES: dict[str, Any] = {
    "cut short": lambda facts, tensors: (facts[:-1], tensors),
    "almost empty": lambda facts, tensors: (facts[:1], tensors),
    "empty": lambda facts, tensors: ((), tensors),
    "odd": lambda facts, tensors: ((*facts, 1), tensors),
    "of no tensors": lambda facts, tensors: ((*facts, 6, 0), tensors),
    "of too many tensors": lambda facts, tensors: ((*facts, 6, 1), tensors),
    "of less than no tensors": lambda facts, tensors: ((*facts[:-1], -1), tensors),
    "lacking a tensor": lambda facts, tensors: (facts, tensors[:-1]),
    "with a tensor too many": lambda facts, tensors: (facts, (*tensors, None)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_messages_that_make_no_sense_are_refused(change: Any) -> None:
    said = messages.request(HEADER, PLAIN)
    with pytest.raises(ProtocolError):
        messages.read_request(PassRequest(*change(said.numbers, said.tensors)))
    answer = messages.pack(Answer(PLAIN, {1: 1}), 0)
    changed = TensorMessage(*change(answer.numbers, answer.tensors))
    with pytest.raises(ProtocolError):
        messages.unpack(changed, 0)


@pytest.mark.parametrize("count", [-9, -1, 9, 1 << 40])
@pytest.mark.parametrize("at", [6, 7])  # how many voids, how many slots
def test_counts_that_make_no_sense_are_refused(count: int, at: int) -> None:
    said = messages.request(HEADER, PLAIN)
    facts = [*said.numbers]
    facts[at] = count
    with pytest.raises(ProtocolError):
        messages.read_request(PassRequest(facts, said.tensors))
    answer = messages.pack(Answer(PLAIN, {1: 1}), 0)
    for place in (0, 3, 4):
        facts = [*answer.numbers]
        facts[place] = count
        with pytest.raises(ProtocolError):
            messages.unpack(TensorMessage(facts, answer.tensors), 0)


@pytest.mark.parametrize("step", [-1, 3])
def test_a_step_that_there_is_not_is_refused(step: int) -> None:
    said = messages.request(HEADER._replace(step=step), PLAIN)
    with pytest.raises(ProtocolError, match="malformed request"):
        messages.read_request(said)


@pytest.mark.parametrize("linked", [[-1], [2]])
def test_links_to_tensors_that_there_are_not_are_refused(linked: list[int]) -> None:
    header = HEADER._replace(flags=CREATE)
    said = messages.request(header, Load([Delivery(5, [ONES, ONES], 11, linked)]))
    with pytest.raises(ProtocolError):
        messages.read_request(said)


@pytest.mark.parametrize("answer", [7, "x", (), ((1,), 2), ((1.5,), ()), (1, "x")])
def test_answers_that_are_none_are_refused(answer: Any) -> None:
    with pytest.raises(ProtocolError, match="malformed response"):
        messages.unpack(answer, 0)


NUMBERS = [0, 1, 2, 3, 5, 100, 1 << 31, 1 << 62, (1 << 63) - 1, -1, -(1 << 63)]


def changed(numbers: Sequence[int], chance: random.Random) -> list[int]:
    """Other numbers, some of them large; fewer or more of them."""
    found = list(numbers)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(found) + 1)
        kind = chance.randrange(4)
        if kind == 0:
            del found[at:]
        elif kind == 1:
            found[at:at] = found[at : at + chance.randint(1, 4)]
        elif at < len(found):
            found[at] = chance.choice(NUMBERS) if kind == 2 else found[at] + 1
    return found


def test_mutated_requests_and_answers_are_read_or_refused(fuzz_seed: int) -> None:
    chance = random.Random(fuzz_seed)
    for _ in range(2500):
        flags = chance.choice((0, CREATE))
        full = messages.request(HEADER._replace(flags=flags), load())
        answer = messages.pack(Answer(load(), {3: 1}), flags)
        some = full.tensors[: chance.randint(0, len(full.tensors))]
        for tensors in (full.tensors, some):
            with suppress(ProtocolError):
                numbers = changed(full.numbers, chance)
                _, found = messages.read_request(PassRequest(numbers, tensors))
                assert sum(len(d.gradients) for d in found.deliveries) == len(tensors)
            with suppress(ProtocolError):
                numbers = changed(answer.numbers, chance)
                messages.unpack(TensorMessage(numbers, tensors), flags)
