"""Where a script runs: for which worker and in which context, on whatever thread that is.

A script that has waited goes on in a thread of torch's, and so does what it forks: threads that
know no variables of ours. torch hands them its own thread-local state, and in that it has room for
objects of Python. So a script whose calls may come from there begins with `note`, which leaves a
note of the worker and the context in that place. Whoever asks for the current worker or context in
such a thread, be it an operator or Python that the script runs, is told those of the note.

A note is an object of Python, so whatever lets go of it takes Python's lock. A thread's own state
goes when the thread does, which is after Python has forgotten it: if Python ends at that moment,
the process is aborted. So threads take their note down before they end (`_Departure`). Some
versions of torch (2.6, 2.9) have no function for that: there, the end of the process waits for
threads that are about to go.

Private torch names, and what breaks without them: `_stash_obj_in_tls` and its kin (torch's own
checkpointing uses them) and `_current_graph_task_id`. Scripts would lose context and worker where
they wait or fork. Older ones (2.6) give up a reference to the object that they have never taken: we
take it for them.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
import time
import weakref
from collections import deque
from typing import Any, NamedTuple

import torch

from .. import api
from .._autograd import contexts
from ..errors import ClosedError

_KEY = "gradwire.script"
_remove: Any = getattr(torch._C, "_remove_obj_from_tls", None)


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
    if _remove is not None:
        _remove(f"{_KEY}.probe")
    return is_taken


_is_kept = _torch_takes_a_reference()


def _stash(left: _Note | None) -> None:
    if not _is_kept:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(left))
    torch._C._stash_obj_in_tls(_KEY, left)


class _Departure:
    """Goes when its thread ends, in that thread, while Python still knows it."""

    def __init__(self) -> None:
        self._number = threading.get_native_id()

    def __del__(self, is_too_late: Any = sys.is_finalizing) -> None:
        if is_too_late():
            return
        if _remove is None:
            _going.append(self._number)
        elif torch._C._is_key_in_tls(_KEY):
            _remove(_KEY)


_going: deque[int] = deque(maxlen=1000)
"""The last threads that have ended with their note, where torch cannot take it down."""


class _Here(threading.local):
    def __init__(self) -> None:
        self.thread = object()
        self.departure: _Departure | None = None


_here = _Here()


def _wait_for_those_that_go() -> None:
    """Wait until the threads that Python has forgotten are gone, on Linux; for a second at most.

    From Python 3.13 on whoever joins a thread has waited for that already.
    """
    deadline = time.monotonic() + 1.0
    while _going and time.monotonic() < deadline:
        if os.path.exists(f"/proc/self/task/{_going[-1]}"):
            time.sleep(0.001)
        else:
            _going.pop()


if _remove is None:
    atexit.register(_wait_for_those_that_go)


def note() -> None:
    """Record this thread's worker and context, for other threads that continue its script."""
    if inherited() is not None:
        return
    if _here.departure is None and _is_pythons():
        _here.departure = _Departure()
    try:
        worker = api.current_worker()
    except ClosedError:
        _stash(None)
        return
    context = worker.autograd.contexts.current()
    kept = None if context is None else weakref.ref(context)
    _stash(_Note(_here.thread, weakref.ref(worker), kept))


def _is_pythons() -> bool:
    """Whether Python has started this thread; to others it comes and goes with each call."""
    me = threading.get_ident()
    known = (thread for thread in threading.enumerate() if thread.ident == me)
    return not all(isinstance(thread, threading._DummyThread) for thread in known)


def inherited() -> _Note | None:
    """The note of the thread that began this script, if that was another one.

    torch's autograd engine hands the state to its threads as well. What hooks do there is no part
    of a script, and the note may be of one that has ended long ago.
    """
    if not torch._C._is_key_in_tls(_KEY) or torch._C._current_graph_task_id() >= 0:
        return None
    found: _Note | None = torch._C._get_obj_in_tls(_KEY)
    return None if found is None or found.thread is _here.thread else found


def install() -> None:
    """Have all that runs in a thread of torch's, Python included, be where its script was begun.

    It is not taken out: scripts that are compiled continue to work.
    """
    api.inherited = _inherited_worker
    contexts.inherited = _inherited_context


def _inherited_worker() -> Any:
    found = inherited()
    return None if found is None else found.worker()


def _inherited_context(asked: contexts.Contexts) -> contexts.Context | None:
    """The context of a script; None if that is of another worker than the one that asks."""
    found = inherited()
    if found is None or found.context is None:
        return None
    worker = found.worker()
    is_its_own = worker is not None and worker.autograd.contexts is asked
    return found.context() if is_its_own else None
