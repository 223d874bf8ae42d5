"""Calls in profiles: how long they took, and what was done for them on the other worker.

This is for torch's older profiler (`torch.autograd.profiler_legacy.profile`), as in torch: the
newer one shows the operators of its own process only. While one is on in a thread, a call made
there is recorded as `rpc_async#func(worker0 -> worker1)`. The function is run under a profiler
over there, and what that saw is brought here before the answer is, with the call's name in front.
The profiler is C++ and takes no events from others; so they are added when its block ends.
"""

from __future__ import annotations

import itertools
import threading
from typing import Any

import torch
from torch.autograd import profiler_legacy
from torch.autograd.profiler_util import EventList, FunctionEvent

from ..._rpc.function_runner import async_execution, is_async_execution
from .. import state
from .internal import RPCExecMode, _build_rpc_profiling_key
from .scripts import profiled_name

_REMOTE = "#remote_op: "

_What = tuple[Any, Any, Any, Any]  # to, func, args, kwargs


class _Here(threading.local):
    """The profilers that are on in this thread, innermost last."""

    def __init__(self) -> None:
        self.profiles: list[Any] = []


_here = _Here()
_tokens = itertools.count()
_awaited: dict[int, tuple[str, Any]] = {}
"""By token: the name of a call, and the profiler to which its events go."""


def is_on() -> bool:
    """Whether calls made in this thread are profiled."""
    return bool(_here.profiles)


def call(agent: Any, mode: RPCExecMode, what: _What, timeout: float | None) -> Any:
    """Call a function and record it; the future of its result."""
    recorded = _Recorded(agent, mode, what)
    future = agent.call_async(*recorded.what, timeout)
    return recorded.until(future)


def remote(agent: Any, what: _What, timeout: float) -> Any:
    """Call a function and record it; a reference to its result."""
    recorded = _Recorded(agent, RPCExecMode.REMOTE, what)
    rref = agent.remote(*recorded.what, timeout)
    rref._set_profiling_future(recorded.until(rref._get_future()))
    return rref


class _Recorded:
    """A call that is recorded from now on; `what` is to be called in its place."""

    def __init__(self, agent: Any, mode: RPCExecMode, what: _What) -> None:
        to, func, args, kwargs = what
        profile = _here.profiles[-1]
        names = agent.worker.name, agent.find(to).name
        key = _build_rpc_profiling_key(mode, profiled_name(func), *names)
        self._token = next(_tokens)
        _awaited[self._token] = key, profile
        record = torch.autograd.profiler.record_function(key)
        record.__enter__()
        self._done: torch.futures.Future[None] = torch.futures.Future()
        self._ended = record._call_end_callbacks_on_future(self._done)
        settings = {
            "record_shapes": profile.record_shapes,
            "profile_memory": profile.profile_memory,
        }
        back = agent.worker.id, self._token
        self.what = to, run_profiled, (func, args, kwargs, settings, back), None

    def until(self, future: Any) -> Any:
        """A future like this one; when it is done, so is the recording."""

        def finish(done: Any) -> Any:
            _awaited.pop(self._token, None)
            self._done.set_result(None)
            self._ended.wait()
            return done.value()

        return future.then(finish)


def run_profiled(
    func: Any, args: Any, kwargs: Any, settings: dict[str, bool], back: tuple[int, int]
) -> Any:
    """Run a function for another worker, and tell it what a profiler saw."""
    caller, token = back
    with profiler_legacy.profile(**settings) as profile:
        value = func(*(args or ()), **(kwargs or {}))
        if is_async_execution(func):
            value = value.wait()  # its end is part of what is seen
    agent = state.get()
    with agent.worker.autograd.contexts.entered(None):  # not part of the user's program
        agent.call_sync(
            caller, take_events, (token, _portable(profile.function_events)), None, 0
        )
    return value


def take_events(token: int, events: list[FunctionEvent]) -> None:
    """What a profiler on another worker saw of a call from here."""
    if token in _awaited:
        key, profile = _awaited[token]
        for event in events:
            event.name = f"{key}{_REMOTE}{event.name}"
            event.is_remote = True
        _remote_events(profile).extend(events)


def _portable(events: EventList) -> list[FunctionEvent]:
    me = state.get().worker.id
    for event in events:
        if not event.is_remote:
            event.node_id = me
    return list(events)


def _remote_events(profile: Any) -> list[FunctionEvent]:
    found: list[FunctionEvent] = profile.__dict__.setdefault("remote_events", [])
    return found


# In place of the profiler's own


def install() -> None:
    """Have profilers tell when they are on, and take events from others when they end."""
    kind: Any = profiler_legacy.profile
    enter, leave = kind.__enter__, kind.__exit__

    def __enter__(self: Any) -> Any:  # noqa: N807
        entered = enter(self)
        if self.enabled:
            _here.profiles.append(self)
        return entered

    def __exit__(self: Any, *error: Any) -> Any:  # noqa: N807
        if self in _here.profiles:
            _here.profiles.remove(self)
        left = leave(self, *error)
        if self.enabled and state.agent is not None:
            self.function_events[:] = _portable(self.function_events)
            self.function_events.extend(_remote_events(self))
        return left

    kind.__enter__, kind.__exit__ = __enter__, __exit__


# Profilers for all that a process does for others

_servers: list[ServerProfile] = []


class ServerProfile(profiler_legacy.profile):
    """Sees what this process does for others from `__enter__` to `__exit__`, in all threads."""

    def __enter__(self) -> ServerProfile:
        self.process_global_function_events: list[list[FunctionEvent]] = []
        _servers.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        _servers.remove(self)
        seen = itertools.chain.from_iterable(self.process_global_function_events)
        self.function_events = EventList(
            list(seen), use_device=None, profile_memory=self.profile_memory
        )
        self.function_events._tree_built = True  # by each of them


def for_this_process(function: Any) -> Any:
    """A function whose calls are seen by the profilers of this process."""
    return _Seen(function) if _servers and not is_on() else function


def unwrapped(function: Any) -> Any:
    """What `for_this_process` was given."""
    return function.function if type(function) is _Seen else function


class _Seen:
    def __init__(self, function: Any) -> None:
        self.function = function
        if is_async_execution(function):
            async_execution(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with profiler_legacy.profile() as profile:
            value = self.function(*args, **kwargs)
        for server in _servers:
            server.process_global_function_events.append(list(profile.function_events))
        return value
