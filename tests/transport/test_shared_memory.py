"""Tensors in shared memory between workers: kept intact, used again, given back."""

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch

from tests.transport.calls import (
    descriptors,
    echo,
    in_use,
    kept_in,
    noise,
    pool,
)
from tests.worlds import (
    close_world,
    open_world,
    socket_world,
    wait_until,
)

KEPT: list[torch.Tensor] = []


def keep(x: torch.Tensor) -> int:
    KEPT.append(x)
    return len(KEPT)


@pytest.fixture
def kept() -> Iterator[list[torch.Tensor]]:
    yield KEPT
    KEPT.clear()


@pytest.mark.parametrize("size", [100_000, 1 << 20])
def test_tensors_kept_over_there_stay_intact_while_more_arrive(
    size: int, kept: list[torch.Tensor]
) -> None:
    with socket_world(2) as workers:
        for i in range(60):
            workers[0].rpc_sync("worker1", keep, (noise(size, i),))
            if i % 3 == 0:
                kept[i] = noise(1)  # let go of some, so that segments come back
        assert len(kept_in(pool(workers[0]))) > 0
        for i, tensor in enumerate(kept):
            assert i % 3 == 0 or torch.equal(tensor, noise(size, i))
        kept.clear()


def test_results_kept_here_stay_intact_while_more_arrive() -> None:
    with socket_world(2) as workers:
        size = 1 << 20
        results = {}
        for i in range(30):
            result = workers[0].rpc_sync("worker1", noise, (size, i))
            if i % 2:
                results[i] = result
        future = workers[0].rpc_async("worker1", noise, (size, 99))
        assert all(torch.equal(results[i], noise(size, i)) for i in results)
        assert torch.equal(future.wait(), noise(size, 99))
        results.clear()


def test_a_view_keeps_the_segment_it_lies_in() -> None:
    with socket_world(2) as workers:
        rows = []
        for i in range(20):
            rows.append(workers[0].rpc_sync("worker1", noise, (1 << 20, i))[1000:1010])
        for i, row in enumerate(rows):
            assert torch.equal(row, noise(1 << 20, i)[1000:1010])
        rows.clear()


def test_what_arrived_can_be_written_to_without_harm() -> None:
    with socket_world(2) as workers:
        sent = noise(1 << 20)
        for _ in range(5):
            came = workers[0].rpc_sync("worker1", echo, (sent,))
            came.zero_()
            assert torch.equal(sent, noise(1 << 20))


def test_segments_are_used_again_when_their_tensors_are_dropped() -> None:
    with socket_world(2) as workers:
        for i in range(50):
            workers[0].rpc_sync("worker1", echo, (noise(1 << 20, i),))
        assert 1 <= len(kept_in(pool(workers[0]))) <= 2
        wait_until(lambda: in_use(pool(workers[0])) == 0)


def test_no_more_segments_are_made_than_come_back(
    kept: list[torch.Tensor],
) -> None:
    with socket_world(2) as workers:
        for i in range(50):
            workers[0].rpc_sync("worker1", keep, (noise(1 << 20, i),))
        assert len(kept_in(pool(workers[0]))) < 10
        kept.clear()


def test_tensors_outlive_the_worker_that_received_them() -> None:
    with socket_world(2) as workers:
        results = [
            workers[0].rpc_sync("worker1", noise, (1 << 20, i)) for i in (1, 2, 3)
        ]
    for i, result in enumerate(results, start=1):
        assert torch.equal(result, noise(1 << 20, i))


def test_a_link_whose_end_is_noticed_late_is_not_kept_by_a_closed_worker() -> None:
    workers = open_world(2)
    workers[0].rpc_sync("worker1", max, (1, 2))
    link = workers[0]._transport._out[1]
    # Another thread is about to tell of it, as after a hang-up.
    told, link.shared._on_ended = link.shared._on_ended, None
    close_world(workers)
    assert told is not None
    told(link.shared, EOFError())
    link.shared.stop_using()
    gone = weakref.ref(link)
    del link, told
    gc.collect()
    assert gone() is None


def test_segments_need_no_descriptors() -> None:
    with socket_world(2) as workers:
        workers[0].rpc_sync("worker1", max, (1, 2))
        before = descriptors()
        for size in (100_000, 1 << 20, 3 << 20, 5 << 20):
            for _ in range(3):
                workers[0].rpc_sync("worker1", echo, (noise(size),))
        assert len(kept_in(pool(workers[0]))) == 4
        assert descriptors() == before


def test_trimmed_segments_are_used_again() -> None:
    with socket_world(2) as workers:
        for turn in range(3):
            for i in range(4):
                sent = noise(1 << 20, turn + i)
                result = workers[0].rpc_sync("worker1", echo, (sent,))
                assert torch.equal(result, sent)
                del result
            pool(workers[0]).trim(0.0)
