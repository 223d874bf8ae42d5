"""What the programs share: ranks with a seed each, and losses printed to the last bit."""

import os
import socket
from collections.abc import Callable

import torch
import torch.multiprocessing as mp


def start(main: Callable[[int], None], ranks: int) -> None:
    """Run `main(rank)` in a process each."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        os.environ["MASTER_PORT"] = str(probe.getsockname()[1])
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    mp.start_processes(_seeded, (main,), nprocs=ranks, start_method="fork")


def _seeded(rank: int, main: Callable[[int], None]) -> None:
    torch.manual_seed(rank)
    torch.set_num_threads(1)
    main(rank)


def tell(loss: torch.Tensor | float) -> None:
    print(f"{float(loss):.7g}", flush=True)  # noqa: T201
