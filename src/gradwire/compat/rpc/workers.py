"""Who a worker is, as torch writes it."""

from __future__ import annotations

import re

from ...ids import WorkerInfo as _WorkerInfo

_NAME = re.compile(r"[A-Za-z0-9-_:]*")
_MOST = 128


class WorkerInfo(_WorkerInfo):
    """A worker's name and id; `WorkerInfo(name=..., id=...)`."""

    def __new__(cls, name: str, id: int) -> WorkerInfo:
        if not (0 < len(name) < _MOST and _NAME.fullmatch(name)):
            raise RuntimeError(
                "Worker name must match ^[A-Za-z0-9-_:]*$, and must be non-empty and "
                f"shorter than {_MOST} chars, but got {name}"
            )
        return super().__new__(cls, name, id)

    def __repr__(self) -> str:
        return f"WorkerInfo(id={self.id}, name={self.name})"

    __str__ = __repr__


def known(info: _WorkerInfo) -> WorkerInfo:
    """A worker of the world, as torch shows it."""
    return tuple.__new__(WorkerInfo, info)
