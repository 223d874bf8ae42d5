"""A member that asks for too much, or does not listen: others are served on, and memory is bounded.

Where Gradwire's own workers would not do such things, members here are raw sockets that know the
key.
"""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire._transport import framed_socket, quota
from gradwire._transport.handshake import Purpose
from gradwire._transport.quota import Quota
from gradwire._wire.codec import Manner
from gradwire._wire.frames import Limits, Parcel, note
from gradwire._wire.messages import PING, Call
from gradwire.options import Options
from gradwire.worker import Worker
from tests.transport.strangers import (
    Journal,
    is_closed,
    send_proof,
    shake_hands,
    stranger,
)
from tests.wire.round_trip import Codec
from tests.worlds import LIMIT, limited_world, wait_until

GO_ON = threading.Event()


def held(*_: object) -> int:
    """A function that takes as long as a test wants it to."""
    assert GO_ON.wait(LIMIT)
    return 1


@pytest.fixture(autouse=True)
def go_on() -> Iterator[None]:
    GO_ON.clear()
    yield
    GO_ON.set()


def in_flight(worker: Worker, peer: int) -> tuple[int, int]:
    """How many requests of a peer, and how many bytes."""
    found: Quota | None = worker._transport._quotas.get(peer)
    return (0, 0) if found is None else (found.requests, found.bytes)


def frame(function: Callable[..., object], *args: object, call: int) -> bytes:
    codec = Codec(Limits(1 << 20, 1 << 20), plain_only=False)
    parcel: Parcel = codec.call(Call(function, args, {}, None), Manner())
    return parcel.header(call) + parcel.body


def test_requests_beyond_a_number_are_answered_with_an_error() -> None:
    with limited_world(GO_ON.set, max_peer_requests=4) as workers:
        waiting = [workers[2].rpc_async("worker0", held, timeout=0) for _ in range(4)]
        wait_until(lambda: in_flight(workers[0], 2)[0] == 4)
        for _ in range(3):
            problem = "worker 'worker0': 4 requests .* the limit is max_peer_requests"
            with pytest.raises(gw.GradwireError, match=problem):
                workers[2].rpc_async("worker0", max, (1, 2)).wait()
        assert workers[1].rpc_async("worker0", max, (1, 2)).wait() == 2
        GO_ON.set()
        assert [call.wait() for call in waiting] == [1] * 4
        wait_until(lambda: in_flight(workers[0], 2) == (0, 0))
        assert workers[2].rpc_async("worker0", max, (1, 2)).wait() == 2


def test_the_audit_log_has_who_was_over_its_quota_once(tmp_path: Path) -> None:
    audit = tmp_path / "audit.jsonl"
    with limited_world(GO_ON.set, max_peer_requests=1, audit=str(audit)) as workers:
        waiting = workers[2].rpc_async("worker0", held, timeout=0)
        wait_until(lambda: in_flight(workers[0], 2)[0] == 1)
        for _ in range(3):
            with pytest.raises(gw.GradwireError, match="max_peer_requests"):
                workers[2].rpc_async("worker0", max, (1, 2)).wait()
        GO_ON.set()
        waiting.wait()
    lines = [json.loads(line) for line in audit.read_text().splitlines()]
    (refused,) = [line for line in lines if line["event"] == "refuse"]
    assert (refused["worker"], refused["by"]) == ("worker0", "worker2")
    assert "max_peer_requests" in refused["reason"]


@pytest.mark.parametrize("size", [100_000, 700_000, 3 << 20])
def test_requests_beyond_a_size_are_dropped_as_they_come(size: int) -> None:
    x = torch.zeros(size, dtype=torch.uint8)
    with limited_world(GO_ON.set, max_peer_memory=1 << 20) as workers:
        fit = (1 << 20) // size
        calls = [workers[2].rpc_async("worker0", held, (x,)) for _ in range(fit)]
        wait_until(lambda: len(calls) == in_flight(workers[0], 2)[0])
        with pytest.raises(gw.GradwireError, match=r"\(max_peer_memory\)"):
            workers[2].rpc_async("worker0", held, (x,)).wait()
        with pytest.raises(gw.GradwireError, match=r"\(max_peer_memory\)"):
            workers[2].rpc_sync("worker0", held, (x,))
        assert workers[2].rpc_sync("worker0", max, (1, 2)) == 2
        GO_ON.set()
        assert [call.wait() for call in calls] == [1] * fit
        wait_until(lambda: in_flight(workers[0], 2) == (0, 0))


def test_what_is_cut_short_is_not_in_flight() -> None:
    x = torch.zeros(700_000, dtype=torch.uint8)
    codec = Codec(Limits(1 << 20, 1 << 20), plain_only=False)
    parcel = codec.call(Call(held, (x,), {}, None), Manner())
    with limited_world(GO_ON.set, max_peer_memory=1 << 20) as workers:
        for link in range(3):
            with stranger(workers[0]) as sock:
                shake_hands(sock, workers[0], Purpose.LEASED, me=2, link=link)
                sock.sendall(parcel.header(1) + parcel.body + bytes(1000))
                wait_until(lambda: in_flight(workers[0], 2)[0] == 1)
            wait_until(lambda: 2 not in workers[0]._transport._quotas)


def test_connections_beyond_a_number_are_refused(journal: Journal) -> None:
    with (
        limited_world(GO_ON.set, max_peer_connections=12) as workers,
        ExitStack() as stack,
    ):
        for link in range(12):
            sock = stack.enter_context(stranger(workers[0]))
            shake_hands(sock, workers[0], Purpose.LEASED, me=2, link=link % 5)
        for purpose in (Purpose.LEASED, Purpose.SHARED):
            sock = stack.enter_context(stranger(workers[0]))
            send_proof(sock, workers[0], purpose, me=2, link=99)
            assert is_closed(sock)
        journal.wait_for("of worker 2: 12 of it are open, the limit is max_peer_conn")


def test_a_connection_to_a_worker_that_shuts_down_is_no_news(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with limited_world(GO_ON.set) as workers, stranger(workers[0]) as sock:
        with monkeypatch.context() as patch:
            patch.setattr(workers[0]._transport, "_closed", True)
            send_proof(sock, workers[0], Purpose.SHARED, me=2)
            assert is_closed(sock)
        assert "refused" not in caplog.text


def test_who_pings_and_does_not_listen_holds_up_nobody() -> None:
    with limited_world(GO_ON.set) as workers, stranger(workers[0]) as sock:
        shake_hands(sock, workers[0], Purpose.SHARED, me=2)
        for _ in range(1000):
            sock.sendall(note(PING) * 100)
        workers[1].rpc_async("worker0", max, (1, 2), timeout=LIMIT).wait()


def answer(size: int) -> bytes:
    return bytes(size)


@pytest.mark.parametrize("size", [2000, 200_000])
def test_who_does_not_read_its_responses_takes_few_threads(size: int) -> None:
    with (
        limited_world(GO_ON.set, max_peer_memory=64 << 20) as workers,
        stranger(workers[0]) as sock,
    ):
        shake_hands(sock, workers[0], Purpose.SHARED, me=2)
        before, ran = threading.active_count(), workers[0]._agent.run_count
        for call in range(1, 3001):
            sock.sendall(frame(answer, size, call=call))
        agent = workers[0]._agent
        many = 3000 if size < 10_000 else 300  # the others are refused: no memory
        wait_until(lambda: agent.run_count - ran >= many)
        workers[1].rpc_async("worker0", max, (1, 2), timeout=LIMIT).wait()
        # As many as may run at a time, not one for each response.
        assert threading.active_count() - before < 128
        assert in_flight(workers[0], 2)[1] < 80 << 20


def test_who_goes_on_and_on_loses_its_connection(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(framed_socket, "MOST_REFUSED", 200)
    with limited_world(GO_ON.set, max_peer_requests=100, threads=1) as workers:
        with stranger(workers[0]) as sock:
            shake_hands(sock, workers[0], Purpose.SHARED, me=2)
            with suppress(OSError):  # it may be closed by then
                for call in range(1, 400):
                    sock.sendall(frame(held, call=call))
            assert is_closed(sock)
        journal.wait_for("a connection with worker 2: 301 requests of it are in flight")
        GO_ON.set()


def test_who_is_called_makes_no_requests_by_the_same_connection(
    journal: Journal,
) -> None:
    with limited_world(GO_ON.set) as workers:
        assert workers[2].rpc_async("worker1", max, (1, 2)).wait() == 2
        (link,) = workers[1]._transport._in.values()
        assert link.shared is not None
        link.shared.framed.write_bytes(frame(held, call=1))
        journal.wait_for("it makes requests where it is to answer them")


@pytest.mark.parametrize(
    ("files", "expected"),
    [({}, 1000), ({"max": "max"}, 1000), ({"a": "700", "b": "x"}, 700)],
)
def test_memory_is_the_machines_or_the_containers(
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
    files: dict[str, str],
    expected: int,
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(quota, "_CGROUP", [tmp_path / name for name in [*files, "no"]])
    monkeypatch.setattr(
        quota.os, "sysconf", {"SC_PAGE_SIZE": 10, "SC_PHYS_PAGES": 100}.get
    )
    assert quota.memory() == expected
    assert Quota(Options()).charge(expected) is None
    assert Quota(Options()).charge(expected // 2) is not None
