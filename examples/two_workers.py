"""Two workers in two processes: one calls functions on the other, with tensors.

    python examples/two_workers.py

Starts the second process by itself. On two machines, run the two halves there with MASTER_ADDR and
MASTER_PORT set to the first one's address and a free port.
"""

import os
import socket
import subprocess
import sys

import torch

import gradwire as gw

LAYER = torch.nn.Linear(4, 2)  # each process has its own


def forward(x: torch.Tensor) -> torch.Tensor:
    """Run this process's layer: here it is called from the other process."""
    return LAYER(x).detach()


def norm(x: torch.Tensor) -> float:
    if not torch.isfinite(x).all():
        raise ValueError("not a finite tensor")
    return float(x.norm())


def call() -> None:
    x = torch.randn(3, 4)
    there = gw.rpc_sync("worker1", forward, args=(x,))
    print(
        f"worker1 ran its layer on {tuple(x.shape)} and returned {tuple(there.shape)}"
    )

    futures = [gw.rpc_async("worker1", torch.add, args=(x, i)) for i in range(1000)]
    total = sum(future.wait() for future in futures)
    assert torch.allclose(total, 1000 * x + sum(range(1000)), rtol=1e-3)
    print("1,000 calls at once, each with a tensor: all answered")

    try:
        gw.rpc_sync("worker1", norm, args=(torch.tensor([float("nan")]),))
    except ValueError as error:
        print(f"an error keeps its type: ValueError({str(error)!r})")
        print("and knows where it was raised:", str(error.__cause__).splitlines()[0])


def main(rank: int) -> None:
    torch.manual_seed(rank)
    with gw.init_rpc(f"worker{rank}", rank=rank, world_size=2):
        if rank == 0:
            call()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(int(sys.argv[1]))
    else:
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        os.environ["MASTER_PORT"] = str(free_port())
        other = subprocess.Popen([sys.executable, __file__, "1"])
        main(0)
        sys.exit(other.wait())
