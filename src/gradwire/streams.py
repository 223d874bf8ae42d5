"""Which stream of a GPU does what, so that nobody has to wait on the host for it.

The rules, on which all layers rely:

* A tensor leaves on the stream that is current where it is sent: what was begun there before comes
  before, and what is begun later cannot change what arrives.
* Tensors arrive on the default streams, and what other workers ask for runs on them. So do backward
  passes. What one worker does for others is done in the order in which it was begun.
* Whoever takes a tensor to another stream makes that one wait for the default one (`take`). Whoever
  leaves one for others makes the default stream wait for theirs (`publish`).

Where a program makes no streams of its own, all is on the default ones, and nothing ever waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import fields, is_dataclass
from typing import Any

import torch

in_use = False
"""Whether a tensor of a device was ever sent or received here: until then none of this is asked."""

_NOTHING = nullcontext()


def note() -> None:
    """A tensor of a device is sent or received."""
    global in_use
    in_use = True


def elsewhere() -> list[torch.cuda.Stream]:
    """The streams that this thread has made current in place of default ones."""
    if not torch.cuda.is_initialized():
        return []
    return [
        torch.cuda.current_stream(index)
        for index in range(torch.cuda.device_count())
        if torch.accelerator.current_stream(index).stream_id
    ]


def default() -> AbstractContextManager[Any]:
    """A context with the default streams current, after what this thread has begun on others.

    Other streams that were current go on after it.
    """
    found = elsewhere()
    return _Default(found) if found else _NOTHING


def for_others() -> AbstractContextManager[Any]:
    """As `default`, for what this thread does on behalf of others; nothing where none is in use."""
    return default() if in_use else _NOTHING


class _Default(ExitStack):
    def __init__(self, others: list[torch.cuda.Stream]) -> None:
        super().__init__()
        self._others = others

    def __enter__(self) -> _Default:
        publish()
        for other in self._others:
            self.callback(other.wait_stream, torch.cuda.default_stream(other.device))
        for other in self._others:
            default = torch.cuda.default_stream(other.device)
            self.enter_context(torch.cuda.stream(default))
        return super().__enter__()


def reset() -> None:
    """Make the default streams current, if a function has left others so."""
    for stream in elsewhere():
        default = torch.cuda.default_stream(stream.device)
        default.wait_stream(stream)
        torch.cuda.set_stream(default)


def publish() -> None:
    """Have the default streams wait for what this thread has begun on others."""
    for stream in elsewhere():
        torch.cuda.default_stream(stream.device).wait_stream(stream)


def take(value: Any) -> None:
    """Have this thread's streams wait for what the default ones do for a value."""
    for stream in elsewhere():
        stream.wait_stream(torch.cuda.default_stream(stream.device))
        for tensor in _tensors(value):
            if tensor.device == stream.device:
                # Else its memory could be used again while the stream reads it.
                tensor.record_stream(stream)


def keep(tensor: torch.Tensor) -> None:
    """See that its memory is not used again before this thread's current stream is done with it.

    It may have been made on another one. Where it was made on this one, that does nothing.
    """
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Those in lists, tuples, sets, dicts and dataclasses, however deep."""
    seen, left = set[int](), [value]
    while left:
        one = left.pop()
        if isinstance(one, torch.Tensor):
            yield one
        elif id(one) not in seen:
            seen.add(id(one))
            left += _parts(one)


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, list | tuple | set | frozenset):
        return value
    if isinstance(value, dict):
        return value.values()
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name, None) for field in fields(value)]
    return ()
