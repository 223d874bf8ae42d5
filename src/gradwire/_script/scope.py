"""Where a script runs: for which worker and in which context, on whatever thread that is.

A script that has waited goes on in a thread of torch's, and so does what it forks: threads that
know no variables of ours. torch hands them its own thread-local state, and in that it has room for
objects of Python. So a script whose calls may come from there begins with `enter`, which leaves a
note of the worker and the context in that place.

Private torch names, and what breaks without them: `_stash_obj_in_tls` and its kin (torch's own
checkpointing uses them). Scripts would lose context and worker where they wait or fork. Older ones
(2.6) give up a reference to the object that they have never taken: we take it for them.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from ..api import current_worker, enter
from ..errors import ClosedError

_KEY = "gradwire.script"


class _Note(NamedTuple):
    """Who left it, and where that was. Keeps nothing alive."""

    thread: object
    worker: weakref.ref[Any]
    context: weakref.ref[Any] | None


def _torch_takes_a_reference() -> bool:
    """Whether torch itself keeps what is stashed."""
    probe = object()
    before = sys.getrefcount(probe)
    torch._C._stash_obj_in_tls(f"{_KEY}.probe", probe)
    is_taken = sys.getrefcount(probe) > before
    if not is_taken:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(probe))
    return is_taken


_is_kept = _torch_takes_a_reference()


def _stash(left: _Note | None) -> None:
    if not _is_kept:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(left))
    torch._C._stash_obj_in_tls(_KEY, left)


class _Here(threading.local):
    """This thread, as long as Python knows it."""

    def __init__(self) -> None:
        self.thread = object()


_here = _Here()


def note() -> None:
    """Leave a note of where this thread is, for those that go on with its script."""
    if inherited() is not None:
        return
    try:
        worker = current_worker()
    except ClosedError:
        _stash(None)
        return
    context = worker.autograd.contexts.current()
    kept = None if context is None else weakref.ref(context)
    _stash(_Note(_here.thread, weakref.ref(worker), kept))


def inherited() -> _Note | None:
    """The note of the thread that began this script, if that was another one."""
    if not torch._C._is_key_in_tls(_KEY):
        return None
    found: _Note | None = torch._C._get_obj_in_tls(_KEY)
    return None if found is None or found.thread is _here.thread else found


@contextmanager
def entered() -> Iterator[bool]:
    """Be where the script was begun; whether this is a thread of torch's."""
    found = inherited()
    worker = None if found is None else found.worker()
    if found is None or worker is None:
        yield False
        return
    context = None if found.context is None else found.context()
    before = enter(worker)
    try:
        with worker.autograd.contexts.entered(context):
            yield True
    finally:
        enter(before)
