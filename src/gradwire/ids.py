"""Names and numbers of workers.

A worker has a name, chosen by people, and an id, a number that is never reused in a world.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


class WorkerInfo(NamedTuple):
    """A worker's name and id.

    >>> gw.WorkerInfo("trainer", 0)
    WorkerInfo(name='trainer', id=0)
    """

    name: str
    id: int


def check_name(name: object) -> str:
    """The name, if it is a valid name of a worker.

    Raises:
        ValueError: it is not; says why.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(
            f"worker name {name!r} is not valid: use 1 to 128 letters, digits, "
            "and any of '_', '.', ':', '-'"
        )
    return name
