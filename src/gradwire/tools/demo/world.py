"""The workers of the demo: this process is worker0, and starts the others."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context

import torch

from ...api import init_rpc
from ...worker import Worker

SIZE = 4
_JOIN = 60.0


@contextmanager
def world() -> Iterator[None]:
    """Be worker0 of a world; the others serve until the block ends."""
    torch.set_num_threads(1)  # as all have: the cores are shared
    with tempfile.TemporaryDirectory(prefix="gradwire-demo-") as folder:
        url = f"file://{folder}/meet"
        processes = [
            get_context("spawn").Process(target=_serve, args=(rank, url), daemon=True)
            for rank in range(1, SIZE)
        ]
        try:
            for process in processes:
                process.start()
            with _join(0, url):
                yield
            for process in processes:
                process.join(_JOIN)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _serve(rank: int, url: str) -> None:
    torch.set_num_threads(1)
    with _join(rank, url):
        pass  # its end waits for that of all others


def _join(rank: int, url: str) -> Worker:
    return init_rpc(
        f"worker{rank}",
        rank=rank,
        world_size=SIZE,
        init_method=url,
        join_timeout=_JOIN,
    )
