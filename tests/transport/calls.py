"""What tests of calls over sockets send, and what they look at."""

import os
from typing import Any

import torch

from gradwire._transport import shared_memory
from gradwire.worker import Worker


def link(worker: Worker, to: int = 1) -> Any:
    """The link that a worker has made to another."""
    return worker._transport._out[to]


BYTES = torch.arange((5 << 20) + 256).to(torch.uint8)


def noise(size: int, seed: int = 0) -> torch.Tensor:
    return BYTES[seed % 256 : seed % 256 + size].clone()


def echo(x: torch.Tensor) -> torch.Tensor:
    return x


def both_ways(workers: list[Worker]) -> list[tuple[Worker, str]]:
    return [(workers[0], "worker1"), (workers[1], "worker0")]


def check_calls(workers: list[Worker]) -> None:
    for caller, to in both_ways(workers):
        for size in [1, 1 << 20, 1 << 20, 1 << 20]:
            assert torch.equal(caller.rpc_sync(to, echo, (noise(size),)), noise(size))


def pool(worker: Worker) -> shared_memory.SegmentPool:
    """The segments in which a worker's requests to worker1 travel."""
    return link(worker)._memory.pool


def kept_in(segment_pool: shared_memory.SegmentPool) -> list[shared_memory.Segment]:
    """The segments that it keeps to send from."""
    return [s for many in segment_pool._by_size.values() for s in many]


def in_use(segment_pool: shared_memory.SegmentPool) -> int:
    return sum(not segment.is_free for segment in kept_in(segment_pool))


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
