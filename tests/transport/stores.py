"""Stores for workers to meet over."""

from collections.abc import Callable

from torch.distributed import Store, TCPStore

NewStore = Callable[[], Store]


def new_tcp_store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
