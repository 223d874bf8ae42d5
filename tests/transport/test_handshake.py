"""The handshake as bytes: who knows the key gets in, nobody else, and not by replay."""

import hmac
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire._transport.handshake import (
    CHALLENGE_SIZE,
    HELLO_SIZE,
    PROOF_SIZE,
    VERSION,
    Hello,
    Purpose,
    Verdict,
    challenge,
    check_proof,
    new_hello,
    prove,
)
from gradwire.errors import AuthenticationError, ProtocolError

KEY = b"the key of this world"
OTHER_KEY = b"the key of another one"


def hello_bytes() -> bytes:
    return new_hello(Purpose.LEASED, 3, 4, 99).to_bytes()


def shake(
    connector: bytes = KEY, acceptor: bytes = KEY, hello: bytes | None = None
) -> tuple[bytes, bytes, bytes]:
    """A whole handshake; what went over the wire."""
    sent = hello or hello_bytes()
    answer = challenge(acceptor, sent, Verdict.WELCOME)
    proof = prove(connector, sent, answer)
    check_proof(acceptor, sent, answer, proof)
    return sent, answer, proof


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def test_two_who_know_the_key_let_each_other_in() -> None:
    sizes = [len(message) for message in shake()]
    assert sizes == [HELLO_SIZE, CHALLENGE_SIZE, PROOF_SIZE]


@given(
    purpose=st.sampled_from(Purpose),
    sender=st.integers(-(1 << 63), (1 << 63) - 1),
    target=st.integers(0, (1 << 64) - 1),
    link=st.integers(0, (1 << 64) - 1),
)
def test_a_hello_says_who_connects_to_whom_and_why(
    purpose: Purpose, sender: int, target: int, link: int
) -> None:
    hello = new_hello(purpose, sender, target, link)
    assert Hello.from_bytes(hello.to_bytes()) == hello


def test_no_two_hellos_and_no_two_challenges_are_alike() -> None:
    assert hello_bytes() != hello_bytes()
    hello = hello_bytes()
    first = challenge(KEY, hello, Verdict.WELCOME)
    assert first != challenge(KEY, hello, Verdict.WELCOME)


def test_an_acceptor_without_the_key_gets_no_proof() -> None:
    hello = hello_bytes()
    answer = challenge(OTHER_KEY, hello, Verdict.WELCOME)
    with pytest.raises(AuthenticationError, match="does not know this world's key"):
        prove(KEY, hello, answer)


def test_a_connector_without_the_key_cannot_prove_it() -> None:
    hello = hello_bytes()
    answer = challenge(KEY, hello, Verdict.WELCOME)

    def proof(key: bytes) -> bytes:  # of one who does not look at the acceptor's own
        return hmac.digest(key, b"connector\0" + hello + answer, "sha256")

    check_proof(KEY, hello, answer, proof(KEY))
    with pytest.raises(AuthenticationError, match="does not know this world's key"):
        check_proof(KEY, hello, answer, proof(OTHER_KEY))


def test_a_recorded_handshake_fails_against_a_fresh_challenge() -> None:
    hello, _, proof = shake()
    fresh = challenge(KEY, hello, Verdict.WELCOME)
    with pytest.raises(AuthenticationError):
        check_proof(KEY, hello, fresh, proof)


def test_a_recorded_challenge_fails_against_a_fresh_hello() -> None:
    _, answer, _ = shake()
    with pytest.raises(AuthenticationError):
        prove(KEY, hello_bytes(), answer)


def test_a_proof_for_one_purpose_does_not_serve_another() -> None:
    hello = new_hello(Purpose.LEASED, 3, 4, 99)
    _, answer, proof = shake(hello=hello.to_bytes())
    other = replace(hello, purpose=Purpose.SHARED).to_bytes()
    with pytest.raises(AuthenticationError):
        check_proof(KEY, other, answer, proof)


def test_the_acceptors_own_proof_cannot_be_reflected_to_it() -> None:
    hello = hello_bytes()
    answer = challenge(KEY, hello, Verdict.WELCOME)
    with pytest.raises(AuthenticationError):
        check_proof(KEY, hello, answer, answer[-PROOF_SIZE:])


def test_the_connectors_proof_cannot_be_reflected_to_it() -> None:
    hello, answer, proof = shake()
    with pytest.raises(AuthenticationError):
        prove(KEY, hello, answer[:-PROOF_SIZE] + proof)


def test_a_hello_cannot_be_reflected_as_a_challenge() -> None:
    hello = hello_bytes()
    with pytest.raises(ProtocolError):
        prove(KEY, hello, hello.ljust(CHALLENGE_SIZE, b"\0")[:CHALLENGE_SIZE])


def test_a_hello_of_another_version_is_read_so_that_it_can_be_told() -> None:
    hello = replace(new_hello(Purpose.SHARED, 1, 2, 3), version=VERSION + 7)
    assert Hello.from_bytes(hello.to_bytes()).version == VERSION + 7


def test_a_version_mismatch_says_both_versions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hello = hello_bytes()
    with monkeypatch.context() as patch:
        patch.setattr("gradwire._transport.handshake.VERSION", 9)
        answer = challenge(OTHER_KEY, hello, Verdict.WRONG_VERSION)
    with pytest.raises(ProtocolError, match=f"speaks version 9, this worker {VERSION}"):
        prove(KEY, hello, answer)


@pytest.mark.parametrize(
    ("verdict", "reason"),
    [(Verdict.WRONG_WORKER, "wrong_worker"), (99, "99")],
)
def test_a_refusal_says_why(verdict: Verdict, reason: str) -> None:
    hello = hello_bytes()
    with pytest.raises(ProtocolError, match=f"it refused the connection: {reason}"):
        prove(KEY, hello, challenge(KEY, hello, verdict))


def test_a_worker_that_is_about_to_leave_cannot_be_reached() -> None:
    hello = hello_bytes()
    with pytest.raises(ConnectionRefusedError, match="it is shutting down"):
        prove(KEY, hello, challenge(KEY, hello, Verdict.CLOSING))


def test_a_refusal_by_someone_without_the_key_is_not_believed() -> None:
    hello = hello_bytes()
    with pytest.raises(AuthenticationError):
        prove(KEY, hello, challenge(OTHER_KEY, hello, Verdict.CLOSING))


def test_something_else_that_listens_there_is_told_apart_from_a_worker() -> None:
    answer = b"HTTP/1.1 400 Bad Request\r\n".ljust(CHALLENGE_SIZE)
    with pytest.raises(ProtocolError, match="not a gradwire worker"):
        prove(KEY, hello_bytes(), answer)


def test_something_else_that_connects_is_quoted_in_the_error() -> None:
    request = b"GET / HTTP/1.1\r\nHost: worker\r\n".ljust(HELLO_SIZE)
    with pytest.raises(ProtocolError, match=r"begins b'GET / HTTP/1\.1"):
        Hello.from_bytes(request)


def test_a_hello_for_an_unknown_purpose_is_refused() -> None:
    hello = new_hello(Purpose.SHARED, 1, 2, 3).to_bytes()
    with pytest.raises(ProtocolError, match="unknown purpose 77"):
        Hello.from_bytes(hello[:10] + bytes([77, 0]) + hello[12:])


@given(garbage=st.binary(min_size=HELLO_SIZE, max_size=HELLO_SIZE))
def test_garbage_is_no_hello(garbage: bytes) -> None:
    with pytest.raises(ProtocolError):
        Hello.from_bytes(garbage)


@given(garbage=st.binary(min_size=CHALLENGE_SIZE, max_size=CHALLENGE_SIZE))
def test_garbage_is_no_challenge(garbage: bytes) -> None:
    with pytest.raises(ProtocolError):
        prove(KEY, hello_bytes(), garbage)


@given(garbage=st.binary(max_size=2 * PROOF_SIZE))
def test_garbage_is_no_proof(garbage: bytes) -> None:
    hello = hello_bytes()
    answer = challenge(KEY, hello, Verdict.WELCOME)
    with pytest.raises(AuthenticationError):
        check_proof(KEY, hello, answer, garbage)


@given(bit=st.integers(0, 8 * HELLO_SIZE - 1))
def test_any_bit_flipped_in_the_hello_is_found(bit: int) -> None:
    hello = hello_bytes()
    answer = challenge(KEY, flipped(hello, bit), Verdict.WELCOME)
    with pytest.raises(AuthenticationError):
        prove(KEY, hello, answer)


@given(bit=st.integers(0, 8 * CHALLENGE_SIZE - 1))
def test_any_bit_flipped_in_the_challenge_is_found(bit: int) -> None:
    hello = hello_bytes()
    answer = challenge(KEY, hello, Verdict.WELCOME)
    with pytest.raises(ProtocolError):
        prove(KEY, hello, flipped(answer, bit))


@given(bit=st.integers(0, 8 * PROOF_SIZE - 1))
def test_any_bit_flipped_in_the_proof_is_found(bit: int) -> None:
    hello, answer, proof = shake()
    with pytest.raises(AuthenticationError):
        check_proof(KEY, hello, answer, flipped(proof, bit))
