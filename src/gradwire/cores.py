"""How many intra-op threads torch uses where several workers share the cores of a host.

By default every process's torch uses all cores, and the OpenMP teams of two processes spin against
each other: it made a trainer and a server on two cores ten times slower. So torch's number of
threads is divided among the workers that may run on the same cores, unless the user has chosen a
number.

What torch offers for this (2.6 to 2.13, with libgomp and with Intel's OpenMP):

* `torch.set_num_threads` sets the number of the calling thread and that of the process, which
  applies to all threads that have not run a parallel operation yet. A thread adopts the process's
  number once, at its first parallel operation or when it reads the number.
* So an existing thread keeps its number. In worlds of fixed size the number is set before any
  function can run. In elastic worlds `follow` updates the calling thread.
* `torch.get_num_threads` returns the calling thread's number. The process's is what a new thread
  gets.

There is no way to ask whether the user has called `torch.set_num_threads`. It is assumed if the
number differs from the one when gradwire was imported, or is neither that of the cores nor that of
the physical cores (MKL's default, and hence torch's). Users who set exactly torch's default
must use `torch_threads` instead.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

log = logging.getLogger("gradwire")

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Where users say how many threads they want."""

_TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


def usable_cores() -> frozenset[int]:
    """The cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def to_mask(cores: Iterable[int]) -> str:
    """A set of cores as a hexadecimal number, for cards."""
    return f"{sum(1 << core for core in cores):x}"


def share(threads: int, mine: str, others: Iterable[str]) -> int:
    """This worker's part of `threads`, at least 1, where others use these cores; all as masks."""
    own, masks = int(mine, 16), [int(mask, 16) for mask in others]
    cores = [core for core in range(own.bit_length()) if own >> core & 1]
    if not cores:
        return threads
    part = sum(1 / (1 + sum(mask >> core & 1 for mask in masks)) for core in cores)
    return max(1, int(threads * part / len(cores) + 1e-6))


def process_threads() -> int:
    """The number that torch gives to new threads, which is the process's."""
    found: list[int] = []
    probe = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    try:
        probe.start()
    except RuntimeError:  # no thread to be had: this one's number is the best guess
        return torch.get_num_threads()
    probe.join()
    return found[0]


def _set(number: int) -> None:
    global _is_set
    if not _is_set:
        os.register_at_fork(after_in_child=_renew_pool)
        _is_set = True
    torch.set_num_threads(number)


def _renew_pool() -> None:
    """In a forked child: make torch recreate the pool that came with `set_num_threads`.

    Its threads (of XNNPACK) do not exist in the child, which would crash at exit when it joins
    them.
    """
    torch.set_num_threads(torch.get_num_threads())


_is_set = False
_at_import = (torch.get_num_threads(), usable_cores())


def why_kept(environment: Mapping[str, str] = os.environ) -> str | None:
    """The evidence that the user has chosen the number of threads; None if torch has."""
    for name in VARIABLES:
        if environment.get(name):
            return f"{name}={environment[name]}"
    number, cores = _at_import
    now = process_threads()
    likely = {len(cores), _physical(cores)}
    if now != number or (likely != {0} and now not in likely):
        return "torch.set_num_threads was called"
    return None


def _physical(cores: Iterable[int]) -> int:
    """How many physical cores these are; 0 if the system does not tell."""
    try:
        return len({Path(_TOPOLOGY.format(core)).read_text() for core in cores})
    except OSError:
        return 0


class SharedCores:
    """One worker's control of torch's threads, from `divide` to `close`. `wanted`: the option."""

    def __init__(self, name: str, wanted: int | None) -> None:
        self._name = name
        self._wanted = wanted
        self._lock = threading.Lock()
        self._before: int | None = None  # to be put back; None: nothing was changed
        self._given = 0
        self._is_ours: bool | None = None  # None: not decided yet
        self._changes = 0
        self._thread = _Thread()

    def __repr__(self) -> str:
        return f"<SharedCores of {self._name!r}: {self._given or 'torch decides'}>"

    def divide(self, mine: str, others: list[str]) -> None:
        """Set this worker's number, where others on its host may run on these cores (masks)."""
        with self._lock:
            if self._is_ours is None:
                self._is_ours = self._begin()
            elif self._is_ours and process_threads() != self._given:
                self._is_ours = False  # the user has called torch.set_num_threads
            if not self._is_ours:
                return
            assert self._before is not None
            number = self._wanted or share(self._before, mine, others)
            is_first, before = not self._given, self._given or self._before
            self._given = number
            if number != before:
                _set(number)
                self._changes += 1
                self._thread.seen = self._changes
            elif not is_first:
                return
        cores = int(mine, 16).bit_count()
        why = (
            "torch_threads"
            if self._wanted
            else f"{1 + len(others)} workers of this host"
        )
        text = "worker %r: torch uses %d threads on %d cores (%s)"
        log.info(text, self._name, number, cores, why)

    def follow(self) -> None:
        """Give the calling thread, which may be older, the process's number."""
        if self._thread.seen != self._changes:
            self._thread.seen = self._changes
            _set(process_threads())

    def close(self) -> None:
        """Restore the previous number, unless the user has changed it since."""
        with self._lock:
            if self._is_ours and process_threads() == self._given != self._before:
                assert self._before is not None
                _set(self._before)
            self._is_ours = False

    def _begin(self) -> bool:
        """Whether to divide at all."""
        if self._wanted == 0:
            return False
        reason = None if self._wanted else why_kept()
        if reason is None:
            self._before = process_threads()
            return True
        number = torch.get_num_threads()
        log.info("worker %r: torch keeps %d threads: %s", self._name, number, reason)
        return False


class _Thread(threading.local):
    """Which change this thread has followed."""

    seen = 0
