"""Which tensor of a message it is that cannot be sent, for error messages.

Only asked once sending it has failed: what is searched may be large.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch

Part = tuple[str, Any]
"""How it is written, and what it is."""


def describe_first(parts: Iterable[Part], is_it: Callable[[torch.Tensor], bool]) -> str:
    """The first tensor that is one of those meant: where it is, its shape and its dtype."""
    seen = set[int]()
    left = [iter(parts)]
    while left:
        part = next(left[-1], None)
        if part is None:
            left.pop()
            continue
        path, value = part
        if isinstance(value, torch.Tensor):
            if is_it(value):
                shape = tuple(value.shape)
                return f"{path}, a tensor of shape {shape} and {value.dtype},"
        elif id(value) not in seen:
            seen.add(id(value))
            left.append(_parts(path, value))
    return "a tensor"  # in an object that has its own way to be pickled


def _parts(path: str, value: Any) -> Iterator[Part]:
    if isinstance(value, dict):
        yield from ((f"{path}[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"{path}[{index}]", item) for index, item in enumerate(value))
    elif isinstance(value, set | frozenset):
        yield from ((f"an item of {path}", item) for item in value)
    elif is_dataclass(value) and not isinstance(value, type):
        names = (field.name for field in fields(value))
        yield from ((f"{path}.{name}", getattr(value, name, None)) for name in names)
    elif type(getattr(value, "__dict__", None)) is dict:
        yield from ((f"{path}.{name}", item) for name, item in vars(value).items())
