"""Where a remote module is to be: a worker, and a device there."""

from __future__ import annotations

import torch


def parse_device(remote_device: str) -> tuple[str | int, str]:
    """The worker (by name, or by id after "rank:") and the device that a text names.

    Raises:
        TypeError, ValueError: the text names no worker, or is none.
        RuntimeError: torch knows no such device.

    >>> parse_device("worker1"), parse_device("rank:1/cuda:0")
    (('worker1', 'cpu'), (1, 'cuda:0'))
    """
    if not isinstance(remote_device, str):
        raise TypeError(f"remote_device={remote_device!r} is not a string")
    worker, slash, device = remote_device.partition("/")
    kind, colon, rank = worker.partition(":")
    is_rank = kind == "rank" and rank.isdigit()
    if not worker or "/" in device or (colon and not is_rank):
        raise ValueError(
            f"Could not parse remote_device: {remote_device}. The valid format is "
            "'<workername>/<device>' or 'rank:<rank>/<device>'; the device can be left out"
        )
    device = str(torch.device(device if slash else "cpu"))
    return (int(rank) if is_rank else worker), device
