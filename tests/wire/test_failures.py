"""What was raised there is raised here: its own type where that can be, its text in any case."""

import sys
import threading
import types
from typing import Any

import pytest
import torch

from gradwire._wire import safe_encoding
from gradwire._wire.codec import SAFE, Manner
from gradwire._wire.failures import revive_failure
from gradwire._wire.frames import Frame, Limits
from gradwire._wire.messages import FAILURE, Failure
from gradwire.errors import NotAllowedError, RemoteError, WorkerLostError
from tests.wire.round_trip import (
    LARGE,
    LIMITS,
    PICKLE,
    PLAIN,
    Codec,
    assert_same,
    received,
)


def raised(error: BaseException, manner: Manner = PICKLE) -> Exception:
    """What the caller of a function that raised this has to catch."""
    failure = received(Codec(LIMITS).failure(thrown(error), manner), manner)
    assert type(failure) is Failure
    return revive_failure(failure, "far")


def thrown(error: BaseException) -> BaseException:
    """The error, after it went through a few frames."""

    def somewhere_deep() -> None:
        raise error

    try:
        somewhere_deep()
    except BaseException as caught:  # noqa: BLE001 that is what is tested
        return caught
    raise AssertionError("not reached")


class Rich(Exception):
    """Has data."""

    def __init__(self, code: int, tensor: Any) -> None:
        super().__init__(code, tensor)
        self.code = code
        self.tensor = tensor


class Demanding(Exception):
    """Cannot be made again from what pickle keeps of it."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


class Mute(Exception):
    """Cannot say what it is."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_an_exception_keeps_its_type_and_its_data() -> None:
    large = torch.arange(float(LARGE))
    error = raised(Rich(5, large))
    assert type(error) is Rich
    assert error.code == 5
    assert_same(error.tensor, large)


def test_a_builtin_exception_that_cannot_be_pickled_keeps_its_type() -> None:
    error = raised(ValueError(threading.Lock()))
    assert type(error) is ValueError
    assert "lock" in str(error)


def test_the_tensors_of_an_exception_travel_beside_it() -> None:
    parcel = Codec(LIMITS).failure(Rich(5, torch.zeros(LARGE)), PICKLE)
    assert len(parcel.bulk) == 1
    assert len(parcel.body) < 10_000


@pytest.mark.parametrize("manner", [PICKLE, PLAIN], ids=["pickle", "plain"])
@pytest.mark.parametrize("kind", [ValueError, KeyError, OSError, ZeroDivisionError])
def test_a_builtin_exception_keeps_its_type(
    kind: type[Exception], manner: Manner
) -> None:
    error = raised(kind("why"), manner)
    assert type(error) is kind
    assert "why" in str(error)


@pytest.mark.parametrize("manner", [PICKLE, PLAIN], ids=["pickle", "plain"])
def test_the_cause_tells_where_it_was_raised(manner: Manner) -> None:
    cause = raised(ValueError("why"), manner).__cause__
    assert isinstance(cause, RemoteError)
    assert (cause.worker, cause.type_name, cause.message) == (
        "far",
        "ValueError",
        "why",
    )
    assert "in somewhere_deep" in cause.trace
    assert "somewhere_deep" in str(cause)


def test_our_own_errors_keep_their_types() -> None:
    assert type(raised(NotAllowedError("not this"), PLAIN)) is NotAllowedError
    lost = raised(WorkerLostError("w", "gone"))
    assert isinstance(lost, WorkerLostError)
    assert (lost.worker, lost.reason) == ("w", "gone")


@pytest.mark.parametrize(
    ("error", "manner"),
    [
        (Demanding(1, 2), PICKLE),
        (Rich(5, threading.Lock()), PICKLE),
        (SystemExit(3), PICKLE),
        (KeyboardInterrupt(), PLAIN),
        (Demanding(1, 2), PLAIN),
        (UnicodeDecodeError("utf-8", b"x", 0, 1, "why"), PLAIN),
        (WorkerLostError("w", "gone"), PLAIN),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_made_again_is_raised_as_a_remote_error(
    error: BaseException, manner: Manner
) -> None:
    arrived = raised(error, manner)
    assert type(arrived) is RemoteError
    assert arrived.type_name == type(error).__name__
    assert arrived.message == str(error)


@pytest.mark.parametrize("manner", [PICKLE, PLAIN], ids=["pickle", "plain"])
def test_an_exception_that_cannot_be_put_in_words_arrives(manner: Manner) -> None:
    arrived = raised(Mute(), manner)
    cause = arrived if manner.plain else arrived.__cause__
    assert isinstance(cause, RemoteError)
    assert cause.type_name == "Mute"


@pytest.mark.parametrize("manner", [PICKLE, PLAIN], ids=["pickle", "plain"])
def test_an_exception_too_large_to_be_sent_arrives_shortened(manner: Manner) -> None:
    parcel = Codec(Limits(30_000, 0)).failure(ValueError("x" * 100_000), manner)
    error = revive_failure(received(parcel, manner), "far")
    assert type(error) is ValueError
    assert set(str(error)) == {"x"}
    assert 1_000 < len(str(error)) < 30_000


@pytest.mark.parametrize("manner", [PICKLE, PLAIN], ids=["pickle", "plain"])
def test_a_shortened_exception_fits_into_any_limit(manner: Manner) -> None:
    for body in (1_000, 20_000, 1 << 20):
        parcel = Codec(Limits(body, 0)).failure(ValueError("x" * (1 << 21)), manner)
        assert len(parcel.body) <= body


def test_an_exception_with_a_tensor_too_large_arrives_as_text() -> None:
    parcel = Codec(Limits(30_000, 0)).failure(Rich(5, torch.zeros(LARGE)), PICKLE)
    error = revive_failure(received(parcel), "far")
    assert type(error) is RemoteError
    assert error.type_name == "Rich"


def test_an_exception_of_main_is_the_one_of_this_main(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run_script() -> type[Exception]:
        """As a process would: the same name, another class."""
        main = types.ModuleType("__main__")
        exec("class Mine(Exception): pass", vars(main))
        monkeypatch.setitem(sys.modules, "__main__", main)
        mine: type[Exception] = main.Mine
        return mine

    there = run_script()
    parcel = Codec(LIMITS).failure(there("x"), Manner(same_main=True))
    here = run_script()
    assert type(revive_failure(received(parcel), "far")) is here


def test_a_worker_with_an_allow_list_unpickles_no_exception() -> None:
    fields: Any = ("ValueError", "x", "trace", b"a pickle", [])
    body = bytes(8) + safe_encoding.dumps(fields, [])
    with pytest.raises(NotAllowedError, match="no pickles"):
        Codec(LIMITS, plain_only=True).open(Frame(FAILURE, SAFE, 1, body))
