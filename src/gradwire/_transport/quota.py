"""What one peer may have in flight here: requests, and their bytes.

A request is charged from when its header has come until its response is written. Beyond the limits
it is answered with an error instead of being run, and its body is dropped as it comes: what members
can use together is bounded, and one of them cannot starve the others. A peer that keeps sending
without reading the responses loses the connection.

Counts are kept without a lock, because charges are given back in finalizers, too: `+=` of plain
numbers is not interrupted while there is a GIL. Without one they may be off by as many as threads
collide.
"""

from __future__ import annotations

import os
from pathlib import Path

from ..options import Options

MOST_REFUSED = 1 << 14
"""Refused requests that may wait to be told so. With more the connection ends."""

_SHARE = 0.75  # of the machine's memory that one peer's requests may take
_CGROUP = "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"


def memory() -> int:
    """The bytes of memory available to this process: the machine's, or its container's."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in _CGROUP:
        try:
            found = min(found, int(Path(path).read_text()))
        except (OSError, ValueError):
            pass  # there is none, or it says "max"
    return found


def default_memory() -> int:
    """The bytes that requests of one peer may take, unless the user says so."""
    return int(_SHARE * memory())


class Quota:
    """The limits of one peer, and what it has in flight."""

    def __init__(self, options: Options) -> None:
        self.most_requests = options.max_peer_requests
        self.most_bytes = options.max_peer_memory or default_memory()
        self.requests = 0
        self.bytes = 0

    def __repr__(self) -> str:
        return f"<Quota: {self.requests} requests, {self.bytes} bytes in flight>"

    def charge(self, size: int) -> Charge | None:
        """Charge a request of that many bytes; None if it may not be accepted."""
        if self.requests >= self.most_requests or self.bytes + size > self.most_bytes:
            return None
        return Charge(self, size)

    def refusal(self, size: int) -> str:
        """Why a request of that many bytes may not be accepted."""
        if self.requests >= self.most_requests:
            return (
                f"{self.requests} requests of this caller are in flight there, the limit is "
                "max_peer_requests: wait for some before making more"
            )
        return (
            f"requests of this caller in flight there take {self.bytes} bytes and this one {size}, "
            f"the limit is {self.most_bytes} (max_peer_memory)"
        )


class Charge:
    """One request in flight, until it is released, which is idempotent."""

    __slots__ = ("_quota", "_size")

    def __init__(self, quota: Quota, size: int) -> None:
        self._quota: Quota | None = quota
        self._size = size
        quota.requests += 1
        quota.bytes += size

    def __del__(self) -> None:
        self.give_back()  # of requests without a response: duplicated, or cut off

    def give_back(self) -> None:
        quota, self._quota = self._quota, None
        if quota is not None:
            quota.requests -= 1
            quota.bytes -= self._size

    def refusal(self) -> str:
        """Why it may not be run, after it was taken in: for the responses that wait by now."""
        quota = self._quota
        if quota is None or quota.bytes <= quota.most_bytes:
            return ""
        return quota.refusal(self._size)

    def now_takes(self, size: int) -> None:
        """The request is done, and its response of that many bytes waits to be written."""
        if self._quota is not None:
            self._quota.bytes += size - self._size
            self._size = size
