"""Mutated hellos, challenges, proofs and cards: none is taken for a good one."""

import random
from collections.abc import Callable

import pytest

from gradwire._transport.base import Card
from gradwire._transport.handshake import (
    CHALLENGE_SIZE,
    HELLO_SIZE,
    PROOF_SIZE,
    Hello,
    Purpose,
    Verdict,
    challenge,
    check_proof,
    new_hello,
    prove,
)
from gradwire._transport.keys import seal, unseal
from gradwire.errors import AuthenticationError, ProtocolError

KEY = b"the key of this world"
EACH = 2500  # per seed; 20 seeds make 50,000 of each kind


def mutant(data: bytes, chance: random.Random, *, keep_size: bool) -> bytes:
    """Other bytes; of the same number, where nothing else gets that far."""
    changed = bytearray(data)
    while bytes(changed) == data:
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(len(changed))
            kind = chance.randrange(2 if keep_size else 4)
            if kind == 0:
                changed[at] ^= 1 << chance.randrange(8)
            elif kind == 1:
                piece = chance.randbytes(chance.randint(1, 8))
                changed[at : at + len(piece)] = piece
            elif kind == 2:
                changed[at:at] = changed[at : at + chance.randint(1, 16)]
            else:
                del changed[at : at + chance.randint(1, 16)]
            del changed[len(data) if keep_size else 4096 :]
            changed = changed or bytearray(1)
    return bytes(changed)


def refused(action: Callable[[], object]) -> None:
    with pytest.raises((ProtocolError, ConnectionRefusedError)):
        action()


def test_mutated_hellos_are_read_or_refused_and_never_proven(fuzz_seed: int) -> None:
    chance = random.Random(fuzz_seed)
    hello = new_hello(Purpose.SHARED, 1, 0, 12345).to_bytes()
    for _ in range(EACH):
        other = mutant(hello, chance, keep_size=True)
        assert len(other) == HELLO_SIZE
        try:
            assert Hello.from_bytes(other).to_bytes()[:8] == hello[:8]
        except ProtocolError:
            continue
        answer = challenge(KEY, other, Verdict.WELCOME)
        refused(lambda a=answer: prove(KEY, hello, a))  # type: ignore[misc]


def test_mutated_challenges_and_proofs_are_refused(fuzz_seed: int) -> None:
    chance = random.Random(fuzz_seed)
    hello = new_hello(Purpose.SHARED, 1, 0, 12345).to_bytes()
    answer = challenge(KEY, hello, Verdict.WELCOME)
    proof = prove(KEY, hello, answer)
    check_proof(KEY, hello, answer, proof)
    for _ in range(EACH):
        other = mutant(answer, chance, keep_size=True)
        assert len(other) == CHALLENGE_SIZE
        refused(lambda a=other: prove(KEY, hello, a))  # type: ignore[misc]
        other = mutant(proof, chance, keep_size=True)
        assert len(other) == PROOF_SIZE
        refused(lambda p=other: check_proof(KEY, hello, answer, p))  # type: ignore[misc]


def test_mutated_cards_are_refused(fuzz_seed: int) -> None:
    chance = random.Random(fuzz_seed)
    card = Card(name="ps", id=0, unix="@x", tcp=("10.0.0.1", 5000), cores="ff")
    sealed = seal(KEY, card.to_bytes())
    assert Card.from_bytes(unseal((KEY,), sealed)) == card
    for _ in range(EACH):
        with pytest.raises(AuthenticationError):
            unseal((KEY,), mutant(sealed, chance, keep_size=False))
        try:  # what one who knows the key may seal
            Card.from_bytes(mutant(card.to_bytes(), chance, keep_size=False))
        except ProtocolError:
            pass
